//! Errors of the flat cache.

#![allow(missing_docs)] // the messages are the documentation

use std::time::Duration;

use super::key::KeyError;
use crate::types::{ROW_ALIGN, Version};

/// Why a cache cannot be created, or rejects its input.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    #[error("cache.bytes: {got} cannot hold a row of each of {sizes} row sizes, minimum {minimum}")]
    TooSmall { got: usize, minimum: usize, sizes: usize },
    #[error("{field}: expected {expected}, got {got}")]
    Option { field: &'static str, expected: &'static str, got: f64 },
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("version {0}: expected another one than the current version")]
    Version(Version),
    #[error("batches that began before the switch have not ended for {} s", .0.as_secs_f32())]
    Unfinished(Duration),
    #[error("host rows of version {got}: expected the current version {current}")]
    NotCurrent { got: Version, current: Version },
    #[error("cache.bytes: cannot allocate {bytes} bytes: {source}")]
    Memory { bytes: usize, source: std::io::Error },
    #[error("table {got}: expected one of {tables} tables")]
    Table { got: usize, tables: usize },
    #[error("table {table}: id {got}: expected an id below {rows}")]
    Id { table: usize, got: u64, rows: u64 },
    #[error("table {table}: expected rows of {expected} bytes, got {got}")]
    RowBytes { table: usize, got: usize, expected: usize },
    #[error("table {table}: row bytes: expected a multiple of {ROW_ALIGN} above 0, got {got}")]
    RowAlign { table: usize, got: usize },
    #[error("batch: {got} ids, limit {limit}")]
    Occurrences { got: usize, limit: usize },
}
