//! What a layer is, and the builder by which the architectures put layers together.
//!
//! All weights of a network lie in one vector, layer after layer, each layer cut into pieces whose
//! gradients are independent. So one loop over the pieces computes gradients and updates weights on
//! any number of threads, and a checkpoint, an average over replicas or an optimizer's state is one
//! vector too. Padding lanes hold zeros: their gradients are zero, and every optimizer leaves a
//! weight of zero with a gradient of zero alone.

use std::ops::Range;

use aligned_vec::AVec;

use super::linear::Linear;
use super::tape::{ALIGNMENT, Tape, View};
use crate::compute::{LANES, Real, packed_len};

/// A step of a network.
pub trait Layer<T: Real>: Send + Sync {
    /// Writes the output view from the input views.
    fn forward(&self, weights: &Weights<T>, tape: &mut Tape<T>);
    /// Adds to the gradients of the input views; those of the output view are complete.
    fn backward(&self, weights: &Weights<T>, tape: &mut Tape<T>);
    /// Lengths of the pieces of its weights, in order.
    fn pieces(&self) -> Vec<usize> {
        Vec::new()
    }
    /// Writes the gradient of one piece, summed over all tapes in order.
    fn gradient(&self, _piece: usize, _tapes: &[Tape<T>], _out: &mut [T]) {}
    /// The fully connected layer that this is, if it is one.
    fn as_linear(&self) -> Option<&Linear> {
        None
    }
}

/// The numbers of a network.
///
/// Both vectors begin at a cache line, and so does every panel in them: a panel's lines are read whole.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights<T> {
    /// Every weight, layer after layer.
    pub values: AVec<T>,
    /// The transposes that backward reads; empty where only scores are wanted.
    pub turned: AVec<T>,
}

impl<T: Real> Weights<T> {
    /// As many weights, all zero, and no transposes.
    #[must_use]
    pub(crate) fn zeroed(len: usize) -> Self {
        let mut values = AVec::new(ALIGNMENT);
        values.resize(len, T::default());
        Self { values, turned: AVec::new(ALIGNMENT) }
    }
}

/// How a named tensor lies among the weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Panels of the transpose of an (out, in) matrix.
    Panels,
    /// One value after the other, padded to whole panels.
    Plain,
}

/// A named tensor of a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// As `dense.safetensors` has it.
    pub name: String,
    /// As PyTorch has it: (out, in) for matrices.
    pub shape: Vec<usize>,
    /// Where it lies among the weights.
    pub at: Range<usize>,
    /// How it lies there.
    pub packing: Packing,
}

/// A fully connected layer to build.
pub(crate) struct LinearSpec<'a> {
    /// The weight's name in full.
    pub weight: String,
    /// The bias's name, for a layer with one.
    pub bias: Option<String>,
    /// What it reads.
    pub input: View,
    /// What it writes.
    pub output: View,
    /// Whether negative outputs become zero.
    pub relu: bool,
    /// The weight's shape where it is not (out, in).
    pub shape: Option<&'a [usize]>,
}

/// Puts a network together.
pub(crate) struct Builder<T> {
    pub(crate) widths: Vec<usize>,
    pub(crate) layers: Vec<Box<dyn Layer<T>>>,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) values: usize,
    pub(crate) turned: usize,
    /// Columns of buffer 0 before which no gradient is wanted: the dense inputs.
    pub(crate) dense: usize,
}

impl<T: Real> Builder<T> {
    /// A network whose input row has `width` columns, the first `dense` of which need no gradient.
    #[must_use]
    pub(crate) fn new(width: usize, dense: usize) -> Self {
        Self { widths: vec![width], layers: Vec::new(), parameters: Vec::new(), values: 0, turned: 0, dense }
    }

    /// A new buffer.
    pub(crate) fn buffer(&mut self, width: usize) -> View {
        self.widths.push(width);
        View { buffer: self.widths.len() - 1, column: 0, width }
    }

    /// Adds a layer that has no weights, or whose weights were taken with [`Builder::parameter`].
    pub(crate) fn push(&mut self, layer: impl Layer<T> + 'static) {
        self.layers.push(Box::new(layer));
    }

    /// Takes room for a vector of weights.
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
        let mut layer =
            Linear { input: spec.input, output: spec.output, relu: spec.relu, weight, bias, turned: 0..0 };
        if wants_gradient {
            layer.turned = self.turned..self.turned + layer.turned_len();
            self.turned = layer.turned.end;
        }
        self.push(layer);
    }

    /// Adds a multilayer perceptron `name.0`, `name.1`, ...: a ReLU after each layer, save the last
    /// when `linear_end`. Gives back its output.
    pub(crate) fn mlp(&mut self, name: &str, input: View, sizes: &[usize], linear_end: bool) -> View {
        let mut from = input;
        for (i, &size) in sizes.iter().enumerate() {
            let output = self.buffer(size);
            self.linear(LinearSpec {
                weight: format!("{name}.{i}.weight"),
                bias: Some(format!("{name}.{i}.bias")),
                input: from,
                output,
                relu: !(linear_end && i + 1 == sizes.len()),
                shape: None,
            });
            from = output;
        }
        from
    }
}
