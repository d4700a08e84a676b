//! The schedule of the learning rate: a factor that is a pure function of the step's number.
//!
//! As for MLPerf's DLRM: the rate grows linearly from 0 during warmup, is constant, and then decays from a
//! start step to an end value. Without warmup and decay the factor is not applied, so trained bits are
//! those of a constant rate.

use serde::{Deserialize, Serialize};

use crate::types::named;

/// How the learning rate changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Steps of the linear warmup; step `warmup` has the full rate.
    pub warmup: u64,
    /// The decay after warmup.
    pub decay: Option<Decay>,
}

/// How the learning rate falls.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decay {
    /// The form of the decay.
    pub curve: Curve,
    /// The last step with the full rate.
    pub start: u64,
    /// Steps from the full rate to `end`; at least 1.
    pub steps: u64,
    /// The rate of all later steps.
    pub end: f64,
}

/// The form of a decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Curve {
    /// A straight line.
    Linear,
    /// Half a period of a cosine.
    Cosine,
    /// A polynomial of power 2.
    Poly2,
}

#[derive(Debug, thiserror::Error)]
#[error("decay: expected {names}, got {0:?}", names = Curve::names())]
#[allow(missing_docs)]
pub struct UnknownCurve(String);

named! {
    Curve: Linear = "linear", Cosine = "cosine", Poly2 = "poly2";
    UnknownCurve = UnknownCurve
}

impl Schedule {
    /// The rate of a step, counted from 1, when the full rate is `lr`.
    #[must_use]
    pub(crate) fn rate(&self, lr: f64, step: u64) -> f64 {
        if step < self.warmup {
            return lr * (step as f64 / self.warmup as f64);
        }
        let Some(Decay { curve, start, steps, end }) = self.decay else { return lr };
        if step <= start {
            return lr;
        }
        let done = ((step - start) as f64 / steps as f64).min(1.0);
        let left = match curve {
            Curve::Linear => 1.0 - done,
            Curve::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
            Curve::Poly2 => (1.0 - done) * (1.0 - done),
        };
        if done < 1.0 { end + (lr - end) * left } else { end }
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
