//! What is let into the cache and what is put out of it: pure functions of what they are given.
//!
//! **Admission** by probability (FLECHE 3.1): a missed row is let in with probability `p`, so a row
//! that is asked for less than about `1 / p` times passes the cache by. The draw is a hash of key,
//! batch and seed, hence the same on every run.
//!
//! **Eviction** between two watermarks: past the high one, entries are put out until the low one is
//! reached. Which ones is decided by age: a sample of the entries gives the age that divides the share
//! to be put out from the rest, and a sweep puts out what is at least so old. That is LRU to within
//! the sample's error, with no list to keep in order on the lookup path.

use super::key::scatter;
use crate::types::FlatKey;

/// Lets a miss in with a fixed probability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// The probability, of 2^64.
    below: u128,
    seed: u64,
}

impl Admission {
    /// Admission with probability `p`, clamped to 0 to 1.
    #[must_use]
    pub fn new(p: f64, seed: u64) -> Self {
        Self { below: (p.clamp(0.0, 1.0) * 2f64.powi(64)) as u128, seed }
    }

    /// Whether a key that batch `batch` missed is let in.
    #[inline]
    #[must_use]
    pub fn admits(&self, key: FlatKey, batch: u64) -> bool {
        let draw = scatter(FlatKey(scatter(key) ^ scatter(FlatKey(batch ^ self.seed.rotate_left(32)))));
        u128::from(draw) < self.below
    }
}

/// The bounds between which the cache's use moves, as shares of what it can hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Watermarks {
    /// Eviction begins past this.
    pub high: f64,
    /// Eviction ends here.
    pub low: f64,
}

impl Watermarks {
    /// The share of `used` to be put out once eviction has begun: 0 where it is to end.
    #[must_use]
    pub fn excess(&self, used: u64, capacity: u64) -> f64 {
        let target = self.low * capacity as f64;
        if used as f64 <= target { 0.0 } else { 1.0 - target / used as f64 }
    }

    /// Whether eviction is to begin.
    #[must_use]
    pub fn crossed(&self, used: u64, capacity: u64) -> bool {
        used as f64 > self.high * capacity as f64
    }
}

/// The age that about `share` of the sampled entries have reached. Reorders `ages`; `u32::MAX` for
/// an empty sample or share.
#[must_use]
pub fn threshold_age(ages: &mut [u32], share: f64) -> u32 {
    let out = (share * ages.len() as f64).ceil() as usize;
    match ages.len().checked_sub(out.min(ages.len())) {
        _ if out == 0 => u32::MAX,
        None => u32::MAX,
        Some(kept) => *ages.select_nth_unstable(kept).1,
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn admission_lets_in_its_share_and_draws_anew_each_batch() {
        for p in [0.0, 0.1, 0.5, 1.0] {
            let admission = Admission::new(p, 3);
            let draws = (0..100_000u64).filter(|i| admission.admits(FlatKey(i % 10 + 2), i / 10)).count();
            assert!((draws as f64 / 1e5 - p).abs() < 0.01, "p {p}: {draws} of 100000");
        }
    }

    #[test]
    fn admission_is_decided_by_key_batch_and_seed_alone() {
        let draws = |seed| {
            let admission = Admission::new(0.5, seed);
            (0..64u64).map(|i| admission.admits(FlatKey(i), i)).collect::<Vec<_>>()
        };
        assert_eq!(draws(1), draws(1));
        assert_ne!(draws(1), draws(2));
    }

    proptest! {
        #[test]
        fn the_threshold_puts_out_the_share_and_no_more_than_ties_force(
            mut ages in prop::collection::vec(0u32..50, 0..200),
            share in 0.0f64..=1.0,
        ) {
            let threshold = threshold_age(&mut ages, share);
            let wanted = (share * ages.len() as f64).ceil() as usize;
            let older = ages.iter().filter(|&&a| a > threshold).count();
            let reached = ages.iter().filter(|&&a| a >= threshold).count();
            prop_assert!(reached >= wanted);
            prop_assert!(older < wanted.max(1));
        }

        #[test]
        fn putting_out_the_excess_reaches_the_low_watermark(used in 1u64..1_000_000, capacity in 1u64..1_000_000) {
            let marks = Watermarks { high: 0.95, low: 0.9 };
            let left = used as f64 * (1.0 - marks.excess(used, capacity));
            prop_assert!(left <= 0.9 * capacity as f64 + 1e-3);
            prop_assert!(!marks.crossed(used, capacity) || marks.excess(used, capacity) > 0.0);
        }
    }
}
