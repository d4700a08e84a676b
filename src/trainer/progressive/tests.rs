use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn the_window_has_the_last_samples(
        samples in prop::collection::vec((0.01..0.99f32, prop::bool::ANY), 0..60),
        (window, last, piece) in (1..40usize, 0..50usize, 1..9usize),
    ) {
        let (p, y): (Vec<f32>, Vec<f32>) = samples.iter().map(|&(p, y)| (p, f32::from(u8::from(y)))).unzip();
        let mut progressive = Progressive::new(window);
        for (p, y) in p.chunks(piece).zip(y.chunks(piece)) {
            progressive.push(p, y);
        }
        let from = p.len() - last.min(window).min(p.len());
        let (p, y) = (&p[from..], &y[from..]);
        let clicks: f64 = y.iter().copied().map(f64::from).sum();
        let expected = (!p.is_empty()).then(|| ProgressiveQuality {
            quality: Quality::of(p, y),
            calibration: (clicks > 0.0).then(|| p.iter().copied().map(f64::from).sum::<f64>() / clicks),
        });
        prop_assert_eq!(progressive.last(last), expected);
        prop_assert_eq!(progressive.quality(), progressive.last(window));
    }
}
