use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn auc_is_the_share_of_pairs_in_order_with_ties_half(
        samples in prop::collection::vec((0u8..6, any::<bool>()), 2..40)
    ) {
        let probabilities: Vec<f32> = samples.iter().map(|(p, _)| f32::from(*p) / 6.0).collect();
        let labels: Vec<f32> = samples.iter().map(|(_, y)| f32::from(u8::from(*y))).collect();
        let (mut right, mut pairs) = (0.0, 0.0);
        for (p, _) in samples.iter().filter(|(_, y)| *y) {
            for (q, _) in samples.iter().filter(|(_, y)| !*y) {
                pairs += 1.0;
                right += if p > q { 1.0 } else if p == q { 0.5 } else { 0.0 };
            }
        }
        let got = Quality::of(&probabilities, &labels).auc;
        prop_assert_eq!(got.is_some(), pairs > 0.0);
        if let Some(auc) = got {
            prop_assert!((auc - right / pairs).abs() < 1e-12);
        }
    }
}

#[test]
fn scoring_the_mean_rate_has_a_normalized_entropy_of_one() {
    let quality = Quality::of(&[0.25; 8], &[1., 0., 0., 0., 1., 0., 0., 0.]);
    assert!((quality.normalized_entropy.unwrap() - 1.0).abs() < 1e-9);
    assert_eq!(quality.auc, Some(0.5));
}

#[test]
fn a_sure_mistake_is_costly_but_finite() {
    let quality = Quality::of(&[0.0, 1.0], &[1.0, 0.0]);
    assert!(quality.log_loss > 16.0 && quality.log_loss < 17.0);
    assert_eq!(quality.auc, Some(0.0));
}
