//! The dense networks: from input rows to logits, and the gradients.
//!
//! An architecture is a list of [`Layer`]s over numbered buffers, built from the schema by one file per
//! architecture. The code is generic: f32 is for serving and training, f64 for tests that compare gradients
//! with finite differences. Embeddings are not part of a network. Gather-pool writes the input row (dense
//! values, pooled vectors, first-order weights), and the backward pass ends with the gradient of the input
//! row.

mod cross;
mod dcn;
mod deepfm;
mod dlrm;
mod input;
mod interaction;
mod layer;
mod linear;
pub mod loss;
pub(crate) mod tape;
mod weights;
mod wide_deep;

pub use input::InputRows;
pub(crate) use input::{check_length, check_shape};
pub use layer::Weights;
pub(crate) use layer::{Layer, Parameter};
pub use tape::Tape;
pub(crate) use tape::{MAX_CHUNK, View};
pub(crate) use weights::WeightsError;

use crate::compute::Real;
use crate::pace::give_way;
use crate::schema::{Architecture, Schema};
use dcn::{Cross, CrossLayers};
use layer::Builder;
use linear::Linear;

/// The parts of the input row.
struct Inputs {
    /// Dense values and pooled vectors.
    all: View,
    dense: View,
    vectors: View,
    /// First-order weights.
    wide: View,
    /// Elements per pooled vector. Only DLRM and DeepFM use it, and they require one number for all features.
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

/// A network: its layers, and the layout of buffers and weights.
pub struct Model<T> {
    widths: Vec<usize>,
    dense_width: usize,
    layers: Vec<Box<dyn Layer<T>>>,
    parameters: Vec<Parameter>,
    /// In the order of the weights.
    pieces: Vec<Piece>,
    values: usize,
    transposed: usize,
    logit: View,
}

/// A piece of the weights, whose gradient is computed at once.
struct Piece {
    /// The index of its layer, and that of the piece within it.
    layer: usize,
    part: usize,
    /// Values.
    len: usize,
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
                let cross = CrossLayers { weights: Cross::Vector, count: *cross_layers };
                dcn::build(&mut net, &inputs, cross, deep)
            }
            Architecture::Dcnv2 { cross_layers, rank, deep } => {
                let weights = rank.map_or(Cross::Full, Cross::LowRank);
                dcn::build(&mut net, &inputs, CrossLayers { weights, count: *cross_layers }, deep)
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
                pieces.push(Piece { layer: i, part: p, len });
                at += len;
            }
        }
        debug_assert_eq!(at, net.values, "pieces cover the weights in order");
        let Builder { widths, layers, parameters, values, transposed, dense } = net;
        Self { widths, dense_width: dense, layers, parameters, pieces, values, transposed, logit }
    }

    /// A tape for a chunk of [`Self::chunk`] samples, with gradients.
    #[must_use]
    pub fn training_tape(&self) -> Tape<T> {
        Tape::new(&self.widths, self.dense_width, true)
    }

    /// A tape for a chunk of [`Self::scoring_chunk`] samples, without gradients.
    #[must_use]
    pub fn scoring_tape(&self) -> Tape<T> {
        Tape::new(&self.widths, self.dense_width, false)
    }

    /// Most samples of a chunk in training.
    #[must_use]
    pub fn chunk(&self) -> usize {
        tape::chunk::<T>(&self.widths)
    }

    /// Most samples of a chunk when so many threads score a batch.
    #[must_use]
    pub fn scoring_chunk(&self, samples: usize, threads: usize) -> usize {
        tape::scoring_chunk::<T>(&self.widths, samples, threads)
    }

    /// All named tensors.
    #[must_use]
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Number of weights, padding included.
    #[must_use]
    pub fn weights_len(&self) -> usize {
        self.values
    }

    /// Lengths of the pieces of the weights, in order. Their gradients are independent.
    pub fn pieces(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.pieces.iter().map(|piece| piece.len)
    }

    /// Computes logits from input rows (buffer 0 of the tape).
    pub fn forward(&self, weights: &Weights<T>, tape: &mut Tape<T>) {
        for layer in &self.layers {
            // Training, and scoring for a shadow, run only when a processor is free.
            give_way();
            layer.forward(weights, tape);
        }
    }

    /// The logit of sample `s` after [`Model::forward`].
    #[must_use]
    pub(crate) fn logit(&self, tape: &Tape<T>, s: usize) -> T {
        tape.values[self.logit.buffer].row(s, self.logit)[0]
    }

    /// Computes the gradients of all buffers after [`Model::forward`]. `slope(s, z)` is the derivative of the
    /// loss of sample `s` with respect to its logit `z`. Buffer 0 then has the gradients of the input rows,
    /// except that those of dense values may be 0, because nothing uses them.
    pub fn backward(&self, weights: &Weights<T>, tape: &mut Tape<T>, slope: impl Fn(usize, T) -> T) {
        tape.zero_grads();
        for s in 0..tape.samples {
            let z = self.logit(tape, s);
            tape.grads[self.logit.buffer].row_mut(s, self.logit)[0] = slope(s, z);
        }
        for layer in self.layers.iter().rev() {
            give_way();
            layer.backward(weights, tape);
        }
    }

    /// Computes the gradient of one piece of the weights, summed over the tapes in order.
    pub fn gradient(&self, piece: usize, tapes: &[Tape<T>], out: &mut [T]) {
        let Piece { layer, part, .. } = self.pieces[piece];
        self.layers[layer].gradient(part, tapes, out);
    }

    /// Updates the transposed weights, which [`Model::backward`] reads.
    pub(crate) fn transpose(&self, weights: &mut Weights<T>) {
        weights.transposed.resize(self.transposed, T::default());
        let Weights { values, transposed } = weights;
        let panels = split_panels(self.linear_layers(), transposed);
        rayon::iter::ParallelIterator::for_each(
            rayon::iter::IntoParallelIterator::into_par_iter(panels),
            |(layer, p, out)| layer.transpose_panel(values, p, out),
        );
    }

    fn linear_layers(&self) -> impl Iterator<Item = &Linear> {
        self.layers.iter().filter_map(|l| l.as_linear()).filter(|l| !l.transposed.is_empty())
    }
}

/// Splits the transposed weights into panels. Returns the layer, the number of the panel in it, and the
/// elements of each.
fn split_panels<'a, T>(
    layers: impl Iterator<Item = &'a Linear>,
    mut transposed: &'a mut [T],
) -> Vec<(&'a Linear, usize, &'a mut [T])> {
    let mut panels = Vec::new();
    for layer in layers {
        let (own, rest) = transposed.split_at_mut(layer.transposed.len());
        transposed = rest;
        let parts = own.chunks_exact_mut(layer.transposed_panel_len()).enumerate();
        panels.extend(parts.map(|(p, out)| (layer, p, out)));
    }
    panels
}

#[cfg(test)]
mod tests;
