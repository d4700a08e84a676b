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

use std::fmt;

use prost::bytes::Bytes;
use smallvec::SmallVec;

use super::request::{InputTensor, Shape};
use crate::schema::{Arity, Schema};
use crate::server::convert::{Inputs, Scratch, clip, no_ids, no_text};
use crate::server::inference::InferTensorContents;
use crate::server::received::{Malformed, fields};
use crate::server::status::CallError;
use crate::types::{Batch, RawFeature, RawValues};

/// Ends the name of a feature's tensor of lengths. Names in a schema have no colon.
pub(crate) const LENGTHS: &str = ":lengths";

/// Why the tensors of a request are not a batch of the model.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TensorError {
    #[error("message: malformed: {0}")]
    Malformed(#[from] Malformed),
    #[error("inputs[{at}]: malformed: {error}")]
    MalformedTensor { at: usize, error: Malformed },
    #[error("input {name:?}: the model has no such input")]
    Unknown { name: String },
    #[error("input {name:?}: missing")]
    Missing { name: String },
    #[error("input {name:?}: given more than once")]
    Duplicate { name: String },
    #[error("input {name:?}: shared memory is not supported")]
    SharedMemory { name: String },
    #[error("input {name:?}: datatype: expected {expected}, got {got:?}")]
    Datatype { name: String, expected: OneOf, got: String },
    #[error("input {name:?}: shape: expected {expected}, got {got}")]
    Shape { name: String, expected: Dims, got: Dims },
    #[error("input {name:?}: shape: expected at least 1 sample, got 0")]
    NoSamples { name: String },
    #[error("input {name:?}: shape: limit {limit} samples (server.max_samples), got {got}")]
    TooManySamples { name: String, limit: usize, got: i64 },
    #[error("raw_input_contents: expected {inputs} entries, one per input, got {got}")]
    RawCount { inputs: usize, got: usize },
    #[error("input {name:?}: contents: expected none, because raw_input_contents is given")]
    BothContents { name: String },
    #[error("input {name:?}: contents: expected only {expected}, the field of its datatype")]
    ContentsField { name: String, expected: &'static str },
    #[error("input {name:?}: contents: expected {expected} elements for its shape, got {got}")]
    Count { name: String, expected: usize, got: usize },
    #[error("input {name:?}: raw contents: expected {expected} bytes for its shape, got {got}")]
    RawBytes { name: String, expected: usize, got: usize },
    #[error("input {name:?}: raw contents: element {element} needs {needed} bytes, {left} are left")]
    RawElement { name: String, element: usize, needed: usize, left: usize },
    #[error("input {name:?}: element {element}: expected an id of at least 0, got {got}")]
    NegativeId { name: String, element: usize, got: i64 },
    #[error("input {name:?}: element {element}: expected a length of at least 0, got {got}")]
    NegativeLength { name: String, element: usize, got: i32 },
    #[error("input {name:?}: expected a sum of {values}, the number of values of {feature:?}, got {sum}")]
    LengthSum { name: String, feature: String, values: usize, sum: u64 },
}

/// Datatypes in an error.
#[derive(Debug)]
pub(crate) struct OneOf(&'static [&'static str]);

impl fmt::Display for OneOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(" or "))
    }
}

/// A shape in an error. -1 is any size.
#[derive(Debug)]
pub(crate) struct Dims(Vec<i64>);

/// Most dimensions of a client's shape in an error.
const SHOWN: usize = 8;

impl Dims {
    fn of(shape: &[i64]) -> Self {
        Self(shape.iter().take(SHOWN + 1).copied().collect())
    }
}

impl fmt::Display for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<String> = self.0.iter().take(SHOWN).map(i64::to_string).collect();
        let more = if self.0.len() > SHOWN { ", ..." } else { "" };
        write!(f, "[{}{more}]", shown.join(", "))
    }
}

/// The name of the tensor of dense inputs. A feature of this name keeps it.
pub(crate) fn dense_name(schema: &Schema) -> &'static str {
    if schema.features.iter().any(|feature| feature.name == "dense") { ":dense" } else { "dense" }
}

/// An input tensor of a message, with its elements.
struct Tensor<'m> {
    name: &'m str,
    datatype: &'m str,
    shape: Shape,
    elements: Elements<'m>,
}

enum Elements<'m> {
    Raw(&'m [u8]),
    Typed(Box<InferTensorContents>),
}

/// The tensors of a request by what they are, in the order of the schema.
struct Tensors<'m> {
    dense: Option<Tensor<'m>>,
    values: Vec<Option<Tensor<'m>>>,
    lengths: Vec<Option<Tensor<'m>>>,
}

/// The tensors of a request, and the raw contents of each, if there are any. All are slices of its message.
pub(crate) struct Parts<'m> {
    message: &'m Bytes,
    tensors: Slices<'m>,
    raw: Slices<'m>,
}

type Slices<'m> = SmallVec<[&'m [u8]; 32]>;

