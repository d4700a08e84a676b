//! DeepFM (Guo et al., 2017). The logit is the sum of the first-order weights, a factorisation machine over
//! the features' vectors, and a deep MLP over the whole input.

use super::Inputs;
use super::interaction::FactorisationMachine;
use super::layer::Builder;
use super::tape::View;
use super::wide_deep;
use crate::compute::Real;

pub(crate) fn build<T: Real>(net: &mut Builder<T>, inputs: &Inputs, deep: &[usize]) -> View {
    let out = net.buffer(1);
    net.push(FactorisationMachine { vectors: inputs.vectors, dim: inputs.dim, out });
    wide_deep::join(net, inputs, deep, vec![out])
}
