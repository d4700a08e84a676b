//! Requests whose large fields stay bytes of the received message.
//!
//! Generated code allocates the name and the values of each feature. For one sample of 26 features this takes
//! longer than the model. So a [`Received`] request keeps its message, of which only the small fields are
//! decoded, and the conversion reads the others in place ([`fields`]).

use std::marker::PhantomData;
use std::str::Utf8Error;

use prost::bytes::{Buf, Bytes};
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use prost::{DecodeError, Message};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstEncoder;

/// A request. `H`, its head, has the decoded fields.
#[derive(Debug)]
pub(crate) struct Received<H> {
    pub head: H,
    /// All fields.
    pub message: Bytes,
}

/// What the server makes of the bytes of a message.
pub(crate) trait Receive: Sized + Send + 'static {
    /// # Errors
    /// When the bytes are not such a message.
    fn receive(message: Bytes) -> Result<Self, DecodeError>;
}

impl<M: Message + Default + 'static> Receive for M {
    fn receive(message: Bytes) -> Result<Self, DecodeError> {
        M::decode(message)
    }
}

impl<H: Message + Default + 'static> Receive for Received<H> {
    fn receive(message: Bytes) -> Result<Self, DecodeError> {
        Ok(Self { head: H::decode(&message[..])?, message })
    }
}

/// As tonic's codec of the same name, for requests that are [`Received`] or decoded.
pub(crate) struct ProstCodec<Response, Request>(PhantomData<(Response, Request)>);

impl<Response, Request> Default for ProstCodec<Response, Request> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<Response: Message + 'static, Request: Receive> Codec for ProstCodec<Response, Request> {
    type Encode = Response;
    type Decode = Request;
    type Encoder = ProstEncoder<Response>;
    type Decoder = Receiver<Request>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        Receiver(PhantomData)
    }
}

/// Decodes the messages of a call.
pub(crate) struct Receiver<Request>(PhantomData<Request>);

impl<Request: Receive> Decoder for Receiver<Request> {
    type Item = Request;
    type Error = Status;

    fn decode(&mut self, message: &mut DecodeBuf<'_>) -> Result<Option<Request>, Status> {
        let message = message.copy_to_bytes(message.remaining());
        // gRPC's code for a message that is not valid.
        Request::receive(message).map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

/// Why the bytes of a field are not what its message has there.
#[derive(Debug, PartialEq, thiserror::Error)]
pub(crate) enum Malformed {
    #[error(transparent)]
    Wire(#[from] DecodeError),
    #[error("field {number} has another type")]
    Type { number: u32 },
    #[error("a field ends after the message that it is in")]
    Truncated,
    #[error("a text is not UTF-8")]
    Text(#[from] Utf8Error),
}

/// A field of a message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Field<'m> {
    pub number: u32,
    pub value: Value<'m>,
}

/// The encoded value of a field.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value<'m> {
    Varint(u64),
    Fixed32([u8; 4]),
    /// A text, a message, packed numbers.
    Bytes(&'m [u8]),
    /// A number of 8 bytes, or a group.
    Other,
}

/// The fields of a message in their order.
pub(crate) fn fields(message: &[u8]) -> impl Iterator<Item = Result<Field<'_>, Malformed>> {
    let mut rest = message;
    std::iter::from_fn(move || {
        let field = (!rest.is_empty()).then(|| field(&mut rest))?;
        if field.is_err() {
            rest = &[];
        }
        Some(field)
    })
}

/// Takes the first field.
fn field<'m>(rest: &mut &'m [u8]) -> Result<Field<'m>, Malformed> {
    let (number, wire_type) = decode_key(rest)?;
    let value = match wire_type {
        WireType::Varint => Value::Varint(decode_varint(rest)?),
        WireType::LengthDelimited => {
            let length = usize::try_from(decode_varint(rest)?).map_err(|_| Malformed::Truncated)?;
            Value::Bytes(rest.split_off(..length).ok_or(Malformed::Truncated)?)
        }
        WireType::ThirtyTwoBit => {
            let (value, after) = rest.split_first_chunk().ok_or(Malformed::Truncated)?;
            *rest = after;
            Value::Fixed32(*value)
        }
        WireType::SixtyFourBit | WireType::StartGroup | WireType::EndGroup => {
            skip_field(wire_type, number, rest, DecodeContext::default())?;
            Value::Other
        }
    };
    Ok(Field { number, value })
}

impl<'m> Field<'m> {
    /// A text, a message, or packed numbers.
    ///
    /// # Errors
    /// [`Malformed::Type`], as of all others.
    pub(crate) fn bytes(self) -> Result<&'m [u8], Malformed> {
        match self.value {
            Value::Bytes(bytes) => Ok(bytes),
            _ => Err(Malformed::Type { number: self.number }),
        }
    }

    pub(crate) fn text(self) -> Result<&'m str, Malformed> {
        Ok(std::str::from_utf8(self.bytes()?)?)
    }

    /// Calls `each` with the numbers of a repeated field, packed or alone.
    pub(crate) fn varints(self, mut each: impl FnMut(u64)) -> Result<(), Malformed> {
        match self.value {
            Value::Varint(number) => each(number),
            Value::Bytes(mut packed) => {
                while !packed.is_empty() {
                    each(decode_varint(&mut packed)?);
                }
            }
            Value::Fixed32(_) | Value::Other => return Err(Malformed::Type { number: self.number }),
        }
        Ok(())
    }

    /// Adds the numbers of a repeated field, packed or alone.
    pub(crate) fn floats(self, out: &mut Vec<f32>) -> Result<(), Malformed> {
        match self.value {
            Value::Fixed32(number) => out.push(f32::from_le_bytes(number)),
            Value::Bytes(packed) => {
                let (numbers, rest) = packed.as_chunks();
                if !rest.is_empty() {
                    return Err(Malformed::Truncated);
                }
                out.extend(numbers.iter().map(|number| f32::from_le_bytes(*number)));
            }
            Value::Varint(_) | Value::Other => return Err(Malformed::Type { number: self.number }),
        }
        Ok(())
    }
}
