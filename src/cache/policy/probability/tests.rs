use super::*;

#[test]
fn admission_admits_its_share_and_draws_again_for_each_batch() {
    for p in [0.0, 0.1, 0.5, 1.0] {
        let admission = Probability::new(p, 3);
        let draws = (0..100_000u64).filter(|i| admission.admits(FlatKey(i % 10 + 2), i / 10)).count();
        assert!((draws as f64 / 1e5 - p).abs() < 0.01, "p {p}: {draws} of 100000");
    }
}

#[test]
fn admission_depends_on_key_batch_and_seed_only() {
    let draws = |seed| {
        let admission = Probability::new(0.5, seed);
        (0..64u64).map(|i| admission.admits(FlatKey(i), i)).collect::<Vec<_>>()
    };
    assert_eq!(draws(1), draws(1));
    assert_ne!(draws(1), draws(2));
}
