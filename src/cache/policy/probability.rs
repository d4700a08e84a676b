//! Admission by probability (FLECHE 3.1): a missed row is let in with probability `p`, so a row that is
//! asked for less than about `1 / p` times passes the cache by.
//!
//! The draw is a hash of key, batch and seed, hence the same on every run. It knows nothing of the past,
//! and so costs nothing; what it lets in by chance it also keeps out by chance, hot rows too, until
//! they are asked for again.

use crate::types::{FlatKey, scatter};

/// Admission with a fixed probability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probability {
    /// The probability, of 2^64.
    below: u128,
    seed: u64,
}

impl Probability {
    /// Admission with probability `p`, clamped to 0 to 1.
    #[must_use]
    pub fn new(p: f64, seed: u64) -> Self {
        Self { below: (p.clamp(0.0, 1.0) * 2f64.powi(64)) as u128, seed }
    }

    /// Whether a key that batch `batch` missed is let in.
    #[inline]
    #[must_use]
    pub fn admits(&self, key: FlatKey, batch: u64) -> bool {
        let draw = scatter(scatter(key.0) ^ scatter(batch ^ self.seed.rotate_left(32)));
        u128::from(draw) < self.below
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;

    #[test]
    fn admission_lets_in_its_share_and_draws_anew_each_batch() {
        for p in [0.0, 0.1, 0.5, 1.0] {
            let admission = Probability::new(p, 3);
            let draws = (0..100_000u64).filter(|i| admission.admits(FlatKey(i % 10 + 2), i / 10)).count();
            assert!((draws as f64 / 1e5 - p).abs() < 0.01, "p {p}: {draws} of 100000");
        }
    }

    #[test]
    fn admission_is_decided_by_key_batch_and_seed_alone() {
        let draws = |seed| {
            let admission = Probability::new(0.5, seed);
            (0..64u64).map(|i| admission.admits(FlatKey(i), i)).collect::<Vec<_>>()
        };
        assert_eq!(draws(1), draws(1));
        assert_ne!(draws(1), draws(2));
    }
}
