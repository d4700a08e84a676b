//! A request as the server reads it: a `ModelInferRequest` whose tensors stay bytes of its message.

use std::collections::HashMap;

use prost::Message;
use prost::bytes::Bytes;
use smallvec::SmallVec;

use crate::server::inference::model_infer_request::InferRequestedOutputTensor;
use crate::server::inference::{InferParameter, InferTensorContents};
use crate::server::received::{Malformed, Received, fields};

/// As `ModelInferRequest` in `proto/inference/kserve.proto`.
pub(crate) type InferRequest = Received<InferHead>;

/// All but `inputs` and `raw_input_contents`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct InferHead {
    #[prost(string, tag = "1")]
    pub model_name: String,
    #[prost(string, tag = "2")]
    pub model_version: String,
    #[prost(string, tag = "3")]
    pub id: String,
    #[prost(map = "string, message", tag = "4")]
    pub parameters: HashMap<String, InferParameter>,
    #[prost(message, repeated, tag = "6")]
    pub outputs: Vec<InferRequestedOutputTensor>,
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

impl<'m> InputTensor<'m> {
    /// Reads the tensor at `bytes` of a message.
    ///
    /// # Errors
    /// When the bytes are not an `InferInputTensor`.
    pub(crate) fn read(bytes: &'m [u8], message: &'m Bytes) -> Result<Self, Malformed> {
        let mut tensor = Self::default();
        for field in fields(bytes) {
            let field = field?;
            match field.number {
                1 => tensor.name = field.text()?,
                2 => tensor.datatype = field.text()?,
                3 => field.varints(|size| tensor.shape.push(size.cast_signed()))?,
                4 => tensor.shared_memory |= key(field.bytes()?)? == b"shared_memory_region",
                5 => {
                    let contents = message.slice_ref(field.bytes()?);
                    tensor.contents.get_or_insert_default().merge(contents)?;
                }
                _ => {}
            }
        }
        Ok(tensor)
    }
}

/// The key of an entry of a map.
fn key(entry: &[u8]) -> Result<&[u8], Malformed> {
    let mut key = &[][..];
    for field in fields(entry) {
        let field = field?;
        if field.number == 1 {
            key = field.bytes()?;
        }
    }
    Ok(key)
}

#[cfg(test)]
pub(crate) mod tests;
