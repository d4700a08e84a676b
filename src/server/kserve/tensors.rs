//! Converts the input tensors of a KServe request to a batch.
//!
//! | tensor | datatype, shape for n samples |
//! |---|---|
//! | `dense` | `FP32 [n, dense inputs]` |
//! | a one-hot feature | INT64 or BYTES, `[n, 1]` |
//! | a multi-hot feature | INT64 or BYTES, `[values of all samples]` or `[n, values of each sample]` |
//! | `<feature>:lengths` | `INT32 [n]`: values of each sample; only with the first form |
//!
//! The number of samples is that of the first tensor of a model with one row a sample. The message is
//! untrusted: a shape is compared with the number of elements before anything is allocated for it. Raw
//! contents are converted from the message to the raw batch directly.

mod error;
mod tensor;

use prost::bytes::Bytes;
use smallvec::SmallVec;

use super::request::InputTensor;
use crate::schema::{Arity, Schema};
use crate::server::convert::{ConvertScratch, Inputs, clip};
use crate::server::received::fields;
use crate::server::status::CallError;
use crate::types::{Batch, RawFeature};
use error::Dims;
pub(crate) use error::TensorError;
use tensor::Tensor;

/// Ends the name of a feature's tensor of lengths. Names in a schema have no colon.
pub(crate) const LENGTHS: &str = ":lengths";

/// The name of the tensor of dense inputs. A feature of this name keeps it.
pub(crate) fn dense_name(schema: &Schema) -> &'static str {
    if schema.features.iter().any(|feature| feature.name == "dense") { ":dense" } else { "dense" }
}

/// The tensors of a request by what they are, in the order of the schema.
struct Tensors<'m> {
    dense: Option<Tensor<'m>>,
    values: Vec<Option<Tensor<'m>>>,
    lengths: Vec<Option<Tensor<'m>>>,
}

/// The encoded tensors of a request, and the raw contents of each, if there are any. All are slices of its
/// message.
pub(crate) struct EncodedInputs<'m> {
    message: &'m Bytes,
    tensors: Slices<'m>,
    raw: Slices<'m>,
}

type Slices<'m> = SmallVec<[&'m [u8]; 32]>;

/// Fields of a request.
const INPUTS: u32 = 5;
const RAW_INPUT_CONTENTS: u32 = 7;

impl<'m> EncodedInputs<'m> {
    /// # Errors
    /// When the message is malformed, or not every tensor has raw contents. Clients send none for a tensor in
    /// shared memory, which is named then.
    pub(crate) fn find(message: &'m Bytes) -> Result<Self, TensorError> {
        let (mut tensors, mut raw) = (Slices::new(), Slices::new());
        for field in fields(message) {
            let field = field?;
            match field.number {
                INPUTS => tensors.push(field.bytes()?),
                RAW_INPUT_CONTENTS => raw.push(field.bytes()?),
                _ => {}
            }
        }
        if !raw.is_empty() && raw.len() != tensors.len() {
            for (at, bytes) in tensors.iter().enumerate() {
                let read = InputTensor::read(bytes, message);
                let tensor = read.map_err(|error| TensorError::MalformedTensor { at, error })?;
                if tensor.shared_memory {
                    return Err(TensorError::SharedMemory { name: clip(tensor.name.to_owned()) });
                }
            }
            return Err(TensorError::RawCount { inputs: tensors.len(), got: raw.len() });
        }
        Ok(Self { message, tensors, raw })
    }

    /// Whether the client gives, and expects, raw contents.
    pub(crate) fn are_raw(&self) -> bool {
        !self.raw.is_empty()
    }

    /// Overwrites `out` with the batch of the tensors.
    ///
    /// # Errors
    /// When the tensors are not a batch of this model, or exceed a limit.
    pub(crate) fn encode(&self, inputs: &Inputs, out: &mut Batch) -> Result<(), CallError> {
        let Self { message, tensors, raw } = self;
        let tensors = tensors.iter().enumerate().map(|(at, tensor)| {
            let read = InputTensor::read(tensor, message);
            let tensor = read.map_err(|error| TensorError::MalformedTensor { at, error })?;
            Tensor::new(tensor, raw.get(at).copied())
        });
        let tensors = Tensors::sort(inputs, tensors)?;
        let samples = tensors.samples(inputs)?;
        inputs.convert(samples, out, |scratch| Ok(tensors.fill(&inputs.schema, scratch)?), |_| ())
    }
}