/// Fields of a request.
const INPUTS: u32 = 5;
const RAW_INPUT_CONTENTS: u32 = 7;

impl<'m> Parts<'m> {
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

/// The number of elements in each field.
fn lens(contents: &InferTensorContents) -> [usize; 8] {
    [
        contents.bool_contents.len(),
        contents.int_contents.len(),
        contents.int64_contents.len(),
        contents.uint_contents.len(),
        contents.uint64_contents.len(),
        contents.fp32_contents.len(),
        contents.fp64_contents.len(),
        contents.bytes_contents.len(),
    ]
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
        let Some(&got) = tensor.shape.first().filter(|size| **size >= 0) else {
            let expected = match &self.dense {
                Some(_) => vec![-1, inputs.schema.dense_width() as i64],
                None => vec![-1; tensor.shape.len().max(1)],
            };
            let got = Dims::of(&tensor.shape);
            return Err(TensorError::Shape { name: name(), expected: Dims(expected), got });
        };
        if got == 0 {
            return Err(TensorError::NoSamples { name: name() });
        }
        let limit = inputs.max_samples;
        match usize::try_from(got).ok().filter(|got| *got <= limit) {
            Some(samples) => Ok(samples),
            None => Err(TensorError::TooManySamples { name: name(), limit, got }),
        }
    }

    /// Writes the raw batch. It has the right number of columns and of samples.
    fn fill(self, schema: &Schema, scratch: &mut Scratch) -> Result<(), TensorError> {
        let raw = &mut scratch.raw;
        raw.dense.clear();
        if let Some(dense) = self.dense {
            dense.numbers([raw.samples, schema.dense_width()], &mut raw.dense)?;
        }
        let tensors = self.values.into_iter().zip(self.lengths);
        for ((feature, (values, lengths)), column) in
            schema.features.iter().zip(tensors).zip(&mut raw.features)
        {
            // No tensor is missing.
            let Some(values) = values else { continue };
            let lay_out = Column { samples: raw.samples, one_hot: feature.arity == Arity::OneHot };
            lay_out.fill(values, lengths, column)?;
        }
        Ok(())
    }
}

/// How the values of a feature are spread over samples.
struct Column {
    samples: usize,
    one_hot: bool,
}

impl Column {
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

impl<'m> Tensor<'m> {
    /// The tensor with its elements: raw ones, or its own.
    fn new(tensor: InputTensor<'m>, raw: Option<&'m [u8]>) -> Result<Self, TensorError> {
        let InputTensor { name, datatype, shape, shared_memory, contents } = tensor;
        if shared_memory {
            return Err(TensorError::SharedMemory { name: clip(name.to_owned()) });
        }
        let elements = match (raw, contents) {
            (Some(_), Some(contents)) if lens(&contents).iter().any(|len| *len > 0) => {
                return Err(TensorError::BothContents { name: clip(name.to_owned()) });
            }
            (Some(bytes), _) => Elements::Raw(bytes),
            (None, contents) => Elements::Typed(contents.unwrap_or_default()),
        };
        Ok(Self { name, datatype, shape, elements })
    }

    fn check_shape(&self, expected: &[i64]) -> Result<(), TensorError> {
        if self.shape[..] == *expected { Ok(()) } else { Err(self.wrong_shape(expected)) }
    }

    fn wrong_shape(&self, expected: &[i64]) -> TensorError {
        let (expected, got) = (Dims(expected.to_vec()), Dims::of(&self.shape));
        TensorError::Shape { name: self.name.to_owned(), expected, got }
    }

    fn check_datatype(&self, expected: &'static [&'static str]) -> Result<(), TensorError> {
        if expected.contains(&self.datatype) {
            return Ok(());
        }
        let got = clip(self.datatype.to_owned());
        Err(TensorError::Datatype { name: self.name.to_owned(), expected: OneOf(expected), got })
    }

    /// Checks the number of typed elements, `got` in the field of the datatype and `all` in all fields.
    fn check_typed(
        name: &str,
        field: &'static str,
        expected: usize,
        (got, all): (usize, usize),
    ) -> Result<(), TensorError> {
        let name = || name.to_owned();
        if all != got {
            return Err(TensorError::ContentsField { name: name(), expected: field });
        }
        if got != expected {
            return Err(TensorError::Count { name: name(), expected, got });
        }
        Ok(())
    }

