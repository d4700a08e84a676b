//! Initial weights, and the conversion between weights and named tensors.
//!
//! Initial weights are a pure function of (seed, tensor, element), with the distribution of PyTorch's
//! `nn.Linear`: the weights and the bias of a layer with `n` inputs are uniform between `-1 / sqrt(n)` and
//! `1 / sqrt(n)`.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::Model;
use super::layer::{Packing, Parameter, Weights};
use crate::compute::{LANES, Real};

/// Why tensors do not fit this network.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages document variants and fields")]
pub enum WeightsError {
    #[error("tensor {0:?}: missing")]
    Missing(String),
    #[error("tensor {name:?}: expected shape {expected:?}, got {got:?}")]
    Shape { name: String, expected: Vec<usize>, got: Vec<usize> },
    #[error("tensor {0:?}: not part of this architecture")]
    Unknown(String),
    #[error("tensor {0:?}: expected finite weights, got NaN or infinity")]
    NotFinite(String),
}

impl Parameter {
    /// The tensor's elements in row-major order. `values` has the layout of the weights.
    #[must_use]
    pub(crate) fn read<T: Real>(&self, values: &[T]) -> Vec<T> {
        let values = &values[self.at.clone()];
        (0..self.len()).map(|i| values[self.position(i)]).collect()
    }

    /// Writes row-major elements to the tensor's place in `values`, which has the layout of the weights.
    ///
    /// # Panics
    /// When `elements` is longer than the tensor.
    pub(crate) fn write<T: Real>(&self, elements: &[T], values: &mut [T]) {
        let values = &mut values[self.at.clone()];
        for (i, element) in elements.iter().enumerate() {
            values[self.position(i)] = *element;
        }
    }

    /// Number of elements.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Position of row-major element `i`.
    fn position(&self, i: usize) -> usize {
        match self.packing {
            Packing::Plain => i,
            Packing::Panels => {
                let depth = self.shape.last().copied().unwrap_or(1).max(1);
                let (column, row) = (i / depth, i % depth);
                (column / LANES * depth + row) * LANES + column % LANES
            }
        }
    }
}

impl<T: Real> Model<T> {
    /// Initial weights. The same seed gives the same bytes.
    #[must_use]
    pub fn initialise(&self, seed: u64) -> Weights<T> {
        let mut weights = Weights::zeroed(self.weights_len());
        let mut bound = 0.0;
        for parameter in self.parameters() {
            // A bias comes after the weights of its layer and uses the same bound.
            if parameter.packing == Packing::Panels {
                let inputs = parameter.shape.last().copied().unwrap_or(0);
                bound = 1.0 / (inputs.max(1) as f64).sqrt();
            }
            let stream = xxh3_64_with_seed(parameter.name.as_bytes(), seed);
            let element = |i: usize| T::from_f64(f64::from((uniform(stream, i as u64) * bound) as f32));
            let elements: Vec<_> = (0..parameter.len()).map(element).collect();
            parameter.write(&elements, &mut weights.values);
        }
        weights
    }

    /// Weights from named tensors. `tensor` returns the shape and the row-major elements for a name.
    ///
    /// # Errors
    /// [`WeightsError`] for a missing tensor or a wrong shape.
    pub(crate) fn read_tensors(
        &self,
        mut tensor: impl FnMut(&str) -> Option<(Vec<usize>, Vec<T>)>,
    ) -> Result<Weights<T>, WeightsError> {
        let mut weights = Weights::zeroed(self.weights_len());
        for parameter in self.parameters() {
            let name = &parameter.name;
            let (got, elements) = tensor(name).ok_or_else(|| WeightsError::Missing(name.clone()))?;
            if got != parameter.shape || elements.len() != parameter.len() {
                let expected = parameter.shape.clone();
                return Err(WeightsError::Shape { name: name.clone(), expected, got });
            }
            parameter.write(&elements, &mut weights.values);
        }
        Ok(weights)
    }
}

/// Number `i` of a stream of uniform random numbers between -1 and 1. Any `i` can be computed directly.
fn uniform(stream: u64, i: u64) -> f64 {
    let bits = xxh3_64_with_seed(&i.to_le_bytes(), stream);
    ((bits >> 11) as f64 + 0.5) / (1u64 << 52) as f64 - 1.0
}
