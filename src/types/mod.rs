//! The words that every module speaks: ids, keys, versions, batches, scores, and the two
//! traits by which layers that must not know each other meet.
//!
//! Data travels as columns. A [`RawBatch`] is what a file or a request says, untouched; a
//! [`Batch`] is the same after the schema's hashing and transforms, with one id space a table;
//! [`Scores`] is what comes back. [`Predict`] is driven by the batcher and implemented by the
//! engine. [`HostMemory`] is how the store's RAM tier takes its memory from a device.

pub mod element;
mod huge;
mod number_map;
pub mod prefetch;

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::schema::Schema;

pub use element::{Element, ROW_ALIGN, RowError};
pub use huge::{Huge, huge_pages};
pub use number_map::NumberMap;

/// A table's place in `Schema::tables`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TableId(pub u32);

impl TableId {
    /// The place as an index.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A row's name in the cache: a table code followed by feature bits (DESIGN.md section 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlatKey(pub u64);

/// Scatters a number over 64 bits: the finaliser of SplitMix64, a bijection in which every input bit
/// reaches every output bit.
#[inline]
#[must_use]
pub fn scatter(number: u64) -> u64 {
    let mut x = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// A number hashed into so many bits, 0 to 64: the high ones of [`scatter`].
#[inline]
#[must_use]
pub fn fold(number: u64, bits: u32) -> u64 {
    scatter(number).checked_shr(u64::BITS - bits).unwrap_or(0)
}

/// One published state of a model. Numbers grow; directories are named by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version(pub u64);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One column of variable-length values: sample `s` owns `values[offsets[s]..offsets[s + 1]]`.
///
/// `offsets` has `samples + 1` entries, starts at 0, never falls, and ends at the values' count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Jagged {
    /// Where each sample's ids begin, and a last entry where they all end.
    pub offsets: Vec<u32>,
    /// The ids of all samples, in sample order.
    pub ids: Vec<u64>,
}

impl Default for Jagged {
    fn default() -> Self {
        Self { offsets: vec![0], ids: Vec::new() }
    }
}

impl Jagged {
    /// The ids of one sample.
    #[must_use]
    pub fn sample(&self, s: usize) -> &[u64] {
        &self.ids[self.offsets[s] as usize..self.offsets[s + 1] as usize]
    }

    /// Appends one sample's ids.
    pub fn push(&mut self, ids: &[u64]) {
        self.ids.extend_from_slice(ids);
        self.offsets.push(self.ids.len() as u32);
    }

    /// Appends every sample of `other`.
    pub fn append(&mut self, other: &Jagged) {
        let base = self.ids.len() as u32;
        self.ids.extend_from_slice(&other.ids);
        self.offsets.extend(other.offsets[1..].iter().map(|end| base + end));
    }
}

/// Samples ready for a model: transformed dense values and, per feature of the schema, ids.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// How many samples.
    pub samples: usize,
    /// `samples x dense_width`, row-major, after the schema's transforms.
    pub dense: Vec<f32>,
    /// One column a feature, in the schema's order.
    pub features: Vec<Jagged>,
}

impl Batch {
    /// A batch of no samples for `features` columns.
    #[must_use]
    pub fn empty(features: usize) -> Self {
        Self { samples: 0, dense: Vec::new(), features: vec![Jagged::default(); features] }
    }

    /// Appends every sample of `other`, which must have as many columns and as wide a dense part.
    pub fn append(&mut self, other: &Batch) {
        debug_assert_eq!(self.features.len(), other.features.len());
        self.samples += other.samples;
        self.dense.extend_from_slice(&other.dense);
        for (mine, theirs) in self.features.iter_mut().zip(&other.features) {
            mine.append(theirs);
        }
    }

    /// A batch of these samples alone, in this order.
    ///
    /// # Panics
    /// Where there are not so many samples.
    #[must_use]
    pub fn part(&self, samples: Range<usize>) -> Self {
        let width = self.dense.len().checked_div(self.samples).unwrap_or(0);
        let column = |column: &Jagged| {
            let offsets = &column.offsets[samples.start..=samples.end];
            let (from, to) = (offsets[0], offsets[samples.len()]);
            Jagged {
                offsets: offsets.iter().map(|offset| offset - from).collect(),
                ids: column.ids[from as usize..to as usize].to_vec(),
            }
        };
        Self {
            samples: samples.len(),
            dense: self.dense[samples.start * width..samples.end * width].to_vec(),
            features: self.features.iter().map(column).collect(),
        }
    }

    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.samples = 0;
        self.dense.clear();
        for feature in &mut self.features {
            feature.offsets.truncate(1);
            feature.ids.clear();
        }
    }
}

/// The values of one categorical column before hashing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RawValues {
    /// Ids that are rows already.
    Ids(Vec<u64>),
    /// Strings end to end in `bytes`; string `i` ends at `ends[i]` and begins where `i - 1` ended.
    Text {
        /// Every string's bytes.
        bytes: Vec<u8>,
        /// Where each string ends.
        ends: Vec<u32>,
    },
}

impl RawValues {
    /// How many values there are.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Ids(ids) => ids.len(),
            Self::Text { ends, .. } => ends.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One categorical column as a file or a request has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawFeature {
    /// `samples + 1` offsets into the values, as in [`Jagged`].
    pub offsets: Vec<u32>,
    /// The values of all samples.
    pub values: RawValues,
}

impl RawFeature {
    /// A column of ids, of no samples.
    #[must_use]
    pub fn ids() -> Self {
        Self { offsets: vec![0], values: RawValues::Ids(Vec::new()) }
    }

