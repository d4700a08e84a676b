//! The optimizers. Formulas are PyTorch's, and FBGEMM's for row-wise Adagrad (Adagrad: Duchi et al., 2011;
//! Adam: Kingma and Ba, 2015).
//!
//! All formulas for dense weights work element by element, so dense weights may have any layout. An element
//! with zero gradient and zero state keeps its bits, so padding of dense weights may be updated too.

use super::schedule::Schedule;
use crate::compute::{Real, vectorise};
use crate::store::{RecordLayout, StateShape};
use crate::trainer::pipeline::gpu::Rule;
use crate::types::named;

/// The formula of an optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerKind {
    /// `w -= lr g`.
    Sgd,
    /// `G += g^2; w -= lr g / (sqrt(G) + eps)`.
    Adagrad,
    /// `G += mean(g^2)`, one `G` per row; `w -= lr g / (sqrt(G) + eps)`. Dense weights use Adagrad.
    RowwiseAdagrad,
    /// Adam. Rows are updated as by PyTorch's SparseAdam: only rows of the batch change, and the bias
    /// correction counts every step.
    Adam,
}

/// A formula and its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Optimizer {
    /// The formula.
    pub kind: OptimizerKind,
    /// Learning rate.
    pub lr: f64,
    /// How the rate of a step follows from `lr`.
    pub schedule: Schedule,
    /// Added to denominators. It must be positive in f32, so that a zero gradient with zero state changes
    /// nothing.
    pub eps: f64,
    /// Adam's decay rates, each at least 0 and below 1. The other formulas ignore them.
    pub(crate) betas: Betas,
}

/// Adam's decay rates of the two moments.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Betas {
    /// Decay rate of the mean of gradients.
    pub first: f64,
    /// Decay rate of the mean of squared gradients.
    pub second: f64,
}

impl Betas {
    /// The defaults of PyTorch.
    pub(crate) const DEFAULT: Self = Self { first: 0.9, second: 0.999 };
}

/// One of the states that an optimizer keeps for weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OptimizerState {
    /// PyTorch's name.
    pub name: &'static str,
    /// One number per row instead of one per element.
    pub rowwise: bool,
}

#[derive(Debug, thiserror::Error)]
#[error("optimizer: expected {names}, got {0:?}", names = OptimizerKind::names())]
#[allow(missing_docs)]
pub struct UnknownOptimizer(String);

named! {
    OptimizerKind: Sgd = "sgd", Adagrad = "adagrad", RowwiseAdagrad = "rowwise_adagrad", Adam = "adam";
    UnknownOptimizer = UnknownOptimizer
}

impl OptimizerKind {
    /// The states of a row, in the order in which they follow the weights in a record.
    #[must_use]
    pub(crate) fn row_states(self) -> &'static [OptimizerState] {
        match self {
            Self::Sgd => &[],
            Self::Adagrad => &[OptimizerState { name: "sum", rowwise: false }],
            Self::RowwiseAdagrad => &[OptimizerState { name: "sum", rowwise: true }],
            Self::Adam => &[
                OptimizerState { name: "exp_avg", rowwise: false },
                OptimizerState { name: "exp_avg_sq", rowwise: false },
            ],
        }
    }

    /// The weights of a row of `dim` elements, and its states.
    pub(crate) fn record_layout(self, dim: usize) -> RecordLayout<'static> {
        let shape = |state: &OptimizerState| StateShape::new(state.name, if state.rowwise { 1 } else { dim });
        RecordLayout { dim, states: self.row_states().iter().map(shape).collect() }
    }

    /// The default eps: PyTorch's for Adam (1e-8) and Adagrad (1e-10). Row-wise Adagrad has the default of
    /// Adagrad, which updates its dense weights; FBGEMM's own default is 1e-8.
    #[must_use]
    const fn default_eps(self) -> f64 {
        match self {
            Self::Adam => 1e-8,
            Self::Sgd | Self::Adagrad | Self::RowwiseAdagrad => 1e-10,
        }
    }

    /// The formula for dense weights when rows use this one.
    #[must_use]
    pub(crate) fn dense(self) -> Self {
        if self == Self::RowwiseAdagrad { Self::Adagrad } else { self }
    }
}

/// One number for each of Adam's moments.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Moments<T> {
    pub first: T,
    pub second: T,
}

/// The factors of one step, the same for every element.
#[derive(Clone, Copy, Debug)]
pub struct Step<T> {
    kind: OptimizerKind,
    lr: T,
    eps: T,
    /// Adam: `1 - beta^step`.
    corrections: Moments<T>,
    /// Adam: `1 - beta`, the share of a new value in the moving mean.
    shares: Moments<T>,
}

