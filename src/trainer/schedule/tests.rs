use proptest::prelude::*;

use super::*;
use crate::trainer::optim::{Optimizer, OptimizerKind};

fn decaying(curve: Curve) -> Schedule {
    Schedule { warmup: 4, decay: Some(Decay { curve, start: 10, steps: 8, end: 0.125 }) }
}

#[test]
fn the_rate_warms_up_stays_and_decays_to_its_end() {
    let rates = |curve| [1, 2, 4, 10, 12, 14, 18, 1000].map(|step| decaying(curve).rate(1.125, step));
    assert_eq!(rates(Curve::Linear), [0.28125, 0.5625, 1.125, 1.125, 0.875, 0.625, 0.125, 0.125]);
    assert_eq!(rates(Curve::Poly2), [0.28125, 0.5625, 1.125, 1.125, 0.6875, 0.375, 0.125, 0.125]);
    let cosine = rates(Curve::Cosine);
    assert!((cosine[5] - 0.625).abs() < 1e-12 && cosine[6] == 0.125, "{cosine:?}");
    assert!((cosine[4] - (0.125 + 0.5 * (1.0 + 0.5f64.sqrt()))).abs() < 1e-12, "{cosine:?}");
}

proptest! {
    #[test]
    fn without_a_schedule_every_factor_has_the_bits_of_a_constant_rate(
        lr in 1e-6..10.0f64, step in 1..u64::MAX,
    ) {
        prop_assert_eq!(Schedule::default().rate(lr, step).to_bits(), lr.to_bits());
    }

    #[test]
    fn a_step_has_the_factors_of_a_constant_rate_of_that_step(
        curve in prop::sample::select(vec![Curve::Linear, Curve::Cosine, Curve::Poly2]), step in 1..30u64,
    ) {
        let scheduled = Optimizer { schedule: decaying(curve), ..Optimizer::new(OptimizerKind::Adam, 0.5) };
        let constant = Optimizer::new(OptimizerKind::Adam, decaying(curve).rate(0.5, step));
        let shown = |optimizer: Optimizer| format!("{:?}", optimizer.step::<f64>(step));
        prop_assert_eq!(shown(scheduled), shown(constant));
    }
}
