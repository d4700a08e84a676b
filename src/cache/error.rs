//! Why a cache could not be made, or does not take what it was given.

use super::key::KeyError;
use crate::types::{ROW_ALIGN, Version};

/// Why a cache could not be made, or does not take what it was given.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The bound is below what one row of each size takes.
    #[error("cache.bytes: {got} cannot hold a row of each of {sizes} row sizes, minimum {minimum}")]
    TooSmall {
        /// The bound.
        got: usize,
        /// The least bound for these tables.
        minimum: usize,
        /// How many different row sizes the tables have.
        sizes: usize,
    },
    /// An option is not a share, or the low watermark is above the high one.
    #[error("{field}: expected {expected}, got {got}")]
    Option {
        /// Which option.
        field: &'static str,
        /// What it may be.
        expected: &'static str,
        /// What it was.
        got: f64,
    },
    /// The tables have no flat keys.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A version that is not newer than the one that is current.
    #[error("version {got}: expected one newer than {current}")]
    Version {
        /// The version that was to be current.
        got: Version,
        /// The one that is.
        current: Version,
    },
    /// Rows of another version than the one that is current.
    #[error("rows of version {got}: expected those of version {current}")]
    NotCurrent {
        /// Whose rows came.
        got: Version,
        /// The current one.
        current: Version,
    },
    /// The system gave no memory.
    #[error("cache.bytes: {bytes} bytes refused: {source}")]
    Memory {
        /// What was asked for.
        bytes: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// There is no such table.
    #[error("table {got}: expected one of {tables} tables")]
    Table {
        /// The table's place.
        got: usize,
        /// How many there are.
        tables: usize,
    },
    /// The table has no such row.
    #[error("table {table}: id {got} is past its {rows} rows")]
    Id {
        /// The table's place.
        table: usize,
        /// The id.
        got: u64,
        /// How many rows there are.
        rows: u64,
    },
    /// A row is not as long as its table's are.
    #[error("table {table}: expected rows of {expected} bytes, got {got}")]
    RowBytes {
        /// The table's place.
        table: usize,
        /// What came.
        got: usize,
        /// The length of the table's rows.
        expected: usize,
    },
    /// A table's rows have a length that no slot has.
    #[error("table {table}: row bytes: expected a multiple of {ROW_ALIGN} above 0, got {got}")]
    RowAlign {
        /// The table's place.
        table: usize,
        /// What came.
        got: usize,
    },
    /// A batch has more ids than a lookup can number.
    #[error("batch: {got} ids, limit {limit}")]
    Occurrences {
        /// What came.
        got: usize,
        /// The limit.
        limit: usize,
    },
}
