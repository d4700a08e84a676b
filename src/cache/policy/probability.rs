//! Admission by probability (FLECHE section 3.1): a missed row is admitted with probability `p`, so a row
//! that is used fewer than about `1 / p` times is mostly not cached.
//!
//! The draw is a hash of key, batch and seed, so it is reproducible and needs no memory of past accesses. Its
//! limit: each miss of a hot row is rejected with the same probability as a miss of a cold row.

use crate::mem::mix64;
use crate::types::FlatKey;

/// Admission with a fixed probability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Probability {
    /// The probability times 2^64.
    below: u128,
    seed: u64,
}

impl Probability {
    /// Admission with probability `p`, clamped to 0 to 1.
    #[must_use]
    pub(crate) fn new(p: f64, seed: u64) -> Self {
        Self { below: (p.clamp(0.0, 1.0) * 2f64.powi(64)) as u128, seed }
    }

    /// Whether a key that batch `batch` missed is admitted.
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
