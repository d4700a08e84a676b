//! Deep & Cross networks (Wang et al., 2017 and 2020): a cross network and a deep MLP over the same input,
//! and one linear layer over the outputs of both. In the low-rank form of DCN-v2, `W = U V`, and the
//! tensors are named `u` and `v`.

use super::Inputs;
use super::cross::{CrossV1, CrossV2};
use super::layer::{Builder, LastLayer, LinearSpec, Packing};
use super::tape::View;
use crate::compute::Real;

/// The weights of a cross layer.
#[derive(Clone, Copy)]
pub(crate) enum Cross {
    /// One vector: DCN.
    Vector,
    /// One matrix: DCN-v2.
    Full,
    /// Two matrices of this rank: low-rank DCN-v2.
    LowRank(usize),
}

/// The cross layers of a network.
#[derive(Clone, Copy)]
pub(crate) struct CrossLayers {
    pub weights: Cross,
    pub count: usize,
}

/// The buffers of a cross layer.
#[derive(Clone, Copy)]
struct CrossViews {
    /// The input of the network.
    x0: View,
    x: View,
    out: View,
}

pub(crate) fn build<T: Real>(
    net: &mut Builder<T>,
    inputs: &Inputs,
    cross: CrossLayers,
    deep: &[usize],
) -> View {
    let x0 = inputs.all;
    let last = deep.last().copied().unwrap_or(0);
    let joined = net.buffer(x0.width + last);
    let mut x = x0;
    for i in 0..cross.count {
        let out = if i + 1 == cross.count { joined.part(0, x0.width) } else { net.buffer(x0.width) };
        cross_layer(net, CrossViews { x0, x, out }, cross.weights, i);
        x = out;
    }
    let (hidden, ends) = deep.split_at(deep.len().saturating_sub(1));
    let deep_in = net.mlp("deep", x0, hidden, LastLayer::Relu);
    for &size in ends {
        let i = hidden.len();
        net.linear(LinearSpec {
            weight: format!("deep.{i}.weight"),
            bias: Some(format!("deep.{i}.bias")),
            input: deep_in,
            output: joined.part(x0.width, size),
            relu: true,
            shape: None,
        });
    }
    let output = net.buffer(1);
    net.linear(LinearSpec {
        weight: "head.weight".into(),
        bias: Some("head.bias".into()),
        input: joined,
        output,
        relu: false,
        shape: None,
    });
    output
}

/// One cross layer from `x` to `out`.
fn cross_layer<T: Real>(net: &mut Builder<T>, views: CrossViews, weights: Cross, i: usize) {
    let CrossViews { x0, x, out } = views;
    let width = x0.width;
    let spec = |part: &str, bias: bool, input, output| LinearSpec {
        weight: format!("cross.{i}.{part}"),
        bias: bias.then(|| format!("cross.{i}.bias")),
        input,
        output,
        relu: false,
        shape: None,
    };
    match weights {
        Cross::Vector => {
            let u = net.buffer(1);
            net.linear(LinearSpec { shape: Some(&[width]), ..spec("weight", false, x, u) });
            let bias = net.parameter(format!("cross.{i}.bias"), vec![width], Packing::Plain);
            net.push(CrossV1 { x0, u, x, out, bias });
        }
        Cross::Full => {
            let u = net.buffer(width);
            net.linear(spec("weight", true, x, u));
            net.push(CrossV2 { x0, u, x, out });
        }
        Cross::LowRank(rank) => {
            let (v, u) = (net.buffer(rank), net.buffer(width));
            net.linear(spec("v", false, x, v));
            net.linear(spec("u", true, v, u));
            net.push(CrossV2 { x0, u, x, out });
        }
    }
}