    /// A column of strings, of no samples.
    #[must_use]
    pub fn text() -> Self {
        Self { offsets: vec![0], values: RawValues::Text { bytes: Vec::new(), ends: Vec::new() } }
    }

    /// Empties the column and keeps its memory and its kind of values.
    pub fn clear(&mut self) {
        self.offsets.clear();
        self.offsets.push(0);
        match &mut self.values {
            RawValues::Ids(ids) => ids.clear(),
            RawValues::Text { bytes, ends } => {
                bytes.clear();
                ends.clear();
            }
        }
    }
}

/// Samples as a file or a request has them: no hashing, no transform. Columns stand in the
/// schema's order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RawBatch {
    /// How many samples.
    pub samples: usize,
    /// `samples x dense_width`, row-major, raw; a missing number is 0.
    pub dense: Vec<f32>,
    /// One column a feature, in the schema's order.
    pub features: Vec<RawFeature>,
    /// The label of each sample, 0 or 1, where the source has labels.
    pub labels: Option<Vec<f32>>,
}

impl RawBatch {
    /// Empties the batch, labels too, and keeps its memory.
    pub fn clear(&mut self) {
        self.samples = 0;
        self.dense.clear();
        self.labels = None;
        for feature in &mut self.features {
            feature.clear();
        }
    }
}

/// One id of a request that its table does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbsentId {
    /// Which sample of the batch had it.
    pub sample: u32,
    /// Which feature of the schema.
    pub feature: u32,
}

/// What a model says of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Scores {
    /// The version that every score of this batch was computed from.
    pub version: Version,
    /// One click probability a sample, between 0 and 1.
    pub probabilities: Vec<f32>,
    /// The ids that took their table's default, in sample order.
    pub absent: Vec<AbsentId>,
}

/// What a server tells of a model it serves.
#[derive(Clone, Debug)]
pub struct Description {
    /// The model's name.
    pub model: String,
    /// The version that scores now.
    pub version: Version,
    /// Its features, tables and architecture.
    pub schema: Arc<Schema>,
    /// Most samples in one call of [`Predict::predict`].
    pub max_samples: usize,
}

/// Why a batch got no scores.
#[derive(Debug, thiserror::Error)]
pub enum PredictError {
    /// An id past a table whose default is `error`.
    #[error(
        "feature {feature:?}: id {id} is past the {rows} rows of table {table:?}, whose default is error"
    )]
    AbsentId {
        /// The feature's name.
        feature: String,
        /// The table's name.
        table: String,
        /// What came.
        id: u64,
        /// The limit.
        rows: u64,
    },
    /// The batch does not have the schema's shape.
    #[error("{field}: expected {expected}, got {got}")]
    Shape {
        /// Which part of the batch.
        field: String,
        /// What the schema asks for.
        expected: u64,
        /// What came.
        got: u64,
    },
    /// The engine's memory limit cannot hold the batch.
    #[error("{field}: needs {needed}, limit {limit}")]
    Capacity {
        /// The config key of the limit.
        field: &'static str,
        /// What the batch needs, in the key's unit.
        needed: u64,
        /// The limit.
        limit: u64,
    },
    /// The values of a sample are finite and what the model makes of them is not.
    #[error("score of sample {sample} is not finite: its values or the model's are too large for 32 bits")]
    NotFinite {
        /// Which sample of the batch.
        sample: usize,
    },
    /// The rows could not be read.
    #[error("store: {0}")]
    Store(String),
}

/// Scores batches with one model: the batcher drives it and the engine implements it.
pub trait Predict: Send + Sync {
    /// Scores every sample of the batch. A sample's score depends on nothing but itself and the
    /// version (DESIGN.md, promises 1 and 2).
    ///
    /// # Errors
    /// [`PredictError`] when the batch is not of the schema's shape, its rows cannot be read, or a score
    /// would not be a number.
    fn predict(&self, batch: &Batch) -> Result<Scores, PredictError>;

    /// The model's name, version, schema and limits.
    fn describe(&self) -> Description;

    /// Whether the model is loaded and warm.
    fn ready(&self) -> bool;

    /// Brings its metrics up to date: called before they are read, not for every batch.
    fn measure(&self) {}
}

/// Memory of the host that a device may have a say in: plain on `host`, pinned on `cuda`.
pub trait HostMemory: Send + Sync {
    /// Takes `bytes` of zeroed memory, aligned to 4 KiB.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the system refuses.
    fn take(&self, bytes: usize) -> Result<Box<dyn HostBlock>, OutOfHostMemory>;
}

/// A block of [`HostMemory`], given back when dropped.
pub trait HostBlock: Send + Sync {
    /// The bytes.
    fn bytes(&self) -> &[u8];
    /// The bytes, to write; none once they were shared.
    fn bytes_mut(&mut self) -> Option<&mut [u8]>;
    /// The memory itself, for the device that it is of to read as long as it has this; none where devices cannot.
    fn shared(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        None
    }
}

/// The system gave no memory.
#[derive(Debug, thiserror::Error)]
#[error("host memory: {bytes} bytes refused")]
pub struct OutOfHostMemory {
    /// What was asked for.
    pub bytes: usize,
}
