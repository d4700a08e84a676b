use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn the_threshold_evicts_the_share_and_only_ties_more(
        mut sample in prop::collection::vec(0u64..50, 0..200),
        share in 0.0f64..=1.0,
    ) {
        let threshold = threshold(&mut sample, share);
        let wanted = (share * sample.len() as f64).ceil() as usize;
        let older = sample.iter().filter(|&&a| a > threshold).count();
        let reached = sample.iter().filter(|&&a| a >= threshold).count();
        prop_assert!(reached >= wanted);
        prop_assert!(older < wanted.max(1));
    }

    #[test]
    fn evicting_the_excess_reaches_the_low_watermark(used in 1u64..1_000_000, capacity in 1u64..1_000_000) {
        let marks = Watermarks { high: 0.95, low: 0.9 };
        let level = Level { used, capacity };
        let left = used as f64 * (1.0 - marks.excess(level));
        prop_assert!(left <= 0.9 * capacity as f64 + 1e-3);
        prop_assert!(!marks.crossed(level) || marks.excess(level) > 0.0);
    }
}
