//! Recorded accesses: which rows a server was asked for, as `flechette plan --format trace` reads them.
//!
//! A recording is a sample **of rows**, not of requests: a row is recorded at each of its accesses or at
//! none, by a hash of its table and number. So the accesses that are there are those of a smaller
//! model, and a cache of a fraction of the recorded rows hits about what a cache of that fraction of all
//! rows would (SHARDS; Waldspurger, Park, Garthwaite and Ahmad, FAST 2015). With few rows that take much
//! of the traffic, chance decides whether they are among the sample: `plan` on a low rate is rough.
//!
//! [`format`](mod@format) is the bytes, [`recorder`] takes a server's batches. This module imports nothing
//! but leaves, so that the engine, which records, and the planner, which reads, need not know each other.

pub mod format;
pub(crate) mod recorder;

use crate::types::TableId;

/// Chooses the rows of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sampler {
    /// Hashes below this are in, of 2^64.
    below: u128,
}

impl Sampler {
    /// About this share of all rows, clamped to 0 to 1.
    #[must_use]
    pub(crate) fn new(rate: f64) -> Self {
        Self { below: (rate.clamp(0.0, 1.0) * 2f64.powi(64)) as u128 }
    }

    /// Whether a row is recorded. Those of a lower rate are among those of a higher one.
    #[inline]
    #[must_use]
    pub(crate) fn takes(self, table: TableId, row: u64) -> bool {
        let hash = xxhash_rust::xxh3::xxh3_64_with_seed(&row.to_le_bytes(), u64::from(table.0));
        u128::from(hash) < self.below
    }
}

#[cfg(test)]
mod tests;