    /// Checks that raw contents have `count` elements of `N` bytes, and returns them.
    fn raw<'b, const N: usize>(
        name: &str,
        bytes: &'b [u8],
        count: usize,
    ) -> Result<impl Iterator<Item = [u8; N]> + 'b, TensorError> {
        let expected = count.saturating_mul(N);
        if bytes.len() != expected {
            return Err(TensorError::RawBytes { name: name.to_owned(), expected, got: bytes.len() });
        }
        let (elements, _) = bytes.as_chunks::<N>();
        Ok(elements.iter().copied())
    }

    /// Writes the dense values of some samples.
    fn numbers(&self, [samples, width]: [usize; 2], out: &mut Vec<f32>) -> Result<(), TensorError> {
        self.check_datatype(&["FP32"])?;
        self.check_shape(&[samples as i64, width as i64])?;
        let count = samples * width;
        match &self.elements {
            Elements::Raw(bytes) => out.extend(Self::raw(self.name, bytes, count)?.map(f32::from_le_bytes)),
            Elements::Typed(contents) => {
                let counts = (contents.fp32_contents.len(), lens(contents).iter().sum());
                Self::check_typed(self.name, "fp32_contents", count, counts)?;
                out.extend_from_slice(&contents.fp32_contents);
            }
        }
        Ok(())
    }

    /// Writes the ends of `samples` lengths, after a 0. Returns their sum.
    fn ends(&self, samples: usize, out: &mut Vec<u32>) -> Result<u64, TensorError> {
        self.check_datatype(&["INT32"])?;
        self.check_shape(&[samples as i64])?;
        out.push(0);
        match &self.elements {
            Elements::Raw(bytes) => {
                self.add_ends(Self::raw(self.name, bytes, samples)?.map(i32::from_le_bytes), out)
            }
            Elements::Typed(contents) => {
                let counts = (contents.int_contents.len(), lens(contents).iter().sum());
                Self::check_typed(self.name, "int_contents", samples, counts)?;
                self.add_ends(contents.int_contents.iter().copied(), out)
            }
        }
    }

    /// Adds the ends of these lengths. Returns their sum.
    fn add_ends(&self, lengths: impl Iterator<Item = i32>, out: &mut Vec<u32>) -> Result<u64, TensorError> {
        let mut sum = 0_u64;
        for (element, got) in lengths.enumerate() {
            let Ok(length) = u32::try_from(got) else {
                return Err(TensorError::NegativeLength { name: self.name.to_owned(), element, got });
            };
            sum += u64::from(length);
            // A sum that does not fit is refused, because it is not the number of values.
            out.push(sum as u32);
        }
        Ok(sum)
    }

    /// Writes `count` values of a feature, by their datatype, which was checked.
    fn values(&self, count: usize, out: &mut RawValues) -> Result<(), TensorError> {
        if self.datatype == "BYTES" { self.strings(count, out) } else { self.ids(count, out) }
    }

    fn ids(&self, count: usize, out: &mut RawValues) -> Result<(), TensorError> {
        let ids = no_ids(out);
        match &self.elements {
            Elements::Raw(bytes) => ids.extend(Self::raw(self.name, bytes, count)?.map(u64::from_le_bytes)),
            Elements::Typed(contents) => {
                let counts = (contents.int64_contents.len(), lens(contents).iter().sum());
                Self::check_typed(self.name, "int64_contents", count, counts)?;
                ids.extend(contents.int64_contents.iter().map(|id| id.cast_unsigned()));
            }
        }
        if let Some(element) = ids.iter().position(|id| id.cast_signed() < 0) {
            let (name, got) = (self.name.to_owned(), ids[element].cast_signed());
            return Err(TensorError::NegativeId { name, element, got });
        }
        Ok(())
    }

    fn strings(&self, count: usize, out: &mut RawValues) -> Result<(), TensorError> {
        match &self.elements {
            Elements::Typed(contents) => {
                let counts = (contents.bytes_contents.len(), lens(contents).iter().sum());
                Self::check_typed(self.name, "bytes_contents", count, counts)?;
                fill_text(&contents.bytes_contents, out);
                Ok(())
            }
            Elements::Raw(bytes) => raw_strings(self.name, bytes, count, out),
        }
    }
}

/// Concatenates the strings. A message is at most 1 GiB, so their ends fit in 32 bits.
fn fill_text(strings: &[Bytes], values: &mut RawValues) {
    let (bytes, ends) = no_text(values);
    for string in strings {
        bytes.extend_from_slice(string);
        ends.push(bytes.len() as u32);
    }
}

/// Writes raw strings. Each begins with its length, in 4 bytes.
fn raw_strings(name: &str, mut raw: &[u8], count: usize, out: &mut RawValues) -> Result<(), TensorError> {
    let name = || name.to_owned();
    let (bytes, ends) = no_text(out);
    while let Some((length, rest)) = raw.split_first_chunk() {
        let (needed, element) = (u32::from_le_bytes(*length) as usize, ends.len());
        let Some((string, rest)) = rest.split_at_checked(needed) else {
            return Err(TensorError::RawElement { name: name(), element, needed, left: rest.len() });
        };
        bytes.extend_from_slice(string);
        // A message is at most 1 GiB, so the ends fit in 32 bits.
        ends.push(bytes.len() as u32);
        raw = rest;
    }
    if !raw.is_empty() {
        return Err(TensorError::RawElement {
            name: name(),
            element: ends.len(),
            needed: 4,
            left: raw.len(),
        });
    }
    if ends.len() != count {
        return Err(TensorError::Count { name: name(), expected: count, got: ends.len() });
    }
    Ok(())
}
