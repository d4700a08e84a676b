//! How often each row is asked for: counted in one pass, ranked, and kept in a file, for whoever fills
//! a cache before its first request or puts rows out by rank.
//!
//! **Counting** is exact of a [`super::trace::Trace`], which holds every access ([`Ranked::of`]).
//! [`Counts`] takes accesses as they come and keeps none of them, in as many bytes as it is given: exact
//! while the distinct rows fit, and past that each count is never too low and at most the *floor* too
//! high, and every row with more accesses than the floor is there. How, and how low the floor is,
//! is on the page of [`summary`].
//!
//! **The file** is safetensors: for each table of the schema `<table>.rows` and `<table>.counts`, u64 of
//! one dimension and of the same length, by descending count and, among equals, ascending row. Its
//! metadata are `format = "flechette-counts"`, `version = "1"`, `tables`, the names in the schema's
//! order as a JSON list, and `floor`, 0 where the counts are exact.
//!
//! ```no_run
//! # fn main() -> Result<(), flechette::planner::counts::CountsError> {
//! use flechette::planner::counts::Ranked;
//! let ranked = Ranked::read("ids.safetensors".as_ref())?;
//! if let Some(table) = ranked.table("C3") {
//!     let hottest = table.rows.first(); // and table.counts.first() accesses
//! }
//! for row in ranked.hottest() { /* over all tables, the hottest first */ }
//! # Ok(()) }
//! ```

mod file;
mod ranked;
mod stream;
pub(crate) mod summary;

use std::collections::TryReserveError;
use std::path::PathBuf;

pub use ranked::{Ranked, RankedRow, RankedTable};
pub(crate) use stream::Counts;

/// Counts that cannot be kept, and a counts file that cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CountsError {
    /// The system refused.
    #[error("counts: {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// It is no counts file, or a damaged one.
    #[error("counts: {}: {reason}", path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// What was expected and what was got.
        reason: String,
    },
    /// There is no memory for the bytes that were given.
    #[error("counts: no memory for {bytes} bytes")]
    Memory {
        /// How many were asked for.
        bytes: usize,
        /// What the allocator says.
        source: TryReserveError,
    },
}
