//! Wide & Deep (Cheng et al., 2016). The logit is the sum of the first-order weights of ids, a linear layer
//! over the dense values, and a deep MLP.

use super::Inputs;
use super::interaction::SumOfTerms;
use super::layer::{Builder, LastLayer, LinearSpec};
use super::tape::View;
use crate::compute::Real;

pub(crate) fn build<T: Real>(net: &mut Builder<T>, inputs: &Inputs, deep: &[usize]) -> View {
    join(net, inputs, deep, Vec::new())
}

/// Adds the sum of the wide terms, the `extra` terms and a deep MLP. Returns the logit.
pub(crate) fn join<T: Real>(net: &mut Builder<T>, inputs: &Inputs, deep: &[usize], extra: Vec<View>) -> View {
    let mut terms = vec![inputs.wide];
    if inputs.dense.width > 0 {
        let output = net.buffer(1);
        net.linear(LinearSpec {
            weight: "wide.weight".into(),
            bias: None,
            input: inputs.dense,
            output,
            relu: false,
            shape: None,
        });
        terms.push(output);
    }
    terms.extend(extra);
    let sizes: Vec<_> = deep.iter().copied().chain([1]).collect();
    terms.push(net.mlp("deep", inputs.all, &sizes, LastLayer::Linear));
    let out = net.buffer(1);
    net.push(SumOfTerms { terms, out });
    out
}
