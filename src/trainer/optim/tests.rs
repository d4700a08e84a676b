//! Tests of the optimizers' parameters. `tests/it` compares the formulas with PyTorch and a naive trainer.

use super::*;

#[test]
fn default_eps_and_betas_are_those_of_pytorch() {
    let [sgd, adagrad, rowwise, adam] =
        [OptimizerKind::Sgd, OptimizerKind::Adagrad, OptimizerKind::RowwiseAdagrad, OptimizerKind::Adam]
            .map(|kind| Optimizer::new(kind, 0.1));
    assert_eq!([sgd.eps, adagrad.eps, rowwise.eps, adam.eps], [1e-10, 1e-10, 1e-10, 1e-8]);
    assert_eq!(adam.betas, Betas { first: 0.9, second: 0.999 });
}

#[test]
fn adam_uses_its_betas_and_eps() {
    let betas = Betas { first: 0.5, second: 0.25 };
    let optimizer = Optimizer { eps: 0.1, betas, ..Optimizer::new(OptimizerKind::Adam, 0.1) };
    let (mut dense, mut row) = ([1.0f64], [1.0f64]);
    let (mut dense_states, mut row_states) = ([[0.0], [0.0]], [[0.0], [0.0]]);
    let (mut m, mut v) = (0.0f64, 0.0f64);
    let (mut expected_dense, mut expected_row) = (1.0f64, 1.0f64);
    for (step, g) in (1u64..).zip([2.0f64, -1.0, 0.5]) {
        let factors = optimizer.step::<f64>(step);
        let [first, second] = &mut dense_states;
        factors.update_dense(&mut dense, &[g], &mut [first, second]);
        let [first, second] = &mut row_states;
        factors.update_row(&mut row, &[g], &mut [first, second]);
        // Kingma and Ba, algorithm 1; SparseAdam adds eps before the bias correction.
        m = 0.5 * m + 0.5 * g;
        v = 0.25 * v + 0.75 * g * g;
        let (m_hat, v_hat) = (m / (1.0 - 0.5f64.powf(step as f64)), v / (1.0 - 0.25f64.powf(step as f64)));
        expected_dense -= 0.1 * m_hat / (v_hat.sqrt() + 0.1);
        expected_row -= 0.1 * m_hat / v_hat.sqrt() * v.sqrt() / (v.sqrt() + 0.1);
        assert!((dense[0] - expected_dense).abs() < 1e-12, "step {step}");
        assert!((row[0] - expected_row).abs() < 1e-12, "step {step}");
    }
    let Rule::Adam { eps, shares, .. } = optimizer.step::<f32>(3).rule() else { panic!("not adam") };
    assert_eq!((eps, shares), (0.1, Moments { first: 0.5, second: 0.75 }));
}
