//! A request as the server reads it: a `ModelInferRequest` whose tensors stay bytes of the message.
//!
//! Generated code allocates the name, the datatype and the shape of each tensor. For one sample of 26
//! features this takes longer than the model. So [`InputTensor`] reads a tensor in place, when it is
//! converted.

use std::collections::HashMap;
use std::str::Utf8Error;

use prost::bytes::Bytes;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use prost::{DecodeError, Message};
use smallvec::SmallVec;

use crate::server::inference::model_infer_request::InferRequestedOutputTensor;
use crate::server::inference::{InferParameter, InferTensorContents};

/// As `ModelInferRequest` in `proto/inference/kserve.proto`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct InferRequest {
    #[prost(string, tag = "1")]
    pub model_name: String,
    #[prost(string, tag = "2")]
    pub model_version: String,
    #[prost(string, tag = "3")]
    pub id: String,
    #[prost(map = "string, message", tag = "4")]
    pub parameters: HashMap<String, InferParameter>,
    /// Each an `InferInputTensor`.
    #[prost(bytes = "bytes", repeated, tag = "5")]
    pub inputs: Vec<Bytes>,
    #[prost(message, repeated, tag = "6")]
    pub outputs: Vec<InferRequestedOutputTensor>,
    #[prost(bytes = "bytes", repeated, tag = "7")]
    pub raw_input_contents: Vec<Bytes>,
}

/// As `InferInputTensor`, with slices of its message.
#[derive(Debug, Default)]
pub(crate) struct InputTensor<'m> {
    pub name: &'m str,
    pub datatype: &'m str,
    pub shape: Shape,
    /// Whether it has the parameter `shared_memory_region`.
    pub shared_memory: bool,
    pub contents: Option<Box<InferTensorContents>>,
}

/// The sizes of a tensor's dimensions.
pub(crate) type Shape = SmallVec<[i64; 2]>;

/// Why bytes are not an `InferInputTensor`.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Malformed {
    #[error(transparent)]
    Wire(#[from] DecodeError),
    #[error("a field ends after the tensor")]
    Truncated,
    #[error("a text is not UTF-8")]
    Text(#[from] Utf8Error),
}

impl<'m> InputTensor<'m> {
    /// # Errors
    /// When the bytes are not an `InferInputTensor`.
    pub(crate) fn read(message: &'m Bytes) -> Result<Self, Malformed> {
        let mut tensor = Self::default();
        let rest = &mut &message[..];
        while !rest.is_empty() {
            match decode_key(rest)? {
                (1, WireType::LengthDelimited) => tensor.name = text(rest)?,
                (2, WireType::LengthDelimited) => tensor.datatype = text(rest)?,
                (3, WireType::LengthDelimited) => {
                    let mut packed = delimited(rest)?;
                    while !packed.is_empty() {
                        tensor.shape.push(size(&mut packed)?);
                    }
                }
                (3, WireType::Varint) => tensor.shape.push(size(rest)?),
                (4, WireType::LengthDelimited) => {
                    tensor.shared_memory |= key(delimited(rest)?)? == b"shared_memory_region";
                }
                (5, WireType::LengthDelimited) => {
                    let contents = message.slice_ref(delimited(rest)?);
                    tensor.contents.get_or_insert_default().merge(contents)?;
                }
                (tag, wire_type) => skip_field(wire_type, tag, rest, DecodeContext::default())?,
            }
        }
        Ok(tensor)
    }
}

/// Takes the bytes of a field that says their number.
fn delimited<'m>(rest: &mut &'m [u8]) -> Result<&'m [u8], Malformed> {
    let length = usize::try_from(decode_varint(rest)?).map_err(|_| Malformed::Truncated)?;
    rest.split_off(..length).ok_or(Malformed::Truncated)
}

fn text<'m>(rest: &mut &'m [u8]) -> Result<&'m str, Malformed> {
    Ok(std::str::from_utf8(delimited(rest)?)?)
}

/// Takes the size of a dimension.
fn size(rest: &mut &[u8]) -> Result<i64, Malformed> {
    Ok(decode_varint(rest)?.cast_signed())
}

/// The key of an entry of a map.
fn key(mut entry: &[u8]) -> Result<&[u8], Malformed> {
    let mut key = &[][..];
    while !entry.is_empty() {
        match decode_key(&mut entry)? {
            (1, WireType::LengthDelimited) => key = delimited(&mut entry)?,
            (tag, wire_type) => skip_field(wire_type, tag, &mut entry, DecodeContext::default())?,
        }
    }
    Ok(key)
}

#[cfg(test)]
pub(crate) mod tests;
