//! How often each row is used: counted in one pass, ranked, and stored in a file. The counts fill a cache
//! before its first request, or rank rows for eviction.
//!
//! **Counting** is exact for a [`super::trace::Trace`], which holds every access ([`Ranked::of`]).
//! [`Counts`] counts accesses one by one without storing them, in a fixed number of bytes. It is exact
//! while all distinct rows fit. Otherwise a count is never too low and at most the *floor* too high, and
//! every row with more accesses than the floor is kept. [`summary`] describes the algorithm and the bounds
//! of the floor.
//!
//! **The file** is safetensors. `docs/file-formats.md` (Counts) lists its tensors and metadata.

mod file;
mod ranked;
mod stream;
pub(crate) mod summary;

use std::collections::TryReserveError;
use std::path::PathBuf;

pub(crate) use ranked::Ranked;
pub(crate) use stream::Counts;

/// A row of a table, and how often it was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowCount {
    pub row: u64,
    pub count: u64,
}

/// Why counts cannot be kept, written or read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // The messages say what the fields are.
pub(crate) enum CountsError {
    #[error("counts: {}: {cause}", path.display())]
    Io { path: PathBuf, cause: std::io::Error },
    /// The file is damaged or of another format.
    #[error("counts: {}: {reason}", path.display())]
    Form { path: PathBuf, reason: String },
    #[error("counts: {bytes} bytes cannot be allocated")]
    Memory { bytes: usize, source: TryReserveError },
}
