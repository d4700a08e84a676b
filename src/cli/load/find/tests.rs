use super::*;
use proptest::prelude::*;

/// The rates of a search if exactly the rates up to `most` pass.
fn search(first: f64, most: f64) -> (Vec<f64>, Bracket) {
    let (mut bracket, mut rates) = (Bracket::default(), Vec::new());
    while let Some(rate) = bracket.next(first) {
        bracket.add(rate, rate <= most);
        rates.push(rate);
    }
    (rates, bracket)
}

proptest! {
    #[test]
    fn the_search_ends_close_below_the_highest_rate_that_passes_after_at_most_26_windows(
        first in 0.001f64..2e6, power in 0.0f64..6.0,
    ) {
        let most = 10f64.powf(power);
        let (rates, bracket) = search(first, most);
        prop_assert!(rates.len() <= 26, "{rates:?}");
        prop_assert!(rates.iter().all(|rate| (LEAST_RATE..=MAX_RATE).contains(rate)), "{rates:?}");
        let passed = bracket.passed.unwrap();
        prop_assert!(passed <= most && most <= CLOSE * passed, "{bracket:?} for {most}");
    }
}

#[test]
fn a_search_is_doubled_or_halved_until_the_bounds_of_the_rates() {
    let (rates, bracket) = search(100.0, f64::INFINITY);
    assert_eq!((rates.len(), bracket.passed, bracket.failed), (15, Some(MAX_RATE), None));
    let (rates, bracket) = search(100.0, 0.0);
    assert_eq!((rates.len(), bracket.passed, bracket.failed), (8, None, Some(LEAST_RATE)));
    assert_eq!(search(100.0, 330.0).0, [100.0, 200.0, 400.0, 300.0, 350.0, 325.0, 337.5]);
}
