//! The models: what is computed from an input row, forward and backward.
//!
//! Every architecture is a short list of [`Layer`]s over named buffers, built from the schema by
//! one file each. The same code runs in f32 to serve and train, and in f64 to be checked against
//! finite differences. Embeddings are not here: a model begins at the input row that gather-pool
//! wrote (dense values, pooled vectors, first-order weights) and its backward pass ends at that
//! row's gradient.

mod cross;
mod dcn;
mod deepfm;
mod dlrm;
mod input;
mod interaction;
mod layer;
mod linear;
pub mod loss;
mod tape;
mod weights;
mod wide_deep;

use std::ops::Range;

pub use input::{InputRows, check_length, check_shape};
pub use layer::{Layer, Parameter, Weights};
pub use tape::{MAX_CHUNK, Rows, Tape, View};
pub(crate) use weights::WeightsError;

use crate::compute::Real;
use crate::schema::{Architecture, Schema};
use layer::Builder;
use linear::Linear;

/// The parts of the input row, as the architectures see them.
struct Inputs {
    /// Dense values and pooled vectors.
    all: View,
    /// Dense values.
    dense: View,
    /// Pooled vectors.
    vectors: View,
    /// First-order weights.
    wide: View,
    /// Elements of one vector, where all are alike.
    dim: usize,
}

impl Inputs {
    fn of(schema: &Schema) -> Self {
        let lookups = schema.lookups();
        let (deep, wide) = lookups.split_at(schema.features.len().min(lookups.len()));
        let width = |part: &[crate::schema::Lookup]| part.iter().map(|l| l.dim).sum::<usize>();
        let dense = schema.dense_width();
        let view = |column, width| View { buffer: 0, column, width };
        Self {
            all: view(0, dense + width(deep)),
            dense: view(0, dense),
            vectors: view(dense, width(deep)),
            wide: view(dense + width(deep), width(wide)),
            dim: deep.first().map_or(0, |l| l.dim),
        }
    }
}

/// A network: layers, and where their numbers lie.
pub struct Model<T> {
    widths: Vec<usize>,
    dense_width: usize,
    layers: Vec<Box<dyn Layer<T>>>,
    parameters: Vec<Parameter>,
    /// (layer, piece of the layer) and where it lies among the weights, in order.
    pieces: Vec<(usize, usize, Range<usize>)>,
    values: usize,
    turned: usize,
    logit: View,
}

impl<T: Real> Model<T> {
    /// The network of a schema.
    #[must_use]
    pub fn new(schema: &Schema) -> Self {
        let inputs = Inputs::of(schema);
        let mut net = Builder::new(schema.input_width(), schema.dense_width());
        let logit = match &schema.architecture {
            Architecture::Dlrm { bottom, top } => dlrm::build(&mut net, &inputs, bottom, top),
            Architecture::Dcn { cross_layers, deep } => {
                dcn::build(&mut net, &inputs, (dcn::Cross::Vector, *cross_layers), deep)
            }
            Architecture::Dcnv2 { cross_layers, rank, deep } => {
                let cross = rank.map_or(dcn::Cross::Full, dcn::Cross::LowRank);
                dcn::build(&mut net, &inputs, (cross, *cross_layers), deep)
            }
            Architecture::Deepfm { deep } => deepfm::build(&mut net, &inputs, deep),
            Architecture::WideDeep { deep } => wide_deep::build(&mut net, &inputs, deep),
        };
        Self::from_builder(net, logit)
    }

    fn from_builder(net: Builder<T>, logit: View) -> Self {
        let mut pieces = Vec::new();
        let mut at = 0;
        for (i, layer) in net.layers.iter().enumerate() {
            for (p, len) in layer.pieces().into_iter().enumerate() {
                pieces.push((i, p, at..at + len));
                at += len;
            }
        }
        debug_assert_eq!(at, net.values, "pieces cover the weights in order");
        let Builder { widths, layers, parameters, values, turned, dense } = net;
        Self { widths, dense_width: dense, layers, parameters, pieces, values, turned, logit }
    }

    /// A tape for one chunk; one that only scores has no gradients.
    #[must_use]
    pub fn tape(&self, training: bool) -> Tape<T> {
        Tape::new(&self.widths, self.dense_width, training)
    }

    /// Samples of one chunk: as many as a tape has rows.
    #[must_use]
    pub fn chunk(&self) -> usize {
        tape::chunk::<T>(&self.widths)
    }

    /// Every named tensor.
    #[must_use]
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Elements of the weights, padding included.
    #[must_use]
    pub fn weights_len(&self) -> usize {
        self.values
    }

    /// Lengths of the independent pieces that the weights are cut into, in order.
    pub fn pieces(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.pieces.iter().map(|(_, _, at)| at.len())
    }

    /// From input rows (buffer 0 of the tape) to logits.
    pub fn forward(&self, weights: &Weights<T>, tape: &mut Tape<T>) {
        for layer in &self.layers {
            layer.forward(weights, tape);
        }
    }

    /// The logit of sample `s` after [`Model::forward`].
    #[must_use]
    pub fn logit(&self, tape: &Tape<T>, s: usize) -> T {
        tape.values[self.logit.buffer].row(s, self.logit)[0]
    }

    /// From the logits' gradients, `slope(s)` of sample `s`, to those of every buffer; those of
    /// buffer 0 are the input rows'. Dense columns of a first linear layer are left at zero.
    pub fn backward(&self, weights: &Weights<T>, tape: &mut Tape<T>, slope: impl Fn(usize, T) -> T) {
        tape.zero_grads();
        for s in 0..tape.samples {
            let z = self.logit(tape, s);
            tape.grads[self.logit.buffer].row_mut(s, self.logit)[0] = slope(s, z);
        }
        for layer in self.layers.iter().rev() {
            layer.backward(weights, tape);
        }
    }

    /// The gradient of one piece of the weights, summed over the tapes in order.
    pub fn gradient(&self, piece: usize, tapes: &[Tape<T>], out: &mut [T]) {
        let (layer, part, _) = &self.pieces[piece];
        self.layers[*layer].gradient(*part, tapes, out);
    }

    /// Brings the turned weights up to date; backward reads them.
    pub fn turn(&self, weights: &mut Weights<T>) {
        weights.turned.resize(self.turned, T::default());
        let Weights { values, turned } = weights;
        let panels = split_panels(self.linear_layers(), turned);
        rayon::iter::ParallelIterator::for_each(
            rayon::iter::IntoParallelIterator::into_par_iter(panels),
            |(layer, p, out)| layer.turn_panel(values, p, out),
        );
    }

    fn linear_layers(&self) -> impl Iterator<Item = &Linear> {
        self.layers.iter().filter_map(|l| l.as_linear()).filter(|l| !l.turned.is_empty())
    }
}

/// Cuts the turned weights into (layer, panel, room for it).
fn split_panels<'a, T>(
    layers: impl Iterator<Item = &'a Linear>,
    mut turned: &'a mut [T],
) -> Vec<(&'a Linear, usize, &'a mut [T])> {
    let mut panels = Vec::new();
    for layer in layers {
        let (mine, rest) = turned.split_at_mut(layer.turned.len());
        turned = rest;
        let parts = mine.chunks_exact_mut(layer.turned_panel_len()).enumerate();
        panels.extend(parts.map(|(p, out)| (layer, p, out)));
    }
    panels
}

#[cfg(test)]
mod tests;
