//! The [`Layer`] trait, and the [`Builder`] that assembles the layers of an architecture.
//!
//! All weights of a network are in one vector, layer after layer. Each layer is cut into pieces with
//! independent gradients, so one parallel loop over the pieces computes gradients and updates weights. An
//! optimizer's state has the same layout.
//! Padding lanes are zero and stay zero: their gradients are zero, and every optimizer leaves a zero weight
//! with a zero gradient unchanged.

use std::ops::Range;

use aligned_vec::AVec;

use super::linear::Linear;
use super::tape::{ALIGNMENT, Tape, View};
use crate::compute::{LANES, Real, packed_len};

/// One operation of a network.
pub(crate) trait Layer<T: Real>: Send + Sync {
    /// Computes the output view from the input views.
    fn forward(&self, weights: &Weights<T>, tape: &mut Tape<T>);
    /// Adds to the gradients of the input views. The gradients of the output view must be complete.
    fn backward(&self, weights: &Weights<T>, tape: &mut Tape<T>);
    /// Lengths of the pieces of the layer's weights, in order.
    fn pieces(&self) -> Vec<usize> {
        Vec::new()
    }
    /// Writes the gradient of one piece, summed over all tapes in order.
    fn gradient(&self, _piece: usize, _tapes: &[Tape<T>], _out: &mut [T]) {}
    /// This layer, if it is fully connected.
    fn as_linear(&self) -> Option<&Linear> {
        None
    }
}

/// The weights of a network. Each vector, and each panel in it, is aligned to a cache line.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights<T> {
    /// Every weight, layer after layer.
    pub values: AVec<T>,
    /// The transposed weights for `backward`; empty in a network that only scores.
    pub transposed: AVec<T>,
}

impl<T: Real> Weights<T> {
    /// `len` zero weights, and no transposes.
    #[must_use]
    pub(crate) fn zeroed(len: usize) -> Self {
        let mut values = AVec::new(ALIGNMENT);
        values.resize(len, T::default());
        Self { values, transposed: AVec::new(ALIGNMENT) }
    }
}

/// Layout of a named tensor in the weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    /// Panels of the transpose of an (out, in) matrix.
    Panels,
    /// Consecutive values, padded to whole panels.
    Plain,
}

/// A named tensor of a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// The name in `dense.safetensors`.
    pub(crate) name: String,
    /// PyTorch's shape: (out, in) for matrices.
    pub shape: Vec<usize>,
    /// Its position in the weights.
    pub(crate) at: Range<usize>,
    /// Its layout there.
    pub(crate) packing: Packing,
}

/// A fully connected layer to build.
pub(crate) struct LinearSpec<'a> {
    /// Full name of the weight.
    pub weight: String,
    /// Full name of the bias, if there is one.
    pub bias: Option<String>,
    pub input: View,
    pub output: View,
    /// Whether a ReLU follows.
    pub relu: bool,
    /// The weight's shape, if it is not (out, in).
    pub shape: Option<&'a [usize]>,
}

/// Assembles a network.
pub(crate) struct Builder<T> {
    pub(crate) widths: Vec<usize>,
    pub(crate) layers: Vec<Box<dyn Layer<T>>>,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) values: usize,
    pub(crate) transposed: usize,
    /// The dense inputs: the first columns of buffer 0, which need no gradient.
    pub(crate) dense: usize,
}

/// The end of a multilayer perceptron.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LastLayer {
    /// A logit, or a term of one.
    Linear,
    Relu,
}

impl<T: Real> Builder<T> {
    /// A network with an input row of `width` columns. The first `dense` columns need no gradient.
    #[must_use]
    pub(crate) fn new(width: usize, dense: usize) -> Self {
        Self {
            widths: vec![width],
            layers: Vec::new(),
            parameters: Vec::new(),
            values: 0,
            transposed: 0,
            dense,
        }
    }

    /// Adds a buffer of `width` columns.
    pub(crate) fn buffer(&mut self, width: usize) -> View {
        self.widths.push(width);
        View { buffer: self.widths.len() - 1, column: 0, width }
    }

    /// Adds a layer. If it has weights, they must be allocated directly before this call.
    pub(crate) fn push(&mut self, layer: impl Layer<T> + 'static) {
        self.layers.push(Box::new(layer));
    }

    /// Allocates a named tensor in the weights.
    pub(crate) fn parameter(&mut self, name: String, shape: Vec<usize>, packing: Packing) -> Range<usize> {
        let len = match packing {
            Packing::Panels => packed_len(shape.last().copied().unwrap_or(1), shape[0]),
            Packing::Plain => shape.iter().product::<usize>().next_multiple_of(LANES),
        };
        let at = self.values..self.values + len;
        self.values = at.end;
        self.parameters.push(Parameter { name, shape, at: at.clone(), packing });
        at
    }

    /// Adds a fully connected layer.
    pub(crate) fn linear(&mut self, spec: LinearSpec<'_>) {
        let shape = spec.shape.map_or_else(|| vec![spec.output.width, spec.input.width], <[usize]>::to_vec);
        let at = self.values;
        let weight = at..at + packed_len(spec.input.width, spec.output.width);
        self.values = weight.end;
        self.parameters.push(Parameter {
            name: spec.weight,
            shape,
            at: weight.clone(),
            packing: Packing::Panels,
        });
        let bias =
            spec.bias.map_or(0..0, |name| self.parameter(name, vec![spec.output.width], Packing::Plain));
        let wants_gradient = spec.input.buffer > 0 || spec.input.column + spec.input.width > self.dense;
        let mut layer = Linear {
            input: spec.input,
            output: spec.output,
            relu: spec.relu,
            weight,
            bias,
            transposed: 0..0,
        };
        if wants_gradient {
            layer.transposed = self.transposed..self.transposed + layer.transposed_len();
            self.transposed = layer.transposed.end;
        }
        self.push(layer);
    }

    /// Adds a multilayer perceptron `name.0`, `name.1`, ... with a ReLU after each layer but the last, whose
    /// end `last` is. Returns its output.
    pub(crate) fn mlp(&mut self, name: &str, input: View, sizes: &[usize], last: LastLayer) -> View {
        let mut from = input;
        for (i, &size) in sizes.iter().enumerate() {
            let output = self.buffer(size);
            self.linear(LinearSpec {
                weight: format!("{name}.{i}.weight"),
                bias: Some(format!("{name}.{i}.bias")),
                input: from,
                output,
                relu: last == LastLayer::Relu || i + 1 < sizes.len(),
                shape: None,
            });
            from = output;
        }
        from
    }
}
