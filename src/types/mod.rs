//! The data that every module exchanges: ids, batches, scores, and how a row's elements are stored.
//!
//! A [`RawBatch`] holds what a file or a request contains, unchanged. A [`Batch`] is the same after the schema's
//! hashing and transforms, with one id space a table. [`Scores`] is the answer. All data is in columns.

pub(crate) mod batch;
pub(crate) mod element;
mod row_id;

use std::fmt;

pub use batch::{Batch, Jagged, RawBatch, RawFeature, RawValues};
pub use element::{Element, ROW_ALIGN, RowError};
pub(crate) use row_id::RowId;

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

/// A row's name in the cache: a table code followed by feature bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlatKey(pub u64);

/// One published state of a model. Numbers grow; directories are named by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version(pub u64);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
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
