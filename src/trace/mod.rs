//! The access trace of a server: the rows that it looked up. `flechette plan --format trace` reads them.
//!
//! It is a sample **of rows**, not of requests. A hash of table and row number selects the rows; all
//! accesses of a selected row are recorded. So the recorded accesses are those of a smaller model, and a
//! cache for a fraction of the recorded rows has about the hit rate of a cache for that fraction of all rows
//! (SHARDS; Waldspurger, Park, Garthwaite and Ahmad, FAST 2015). At a low rate the result is rough: the few
//! rows with most of the traffic may or may not be selected.
//!
//! [`format`](mod@format) is the file format. [`recorder`] records a server's batches. The engine uses the
//! recorder and `flechette plan` uses the reader, so neither imports the other.

pub(crate) mod format;
pub(crate) mod recorder;

use crate::types::TableId;

/// Selects the rows of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sampler {
    /// A row is selected if its 64-bit hash is below this.
    below: u128,
}

impl Sampler {
    /// Selects about this share of all rows. `rate` is clamped to the range 0 to 1.
    #[must_use]
    pub(crate) fn new(rate: f64) -> Self {
        Self { below: (rate.clamp(0.0, 1.0) * 2f64.powi(64)) as u128 }
    }

    /// Whether a row is recorded. A higher rate selects every row that a lower rate selects.
    #[inline]
    #[must_use]
    pub(crate) fn selects(self, table: TableId, row: u64) -> bool {
        let hash = xxhash_rust::xxh3::xxh3_64_with_seed(&row.to_le_bytes(), u64::from(table.0));
        u128::from(hash) < self.below
    }
}

#[cfg(test)]
mod tests;
