//! Admission by probability (FLECHE 3.1): a missed row is let in with probability `p`, so a row that is
//! asked for less than about `1 / p` times passes the cache by.
//!
//! The draw is a hash of key, batch and seed, hence the same on every run. It knows nothing of the past,
//! and so costs nothing; what it lets in by chance it also keeps out by chance, hot rows too, until
//! they are asked for again.

use crate::mem::mix64;
use crate::types::FlatKey;

/// Admission with a fixed probability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Probability {
    /// The probability, of 2^64.
    below: u128,
    seed: u64,
}

impl Probability {
    /// Admission with probability `p`, clamped to 0 to 1.
    #[must_use]
    pub(crate) fn new(p: f64, seed: u64) -> Self {
        Self { below: (p.clamp(0.0, 1.0) * 2f64.powi(64)) as u128, seed }
    }

    /// Whether a key that batch `batch` missed is let in.
    #[inline]
    #[must_use]
    pub(crate) fn admits(&self, key: FlatKey, batch: u64) -> bool {
        let draw = mix64(mix64(key.0) ^ mix64(batch ^ self.seed.rotate_left(32)));
        u128::from(draw) < self.below
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
