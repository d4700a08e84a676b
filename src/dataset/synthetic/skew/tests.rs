use std::collections::HashSet;

use proptest::prelude::*;

use super::*;
use crate::mem::SplitMix64;

fn share_of_hottest(skew: Skew, rows: u64) -> f64 {
    let sampler = IdSampler::new(skew, rows, 0, 0);
    let hot = ((HOT_IDS * rows as f64) as u64).max(1);
    let mut words = SplitMix64::new(7);
    let draws = 200_000;
    (0..draws).filter(|_| sampler.rank(unit(words.next_u64())) < hot).count() as f64 / f64::from(draws)
}

#[test]
fn named_skews_give_the_hottest_two_percent_their_share() {
    for rows in [3, 100, 1_000, 100_000, 10_000_000, 1 << 40] {
        for (skew, share) in
            [(Skew::Uniform, 0.02), (Skew::Low, 0.085), (Skew::Medium, 0.3), (Skew::High, 0.8)]
        {
            // The hottest of few ids takes at least its even share.
            let share = f64::max(share, 1.0 / rows as f64);
            let got = share_of_hottest(skew, rows);
            assert!((got - share).abs() < 0.01, "{skew:?} of {rows} rows: {got}");
        }
    }
}

#[test]
fn an_exponent_of_one_is_no_singular_case() {
    let at = |alpha| share_of_hottest(Skew::Alpha(alpha), 100_000);
    assert!((at(1.0) - at(1.000_01)).abs() < 0.01 && (at(1.0) - 0.66).abs() < 0.01, "{}", at(1.0));
}

#[test]
fn hot_ids_are_no_neighbours() {
    let sampler = IdSampler::new(Skew::High, 100_000, 0, 0);
    let hot: HashSet<u64> = (0..100).map(|rank| sampler.permutation.of(rank)).collect();
    let neighbours = hot.iter().filter(|&&id| hot.contains(&(id + 1))).count();
    assert!(neighbours <= 3, "{neighbours} of 100");
}

#[test]
fn names_and_numbers_are_read_and_others_refused() {
    assert_eq!("high".parse(), Ok(Skew::High));
    assert_eq!("1.2".parse(), Ok(Skew::Alpha(1.2)));
    for text in ["", "-1", "nan", "inf", "101", "High"] {
        assert!(text.parse::<Skew>().is_err(), "{text}");
    }
}

proptest! {
    #[test]
    fn ranks_are_mapped_to_ids_one_to_one(rows in 1..2000u64, seed: u64, place: u64) {
        let permutation = Permutation::new(rows, seed, place);
        let ids: HashSet<u64> = (0..rows).map(|rank| permutation.of(rank)).collect();
        prop_assert_eq!(ids.len() as u64, rows);
        prop_assert!(ids.iter().all(|&id| id < rows));
    }

    #[test]
    fn ids_are_always_rows(rows in 1..=1u64 << 48, alpha in 0.0..MAX_ALPHA, draw: u64) {
        let skew = Skew::Alpha(alpha);
        prop_assert!(IdSampler::new(skew, rows, 0, 0).id(draw) < rows);
        prop_assert!(IdSampler::new(skew, rows, 0, 0).id(u64::MAX) < rows);
    }
}
