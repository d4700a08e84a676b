//! The optimizers, with PyTorch's formulas; row-wise Adagrad as FBGEMM has it (Adagrad is Duchi et
//! al., 2011; Adam is Kingma and Ba, 2015).
//!
//! Every one is element by element, so it runs over dense weights in any layout, and over one row.
//! An element whose gradient and state are zero stays as it is, to the bit: padding may be updated.

use std::fmt;
use std::str::FromStr;

use crate::compute::{Real, vectorise};
use crate::trainer::pipeline::gpu::Rule;

/// Which formula.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `w -= lr g`.
    Sgd,
    /// `G += g^2; w -= lr g / (sqrt(G) + eps)`.
    Adagrad,
    /// `G += mean(g^2)`, one a row; `w -= lr g / (sqrt(G) + eps)`. Dense weights use Adagrad.
    RowwiseAdagrad,
    /// Adam. Rows as PyTorch's SparseAdam: only rows of the batch move, and the bias correction
    /// counts every step.
    Adam,
}

/// A formula and its numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Optimizer {
    /// Which formula.
    pub kind: Kind,
    /// Learning rate.
    pub lr: f64,
    /// Added to denominators.
    pub eps: f64,
}

/// Adam's decay rates.
const BETAS: (f64, f64) = (0.9, 0.999);

/// What an optimizer keeps of each weight: a name, and whether a row has one number or one an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StateShape {
    /// As PyTorch names it.
    pub name: &'static str,
    /// One number a row.
    pub rowwise: bool,
}

/// No such optimizer.
#[derive(Debug, thiserror::Error)]
#[error("optimizer: expected sgd, adagrad, rowwise_adagrad or adam, got {0:?}")]
pub struct UnknownOptimizer(String);

impl FromStr for Kind {
    type Err = UnknownOptimizer;
    fn from_str(name: &str) -> Result<Self, UnknownOptimizer> {
        let all = [Self::Sgd, Self::Adagrad, Self::RowwiseAdagrad, Self::Adam];
        let found = all.into_iter().find(|kind| kind.to_string() == name);
        found.ok_or_else(|| UnknownOptimizer(name.into()))
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sgd => "sgd",
            Self::Adagrad => "adagrad",
            Self::RowwiseAdagrad => "rowwise_adagrad",
            Self::Adam => "adam",
        })
    }
}

impl Kind {
    /// The states of a row.
    #[must_use]
    pub(crate) fn row_states(self) -> &'static [StateShape] {
        match self {
            Self::Sgd => &[],
            Self::Adagrad => &[StateShape { name: "sum", rowwise: false }],
            Self::RowwiseAdagrad => &[StateShape { name: "sum", rowwise: true }],
            Self::Adam => &[
                StateShape { name: "exp_avg", rowwise: false },
                StateShape { name: "exp_avg_sq", rowwise: false },
            ],
        }
    }

    /// The formula that dense weights use beside these rows.
    #[must_use]
    pub fn dense(self) -> Self {
        if self == Self::RowwiseAdagrad { Self::Adagrad } else { self }
    }
}

/// The factors of one step, the same for every element.
#[derive(Clone, Copy, Debug)]
pub struct Step<T> {
    kind: Kind,
    lr: T,
    eps: T,
    /// Adam: 1 - beta^step of both moments.
    corrections: (T, T),
}

impl Optimizer {
    /// The factors of step `step`, counted from 1.
    #[must_use]
    pub fn step<T: Real>(&self, step: u64) -> Step<T> {
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        let (first, second) = (correction(BETAS.0), correction(BETAS.1));
        Step {
            kind: self.kind,
            lr: T::from_f64(self.lr),
            eps: T::from_f64(self.eps),
            corrections: (T::from_f64(first), T::from_f64(second)),
        }
    }
}

impl<T: Real> Step<T> {
    /// Updates one row, or any run of its elements unless the state is row-wise. `states` are in the
    /// order of [`Kind::row_states`].
    #[inline(always)]
    pub fn update_row(&self, weights: &mut [T], grads: &[T], states: &mut [&mut [T]]) {
        match (self.kind, states) {
            (Kind::Sgd, _) => self.sgd(weights, grads),
            (Kind::Adagrad, [sum]) => self.adagrad(weights, grads, sum),
            (Kind::RowwiseAdagrad, [sum]) => self.rowwise_adagrad(weights, grads, &mut sum[0]),
            (Kind::Adam, [first, second]) => {
                // SparseAdam corrects the step size, and adds eps before the correction.
                let (one, two) = self.corrections;
                let size = self.lr * two.sqrt() / one;
                adam(weights, grads, (first, second), |m, v| size * m / (v.sqrt() + self.eps));
            }
            _ => debug_assert!(false, "states are those of the optimizer"),
        }
    }

    /// Updates dense weights. `states` are in the order of [`Kind::row_states`].
    pub(crate) fn update_dense(&self, weights: &mut [T], grads: &[T], states: &mut [&mut [T]]) {
        vectorise(|| match (self.kind, states) {
            (Kind::Adam, [first, second]) => {
                let (one, two) = self.corrections;
                let (size, root) = (self.lr / one, two.sqrt());
                adam(weights, grads, (first, second), |m, v| size * m / (v.sqrt() / root + self.eps));
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
}

impl Step<f32> {
    /// What [`Self::update_row`] does, as a device is told it.
    #[must_use]
    pub fn rule(&self) -> Rule {
        let Self { kind, lr, eps, corrections: (one, two) } = *self;
        match kind {
            Kind::Sgd => Rule::Sgd { lr },
            Kind::Adagrad => Rule::Adagrad { lr, eps },
            Kind::RowwiseAdagrad => Rule::RowwiseAdagrad { lr, eps },
            Kind::Adam => Rule::Adam { size: lr * two.sqrt() / one, eps, shares: shares() },
        }
    }
}

/// What of the difference each of Adam's moments takes on.
#[inline(always)]
fn shares<T: Real>() -> (T, T) {
    (T::from_f64(1.0 - BETAS.0), T::from_f64(1.0 - BETAS.1))
}

/// Moves both moments, and each weight by `delta(first, second)`.
#[inline(always)]
fn adam<T: Real>(
    weights: &mut [T],
    grads: &[T],
    (first, second): (&mut [T], &mut [T]),
    delta: impl Fn(T, T) -> T,
) {
    let (a, b) = shares::<T>();
    for (((w, g), m), v) in weights.iter_mut().zip(grads).zip(first).zip(second) {
        *m += (*g - *m) * a;
        *v += (*g * *g - *v) * b;
        *w -= delta(*m, *v);
    }
}
