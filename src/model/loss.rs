//! Binary cross-entropy of a logit, and the sigmoid.

use crate::compute::Real;

/// `1 / (1 + e^-z)`, without overflow.
#[must_use]
pub(crate) fn sigmoid<T: Real>(z: T) -> T {
    let one = T::from_f64(1.0);
    if z < T::default() {
        let e = z.exp();
        e / (one + e)
    } else {
        one / (one + (-z).exp())
    }
}

/// The loss of one sample: `max(z, 0) - z y + ln(1 + e^-|z|)`.
#[must_use]
pub(crate) fn binary_cross_entropy<T: Real>(z: T, label: T) -> T {
    let magnitude = if z < T::default() { -z } else { z };
    z.at_least(T::default()) - z * label + (-magnitude).exp().ln_1p()
}

/// The derivative of [`binary_cross_entropy`] with respect to the logit.
#[must_use]
pub fn binary_cross_entropy_slope<T: Real>(z: T, label: T) -> T {
    sigmoid(z) - label
}