impl<'m> Tensors<'m> {
    fn sort(
        inputs: &Inputs,
        tensors: impl Iterator<Item = Result<Tensor<'m>, TensorError>>,
    ) -> Result<Self, TensorError> {
        let schema = &inputs.schema;
        let none = || schema.features.iter().map(|_| None).collect::<Vec<_>>();
        let mut sorted = Self { dense: None, values: none(), lengths: none() };
        let dense = (schema.dense_width() > 0).then(|| dense_name(schema));
        // Clients often send the tensors in the order of the schema, so the next feature is a good guess.
        let mut likely = 0;
        for tensor in tensors {
            let tensor = tensor?;
            let name = tensor.name;
            let place = if Some(name) == dense {
                Some(&mut sorted.dense)
            } else if let Some(feature) = name.strip_suffix(LENGTHS) {
                let index = inputs.index(feature, likely.max(1) - 1);
                let multi_hot = |index: &usize| schema.features[*index].arity != Arity::OneHot;
                index.filter(multi_hot).map(|index| &mut sorted.lengths[index])
            } else {
                let index = inputs.index(name, likely);
                likely = index.map_or(likely, |index| index + 1);
                index.map(|index| &mut sorted.values[index])
            };
            match place {
                None => return Err(TensorError::Unknown { name: clip(name.to_owned()) }),
                Some(Some(_)) => return Err(TensorError::Duplicate { name: name.to_owned() }),
                Some(place) => *place = Some(tensor),
            }
        }
        sorted.check_complete(schema)?;
        Ok(sorted)
    }

    /// Checks that no tensor is missing.
    fn check_complete(&self, schema: &Schema) -> Result<(), TensorError> {
        if self.dense.is_none() && schema.dense_width() > 0 {
            return Err(TensorError::Missing { name: dense_name(schema).to_owned() });
        }
        for ((feature, values), lengths) in schema.features.iter().zip(&self.values).zip(&self.lengths) {
            let Some(values) = values else {
                return Err(TensorError::Missing { name: feature.name.clone() });
            };
            if feature.arity != Arity::OneHot && lengths.is_none() && values.shape.len() == 1 {
                return Err(TensorError::Missing { name: format!("{}{LENGTHS}", feature.name) });
            }
        }
        Ok(())
    }

    /// The number of samples, by the first tensor with a row for each sample.
    fn samples(&self, inputs: &Inputs) -> Result<usize, TensorError> {
        let per_sample = self.lengths.iter().zip(&self.values).find_map(|(l, v)| l.as_ref().or(v.as_ref()));
        // A schema has at least one feature, and none is missing.
        let Some(tensor) = self.dense.as_ref().or(per_sample) else { return Ok(0) };
        let name = || tensor.name.to_owned();
        let Some(&got) = tensor.shape.first() else {
            let expected = match &self.dense {
                Some(_) => vec![-1, inputs.schema.dense_width() as i64],
                None => vec![-1; tensor.shape.len().max(1)],
            };
            let got = Dims::of(&tensor.shape);
            return Err(TensorError::Shape { name: name(), expected: Dims(expected), got });
        };
        if got <= 0 {
            return Err(TensorError::NoSamples { name: name(), got });
        }
        let limit = inputs.max_samples;
        match usize::try_from(got).ok().filter(|got| *got <= limit) {
            Some(samples) => Ok(samples),
            None => Err(TensorError::TooManySamples { name: name(), limit, got }),
        }
    }

    /// Writes the raw batch. It has the right number of columns and of samples.
    fn fill(self, schema: &Schema, scratch: &mut ConvertScratch) -> Result<(), TensorError> {
        let raw = &mut scratch.raw;
        raw.dense.clear();
        if let Some(dense) = self.dense {
            dense.numbers(raw.samples, schema.dense_width(), &mut raw.dense)?;
        }
        let tensors = self.values.into_iter().zip(self.lengths);
        for ((feature, (values, lengths)), column) in
            schema.features.iter().zip(tensors).zip(&mut raw.features)
        {
            // No tensor is missing.
            let Some(values) = values else { continue };
            let lay_out = FeatureLayout { samples: raw.samples, one_hot: feature.arity == Arity::OneHot };
            lay_out.fill(values, lengths, column)?;
        }
        Ok(())
    }
}

/// How the values of a feature are spread over samples.
struct FeatureLayout {
    samples: usize,
    one_hot: bool,
}

impl FeatureLayout {
    fn fill(
        &self,
        values: Tensor<'_>,
        lengths: Option<Tensor<'_>>,
        column: &mut RawFeature,
    ) -> Result<(), TensorError> {
        let samples = self.samples;
        column.offsets.clear();
        values.check_datatype(&["INT64", "BYTES"])?;
        let Some(lengths) = lengths else {
            let each = match values.shape[..] {
                [_, each] if !self.one_hot => each.max(0),
                _ => 1,
            };
            values.check_shape(&[samples as i64, each])?;
            // The product is compared with the number of elements, and all ends are at most the product.
            let count = usize::try_from(each).ok().and_then(|each| each.checked_mul(samples));
            let count = count.filter(|count| u32::try_from(*count).is_ok()).unwrap_or(usize::MAX);
            values.values(count, &mut column.values)?;
            column.offsets.extend((0..=samples).map(|sample| (sample * each as usize) as u32));
            return Ok(());
        };
        let count = match values.shape[..] {
            [count] if count >= 0 => count,
            _ => return Err(values.wrong_shape(&[-1])),
        };
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        values.values(count, &mut column.values)?;
        let sum = lengths.ends(samples, &mut column.offsets)?;
        if sum != count as u64 {
            let (name, feature) = (lengths.name.to_owned(), values.name.to_owned());
            return Err(TensorError::LengthSum { name, feature, values: count, sum });
        }
        Ok(())
    }
}
