use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn the_window_has_the_last_samples(
        samples in prop::collection::vec((-5.0..20.0f32, prop::bool::ANY), 0..60),
        (window, last, piece) in (1..40usize, 0..50usize, 1..9usize),
    ) {
        let (z, y): (Vec<f32>, Vec<f32>) = samples.iter().map(|&(z, y)| (z, f32::from(u8::from(y)))).unzip();
        let mut progressive = Progressive::new(window);
        for (z, y) in z.chunks(piece).zip(y.chunks(piece)) {
            progressive.push(z, y);
        }
        let from = z.len() - last.min(window).min(z.len());
        let (z, y) = (&z[from..], &y[from..]);
        let clicks: f64 = y.iter().copied().map(f64::from).sum();
        let expected = (!z.is_empty()).then(|| ProgressiveQuality {
            quality: Quality::of_logits(z, y),
            calibration: (clicks > 0.0)
                .then(|| z.iter().map(|&z| f64::from(sigmoid(z))).sum::<f64>() / clicks),
        });
        prop_assert_eq!(progressive.last(last), expected);
        prop_assert_eq!(progressive.quality(), progressive.last(window));
    }
}

#[test]
fn the_log_loss_of_a_score_that_is_rounded_to_1_is_finite() {
    let (logits, labels) = ([18.0, -1.0, 0.5], [0.0, 1.0, 0.75]);
    let mut progressive = Progressive::new(10);
    progressive.push(&logits, &labels);
    let of_probabilities = Quality::of(&logits.map(sigmoid), &labels);
    assert_eq!(of_probabilities.log_loss, f64::INFINITY, "the probability is exactly 1");
    let quality = progressive.quality().unwrap().quality;
    assert_eq!(quality, Quality::of_logits(&logits, &labels));
    assert!(quality.log_loss > 6.0 && quality.log_loss < 7.0, "{quality:?}");
}
