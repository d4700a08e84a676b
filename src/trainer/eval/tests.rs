use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn auc_is_the_share_of_pairs_in_order_with_ties_half(
        samples in prop::collection::vec((0u8..6, prop_oneof![Just(0.0f32), Just(1.0), Just(0.25)]), 1..40)
    ) {
        let probabilities: Vec<f32> = samples.iter().map(|(p, _)| f32::from(*p) / 6.0).collect();
        let labels: Vec<f32> = samples.iter().map(|(_, y)| *y).collect();
        let (mut right, mut pairs) = (0.0, 0.0);
        for (i, (p, y)) in samples.iter().enumerate() {
            for (_, (q, other)) in samples.iter().enumerate().filter(|(j, _)| *j != i) {
                let weight = f64::from(y * (1.0 - other));
                pairs += weight;
                right += if p > q { weight } else if p == q { weight / 2.0 } else { 0.0 };
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
fn a_label_between_0_and_1_has_the_loss_that_training_minimizes() {
    let expected = -(0.3f64 * 0.3f64.ln() + 0.7 * 0.7f64.ln());
    let logit = (0.3f32 / 0.7).ln();
    for quality in [Quality::of(&[0.3; 3], &[0.3; 3]), Quality::of_logits(&[logit; 3], &[0.3; 3])] {
        assert!((quality.log_loss - expected).abs() < 1e-6, "{quality:?}");
        assert!((quality.normalized_entropy.unwrap() - 1.0).abs() < 1e-6, "{quality:?}");
        assert!((quality.auc.unwrap() - 0.5).abs() < 1e-9, "{quality:?}");
    }
    let certain = Quality::of_logits(&[f32::INFINITY, f32::NEG_INFINITY], &[0.9, 0.9]);
    assert_eq!((certain.log_loss, certain.infinite), (f64::INFINITY, 2));
}

#[test]
fn the_loss_of_a_logit_is_not_clamped() {
    let quality = Quality::of_logits(&[-100.0, 2.0], &[1.0, 1.0]);
    assert!((quality.log_loss - (100.0 + (-2.0f64).exp().ln_1p()) / 2.0).abs() < 1e-9, "{quality:?}");
    assert_eq!(quality.infinite, 0);
    // The probability of the logit -100 is about 4e-44, which an f32 holds with few digits.
    let served = Quality::of(&[sigmoid(-100.0f32), sigmoid(2.0)], &[1.0, 1.0]);
    assert!((served.log_loss - quality.log_loss).abs() < 0.05, "{served:?}");
}

#[test]
fn a_probability_of_exactly_one_without_a_click_has_an_infinite_loss() {
    let quality = Quality::of(&[0.0, 1.0, 1.0, 0.5], &[1.0, 0.0, 1.0, 1.0]);
    assert_eq!((quality.log_loss, quality.infinite), (f64::INFINITY, 2));
    // Logits give a finite loss for the same kind of mistake.
    let quality = Quality::of_logits(&[20.0, -1.0], &[0.0, 0.0]);
    assert!(quality.log_loss > 10.0 && quality.log_loss < 10.2, "{quality:?}");
    assert_eq!(Quality::of_logits(&[f32::INFINITY, f32::NEG_INFINITY], &[1.0, 0.0]).log_loss, 0.0);
    assert_eq!(Quality::of_logits(&[f32::INFINITY, 1.0], &[0.0, 0.0]).log_loss, f64::INFINITY);
}

proptest! {
    #[test]
    fn a_client_gets_the_trainers_auc_and_log_loss_for_ordinary_scores(
        samples in prop::collection::vec((-8.0f32..8.0, any::<bool>()), 2..60)
    ) {
        let (logits, labels): (Vec<f32>, Vec<f32>) =
            samples.iter().map(|&(z, y)| (z, f32::from(u8::from(y)))).unzip();
        let probabilities: Vec<f32> = logits.iter().map(|&z| sigmoid(z)).collect();
        let (trainer, client) = (Quality::of_logits(&logits, &labels), Quality::of(&probabilities, &labels));
        prop_assert_eq!(trainer.auc, client.auc);
        prop_assert!((trainer.log_loss - client.log_loss).abs() < 1e-3 * trainer.log_loss);
    }
}