impl Optimizer {
    /// An optimizer with the default eps of its formula and the default betas.
    #[must_use]
    pub const fn new(kind: OptimizerKind, lr: f64) -> Self {
        let schedule = Schedule { warmup: 0, decay: None };
        Self { kind, lr, schedule, eps: kind.default_eps(), betas: Betas::DEFAULT }
    }

    /// The factors of step `step`, counted from 1.
    #[must_use]
    pub fn step<T: Real>(&self, step: u64) -> Step<T> {
        let Betas { first, second } = self.betas;
        let correction = |beta: f64| T::from_f64(1.0 - beta.powf(step as f64));
        let share = |beta: f64| T::from_f64(1.0 - beta);
        Step {
            kind: self.kind,
            lr: T::from_f64(self.schedule.rate(self.lr, step)),
            eps: T::from_f64(self.eps),
            corrections: Moments { first: correction(first), second: correction(second) },
            shares: Moments { first: share(first), second: share(second) },
        }
    }
}

impl<T: Real> Step<T> {
    /// Updates a row. If no state is row-wise, the slices may also be a part of a row.
    /// `states` are in the order of [`OptimizerKind::row_states`].
    #[inline(always)]
    pub fn update_row(&self, weights: &mut [T], grads: &[T], states: &mut [&mut [T]]) {
        match (self.kind, states) {
            (OptimizerKind::Sgd, _) => self.sgd(weights, grads),
            (OptimizerKind::Adagrad, [sum]) => self.adagrad(weights, grads, sum),
            (OptimizerKind::RowwiseAdagrad, [sum]) => self.rowwise_adagrad(weights, grads, &mut sum[0]),
            (OptimizerKind::Adam, [first, second]) => {
                // SparseAdam puts the whole bias correction into the step size, so eps is added to the
                // uncorrected root.
                let size = self.lr * self.corrections.second.sqrt() / self.corrections.first;
                self.adam(weights, grads, (first, second), |m, v| size * m / (v.sqrt() + self.eps));
            }
            _ => debug_assert!(false, "states are those of the optimizer"),
        }
    }

    /// Updates dense weights. `states` are in the order of [`OptimizerKind::row_states`].
    pub(crate) fn update_dense(&self, weights: &mut [T], grads: &[T], states: &mut [&mut [T]]) {
        vectorise(|| match (self.kind, states) {
            (OptimizerKind::Adam, [first, second]) => {
                let (size, root) = (self.lr / self.corrections.first, self.corrections.second.sqrt());
                self.adam(weights, grads, (first, second), |m, v| size * m / (v.sqrt() / root + self.eps));
            }
            (_, states) => self.update_row(weights, grads, states),
        });
    }

    #[inline(always)]
    fn sgd(&self, weights: &mut [T], grads: &[T]) {
        for (w, g) in weights.iter_mut().zip(grads) {
            *w -= self.lr * *g;
        }
    }

    #[inline(always)]
    fn adagrad(&self, weights: &mut [T], grads: &[T], sums: &mut [T]) {
        for ((w, g), sum) in weights.iter_mut().zip(grads).zip(sums) {
            *sum += *g * *g;
            *w -= self.lr * *g / (sum.sqrt() + self.eps);
        }
    }

    #[inline(always)]
    fn rowwise_adagrad(&self, weights: &mut [T], grads: &[T], sum: &mut T) {
        let mut squares = T::default();
        grads.iter().for_each(|g| squares += *g * *g);
        *sum += squares / T::from_f64(grads.len() as f64);
        let factor = self.lr / (sum.sqrt() + self.eps);
        for (w, g) in weights.iter_mut().zip(grads) {
            *w -= factor * *g;
        }
    }

    /// Updates both moments, and subtracts `delta(first, second)` from each weight.
    #[inline(always)]
    fn adam(
        &self,
        weights: &mut [T],
        grads: &[T],
        (first, second): (&mut [T], &mut [T]),
        delta: impl Fn(T, T) -> T,
    ) {
        let Moments { first: a, second: b } = self.shares;
        for (((w, g), m), v) in weights.iter_mut().zip(grads).zip(first).zip(second) {
            *m += (*g - *m) * a;
            *v += (*g * *g - *v) * b;
            *w -= delta(*m, *v);
        }
    }
}

impl Step<f32> {
    /// The parameters with which the device kernel computes [`Self::update_row`].
    #[must_use]
    pub(crate) fn rule(&self) -> Rule {
        let Self { kind, lr, eps, corrections, shares } = *self;
        match kind {
            OptimizerKind::Sgd => Rule::Sgd { lr },
            OptimizerKind::Adagrad => Rule::Adagrad { lr, eps },
            OptimizerKind::RowwiseAdagrad => Rule::RowwiseAdagrad { lr, eps },
            OptimizerKind::Adam => {
                Rule::Adam { size: lr * corrections.second.sqrt() / corrections.first, eps, shares }
            }
        }
    }
}

#[cfg(test)]
mod tests;
