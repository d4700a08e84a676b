//! An input tensor of a request, whose elements are read as dense values, lengths, ids or strings.

use prost::bytes::Bytes;

use super::error::{Dims, OneOf, TensorError};
use crate::server::convert::{clip, no_ids, no_text};
use crate::server::inference::InferTensorContents;
use crate::server::kserve::request::{InputTensor, Shape};
use crate::types::RawValues;

/// An input tensor of a message, with its elements.
pub(super) struct Tensor<'m> {
    pub name: &'m str,
    datatype: &'m str,
    pub shape: Shape,
    elements: Elements<'m>,
}

enum Elements<'m> {
    Raw(&'m [u8]),
    Typed(Box<InferTensorContents>),
}

/// The field of typed contents that has the elements of a datatype.
struct TypedField {
    name: &'static str,
    elements: usize,
}

/// The number of elements in all fields.
fn count(contents: &InferTensorContents) -> usize {
    let fields = [
        contents.bool_contents.len(),
        contents.int_contents.len(),
        contents.int64_contents.len(),
        contents.uint_contents.len(),
        contents.uint64_contents.len(),
        contents.fp32_contents.len(),
        contents.fp64_contents.len(),
        contents.bytes_contents.len(),
    ];
    fields.iter().sum()
}

impl<'m> Tensor<'m> {
    /// The tensor with its elements: raw ones, or its own.
    pub(super) fn new(tensor: InputTensor<'m>, raw: Option<&'m [u8]>) -> Result<Self, TensorError> {
        let InputTensor { name, datatype, shape, shared_memory, contents } = tensor;
        if shared_memory {
            return Err(TensorError::SharedMemory { name: clip(name.to_owned()) });
        }
        let elements = match (raw, contents) {
            (Some(_), Some(contents)) if count(&contents) > 0 => {
                return Err(TensorError::BothContents { name: clip(name.to_owned()) });
            }
            (Some(bytes), _) => Elements::Raw(bytes),
            (None, contents) => Elements::Typed(contents.unwrap_or_default()),
        };
        Ok(Self { name, datatype, shape, elements })
    }

    pub(super) fn check_shape(&self, expected: &[i64]) -> Result<(), TensorError> {
        if self.shape[..] == *expected { Ok(()) } else { Err(self.wrong_shape(expected)) }
    }

    pub(super) fn wrong_shape(&self, expected: &[i64]) -> TensorError {
        let (expected, got) = (Dims(expected.to_vec()), Dims::of(&self.shape));
        TensorError::Shape { name: self.name.to_owned(), expected, got }
    }

    pub(super) fn check_datatype(&self, expected: &'static [&'static str]) -> Result<(), TensorError> {
        if expected.contains(&self.datatype) {
            return Ok(());
        }
        let got = clip(self.datatype.to_owned());
        Err(TensorError::Datatype { name: self.name.to_owned(), expected: OneOf(expected), got })
    }

    /// Checks that typed contents have `expected` elements in the field of the datatype, and no others.
    fn check_typed(
        &self,
        contents: &InferTensorContents,
        field: TypedField,
        expected: usize,
    ) -> Result<(), TensorError> {
        let name = || self.name.to_owned();
        if count(contents) != field.elements {
            return Err(TensorError::ContentsField { name: name(), expected: field.name });
        }
        if field.elements != expected {
            return Err(TensorError::Count { name: name(), expected, got: field.elements });
        }
        Ok(())
    }

    /// Checks that raw contents have `count` elements of `N` bytes, and returns them.
    fn raw<'b, const N: usize>(
        &self,
        bytes: &'b [u8],
        count: usize,
    ) -> Result<impl Iterator<Item = [u8; N]> + use<'b, N>, TensorError> {
        let expected = count.saturating_mul(N);
        if bytes.len() != expected {
            return Err(TensorError::RawBytes { name: self.name.to_owned(), expected, got: bytes.len() });
        }
        let (elements, _) = bytes.as_chunks::<N>();
        Ok(elements.iter().copied())
    }

    /// Writes the dense values of some samples.
    pub(super) fn numbers(
        &self,
        samples: usize,
        width: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), TensorError> {
        self.check_datatype(&["FP32"])?;
        self.check_shape(&[samples as i64, width as i64])?;
        let count = samples * width;
        match &self.elements {
            Elements::Raw(bytes) => out.extend(self.raw(bytes, count)?.map(f32::from_le_bytes)),
            Elements::Typed(contents) => {
                let field = TypedField { name: "fp32_contents", elements: contents.fp32_contents.len() };
                self.check_typed(contents, field, count)?;
                out.extend_from_slice(&contents.fp32_contents);
            }
        }
        Ok(())
    }

    /// Writes the ends of `samples` lengths, after a 0. Returns their sum.
    pub(super) fn ends(&self, samples: usize, out: &mut Vec<u32>) -> Result<u64, TensorError> {
        self.check_datatype(&["INT32"])?;
        self.check_shape(&[samples as i64])?;
        out.push(0);
        match &self.elements {
            Elements::Raw(bytes) => self.add_ends(self.raw(bytes, samples)?.map(i32::from_le_bytes), out),
            Elements::Typed(contents) => {
                let field = TypedField { name: "int_contents", elements: contents.int_contents.len() };
                self.check_typed(contents, field, samples)?;
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
    pub(super) fn values(&self, count: usize, out: &mut RawValues) -> Result<(), TensorError> {
        if self.datatype == "BYTES" { self.strings(count, out) } else { self.ids(count, out) }
    }

    fn ids(&self, count: usize, out: &mut RawValues) -> Result<(), TensorError> {
        let ids = no_ids(out);
        match &self.elements {
            Elements::Raw(bytes) => ids.extend(self.raw(bytes, count)?.map(u64::from_le_bytes)),
            Elements::Typed(contents) => {
                let field = TypedField { name: "int64_contents", elements: contents.int64_contents.len() };
                self.check_typed(contents, field, count)?;
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
                let field = TypedField { name: "bytes_contents", elements: contents.bytes_contents.len() };
                self.check_typed(contents, field, count)?;
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
