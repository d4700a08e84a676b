//! DLRM (Naumov et al., 2019): a bottom MLP makes one more vector from the dense values, all vectors
//! interact by pairwise dot products, and a top MLP gives the logit. As in facebookresearch/dlrm, the
//! output of the bottom MLP is the first vector, the dot products are ordered as the rows of a lower
//! triangle, and the bottom MLP ends in a ReLU.

use super::Inputs;
use super::interaction::PairwiseDots;
use super::layer::{Builder, LastLayer};
use super::tape::View;
use crate::compute::Real;

pub(crate) fn build<T: Real>(net: &mut Builder<T>, inputs: &Inputs, bottom: &[usize], top: &[usize]) -> View {
    let sizes: Vec<_> = bottom.iter().copied().chain([inputs.dim]).collect();
    let first = net.mlp("bottom", inputs.dense, &sizes, LastLayer::Relu);
    let out = net.buffer(PairwiseDots::out_width(inputs.dim, inputs.vectors.width));
    net.push(PairwiseDots { first, rest: inputs.vectors, out });
    let sizes: Vec<_> = top.iter().copied().chain([1]).collect();
    net.mlp("top", out, &sizes, LastLayer::Linear)
}
