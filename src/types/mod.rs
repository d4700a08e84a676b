//! The data that modules exchange: ids, batches, scores, and the storage of a row's elements.
//!
//! A [`RawBatch`] has the contents of a file or a request, unchanged. A [`Batch`] is the same data after the
//! schema's hashing and transforms, with one id space per table. [`Scores`] is the result. All data is stored
//! by column.

pub(crate) mod batch;
pub(crate) mod element;
mod named;
mod row_id;

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub(crate) use batch::RawKind;
pub use batch::{Batch, Jagged, RawBatch, RawFeature, RawValues};
pub use element::Element;
pub(crate) use element::{ROW_ALIGN, RowError};
pub(crate) use named::named;
pub use row_id::RowId;
use serde::{Deserialize, Serialize};

/// Index of a table in `Schema::tables`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TableId(pub u32);

impl TableId {
    /// The index as a `usize`.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// The key of a row in the cache: a table code followed by feature bits (`cache/key.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct FlatKey(pub u64);

/// A version of a model. Later versions have greater numbers; the number is the name of the version's
/// directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Version(pub u64);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The time, in milliseconds since 1970; 0 before.
pub(crate) fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// Selects a version of a model, for a label or to continue training from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionSelector {
    /// The highest good version.
    Latest,
    /// This one.
    Version(Version),
}

/// What [`VersionSelector::Latest`] is called.
const LATEST: &str = "latest";

impl VersionSelector {
    /// Reads `latest` or a number from 1.
    #[must_use]
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text {
            LATEST => Some(Self::Latest),
            number => number.parse().ok().filter(|n| *n > 0).map(|number| Self::Version(Version(number))),
        }
    }

    /// The version, if this is the highest good one.
    #[must_use]
    pub(crate) fn version(self, latest: Version) -> Version {
        match self {
            Self::Latest => latest,
            Self::Version(version) => version,
        }
    }
}

impl fmt::Display for VersionSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Latest => f.write_str(LATEST),
            Self::Version(version) => version.fmt(f),
        }
    }
}

/// An id of a request that its table does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbsentId {
    /// Index of the sample in the batch.
    pub sample: u32,
    /// Index of the feature in the schema.
    pub feature: u32,
}

/// What a batch took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// To find and pool the rows, over all threads.
    pub lookup: Duration,
    /// In the dense layers, over all threads.
    pub dense: Duration,
    /// From its beginning to its end. The batcher measures it.
    pub total: Duration,
}

/// A model's result for a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Scores {
    /// The version of the model that computed all of these scores.
    pub version: Version,
    /// One click probability per sample, between 0 and 1.
    pub probabilities: Vec<f32>,
    /// If the batch asks for them: the logit of each sample; the probability is its sigmoid. Otherwise empty.
    pub logits: Vec<f32>,
    /// Ids that got their table's default row, in sample order.
    pub absent: Vec<AbsentId>,
    /// For the log and the traces.
    pub times: Times,
}

impl Scores {
    /// Most bytes that the lists of a batch's scores take. Each of its ids may be absent.
    #[must_use]
    pub(crate) fn most_bytes(batch: &Batch) -> usize {
        let numbers = batch.samples * if batch.logits { 2 } else { 1 };
        let ids: usize = batch.features.iter().map(|column| column.ids.len()).sum();
        numbers * size_of::<f32>() + ids * size_of::<AbsentId>()
    }
}
