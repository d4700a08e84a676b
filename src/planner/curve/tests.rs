use super::super::simulate::{SimulatedPolicy, simulate};
use super::super::trace::tests::{accesses, trace};
use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn the_curve_is_the_simulated_lru_at_every_size(wanted in accesses(300)) {
        let trace = trace(&wanted);
        let curve = Curve::of(&trace);
        let keys = f64::from(trace.keys());
        let fractions: Vec<f64> = (0..=trace.keys()).map(|r| (f64::from(r) + 0.25) / keys).collect();
        for size in simulate(&trace, &fractions, 0) {
            let lru = size.flat.of(SimulatedPolicy::Lru);
            prop_assert_eq!(curve.hits(size.rows), lru.total(), "{} rows", size.rows);
        }
        prop_assert_eq!(curve.hits(usize::MAX), trace.accesses.len() as u64 - u64::from(trace.keys()));
    }

    #[test]
    fn from_the_size_that_is_enough_no_doubling_gains_and_just_below_it_one_does(
        wanted in accesses(200), gain in 0.001f64..0.5,
    ) {
        let curve = Curve::of(&trace(&wanted));
        let all = curve.hits.len() - 1;
        let enough = curve.enough(gain);
        let gains = |rows: usize| curve.rate(2 * rows) - curve.rate(rows) >= gain;
        prop_assert!((1..=all).contains(&enough));
        prop_assert!((enough..=all).skip_while(|&rows| rows == all).all(|rows| !gains(rows)));
        prop_assert!(enough == 1 || gains(enough - 1));
    }
}
