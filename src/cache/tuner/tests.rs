use super::*;
use proptest::prelude::*;

/// Steps a tuner 200 times. `throughput` gives the throughput at a capacity. Returns the final capacity.
fn settle(tuner: &mut Tuner, throughput: impl Fn(u64) -> f64) -> u64 {
    (0..200).for_each(|_| {
        tuner.step(throughput(tuner.capacity));
    });
    tuner.capacity
}

#[test]
fn the_capacity_grows_to_the_peak_and_stays() {
    let peak_at = |peak: u64| move |c: u64| 100.0 - (c as f64 - peak as f64).abs() / 10.0;
    for peak in [0, 100, 300, 700, 1000] {
        let mut tuner = Tuner::new(1000, 10);
        let found = settle(&mut tuner, peak_at(peak));
        assert!(found.abs_diff(peak) <= 100, "peak {peak}, found {found}");
        assert_eq!(tuner.step(peak_at(peak)(found)), Advice { capacity: found, clear: false });
    }
}

#[test]
fn the_trial_restarts_after_a_marked_fall_of_throughput() {
    let mut tuner = Tuner::new(1000, 10);
    let found = settle(&mut tuner, |c| 100.0 + c as f64);
    assert_eq!(found, 1000);
    let advice: Vec<_> = (0..PATIENCE).map(|_| tuner.step(50.0)).collect();
    assert_eq!(advice.iter().filter(|a| a.clear).count(), 1);
    assert_eq!(advice[PATIENCE as usize - 1], Advice { capacity: 0, clear: true });
    // For the new traffic, a capacity of 0 is best.
    assert_eq!(settle(&mut tuner, |c| 50.0 - c as f64 / 100.0), 0);
}

#[test]
fn one_slow_measurement_changes_nothing_at_rest() {
    let mut tuner = Tuner::new(1000, 10);
    let found = settle(&mut tuner, |c| 100.0 + c as f64);
    for slow in [1.0, 1100.0, 1.0, 1100.0, 1.0, 1100.0, 1.0] {
        assert_eq!(tuner.step(slow), Advice { capacity: found, clear: false });
    }
}

#[test]
fn a_limit_of_zero_allows_no_pointers() {
    assert_eq!(settle(&mut Tuner::new(0, 10), |_| 1.0), 0);
}

proptest! {
    #[test]
    fn the_capacity_stays_within_the_limit_and_grows_by_steps(
        limit in 0u64..5000,
        steps in 0u64..40,
        samples in prop::collection::vec(prop_oneof![any::<f64>(), 0.0..1e6], 0..300),
    ) {
        let mut tuner = Tuner::new(limit, steps);
        for sample in samples {
            let before = tuner.capacity;
            let advice = tuner.step(sample);
            prop_assert_eq!(advice.capacity, tuner.capacity);
            prop_assert!(advice.capacity <= limit);
            prop_assert!(advice.capacity <= before + tuner.step);
            prop_assert!(!advice.clear || advice.capacity == 0);
        }
    }
}
