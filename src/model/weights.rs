//! A network's numbers: their first values, and their way to and from named tensors.
//!
//! First values are a pure function of (seed, tensor, element), spread as PyTorch's `nn.Linear`
//! spreads them: a layer's weights and its bias uniformly between `-1 / sqrt(n)` and `1 / sqrt(n)`,
//! where `n` is how many inputs it has.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::Model;
use super::layer::{Packing, Parameter, Weights};
use crate::compute::{LANES, Real};

/// Why tensors are not this network's.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// A tensor is missing.
    #[error("tensor {0:?}: missing")]
    Missing(String),
    /// A tensor of another shape.
    #[error("tensor {name:?}: expected shape {expected:?}, got {got:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// What the architecture has.
        expected: Vec<usize>,
        /// What came.
        got: Vec<usize>,
    },
    /// A tensor that no layer has.
    #[error("tensor {0:?}: not part of this architecture")]
    Unknown(String),
}

impl Parameter {
    /// The tensor's elements in row-major order, out of a vector laid out as the weights are.
    #[must_use]
    pub fn read<T: Real>(&self, values: &[T]) -> Vec<T> {
        let values = &values[self.at.clone()];
        (0..self.len()).map(|i| values[self.place(i)]).collect()
    }

    /// Puts row-major elements into a vector laid out as the weights are.
    ///
    /// # Panics
    /// When `elements` is longer than the tensor.
    pub(crate) fn write<T: Real>(&self, elements: &[T], values: &mut [T]) {
        let values = &mut values[self.at.clone()];
        for (i, element) in elements.iter().enumerate() {
            values[self.place(i)] = *element;
        }
    }

    /// Elements of the tensor.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has none.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where row-major element `i` lies.
    fn place(&self, i: usize) -> usize {
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
    /// First values. The same seed gives the same bytes.
    #[must_use]
    pub fn initialise(&self, seed: u64) -> Weights<T> {
        let mut weights = Weights::zeroed(self.weights_len());
        let mut bound = 0.0;
        for parameter in self.parameters() {
            // A bias comes behind the weights of its layer and is spread as they are.
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

    /// Weights from named tensors: `tensor` gives the shape and row-major elements of a name.
    ///
    /// # Errors
    /// [`WeightsError`] for a tensor that is missing or of another shape.
    pub fn read_tensors(
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

/// Number `i` of a stream of uniform numbers between -1 and 1.
fn uniform(stream: u64, i: u64) -> f64 {
    let bits = xxh3_64_with_seed(&i.to_le_bytes(), stream);
    ((bits >> 11) as f64 + 0.5) / (1u64 << 52) as f64 - 1.0
}
