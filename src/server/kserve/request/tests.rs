use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::server::convert::tests::{damaged, field};
use crate::server::inference::ModelInferRequest;
use crate::server::inference::model_infer_request::InferInputTensor;
use crate::server::meter::KSERVE;
use crate::server::meter::tests::{infer_request, is_refused};
use crate::server::received::Receive;

/// What a message is written as. Unlike messages, bytes with NaN are equal.
fn written(message: Option<&impl Message>) -> Option<Vec<u8>> {
    message.map(Message::encode_to_vec)
}

fn parameters(of: &HashMap<String, InferParameter>) -> BTreeMap<&str, Vec<u8>> {
    of.iter().map(|(name, value)| (&name[..], value.encode_to_vec())).collect()
}

/// Whether both forms of a tensor say the same.
fn is_same(read: &InputTensor<'_>, generated: &InferInputTensor) -> bool {
    read.name == generated.name
        && read.datatype == generated.datatype
        && read.shape[..] == generated.shape[..]
        && read.shared_memory == generated.parameters.contains_key("shared_memory_region")
        && written(read.contents.as_deref()) == written(generated.contents.as_ref())
}

/// The parameters of an `InferInputTensor`. Generated code takes an entry of a map for a message also if its
/// key says that it is none, and then reads other fields after it; it is stricter with bytes.
#[derive(Clone, PartialEq, Message)]
struct Entries {
    #[prost(bytes = "vec", repeated, tag = "4")]
    parameters: Vec<Vec<u8>>,
}

/// Checks that a message is read as generated code reads it, if that reads it and the meter lets it through.
pub(crate) fn check_same(message: &[u8]) {
    if is_refused(&KSERVE, message) {
        return;
    }
    let Ok(generated) = ModelInferRequest::decode(message) else { return };
    let InferRequest { head, message } = InferRequest::receive(Bytes::copy_from_slice(message)).unwrap();
    let bytes_of = |number| {
        let fields = fields(&message).map(Result::unwrap).filter(move |field| field.number == number);
        fields.map(|field| field.bytes().unwrap()).collect::<Vec<_>>()
    };
    // Without `..`, so that a new field of the message must be one of the head.
    let ModelInferRequest {
        model_name,
        model_version,
        id,
        parameters: generated_parameters,
        inputs: generated_inputs,
        outputs,
        raw_input_contents,
    } = generated;
    let inputs = bytes_of(5);
    assert_eq!(inputs.len(), generated_inputs.len());
    for (input, generated) in inputs.iter().zip(&generated_inputs) {
        let read = InputTensor::read(input, &message);
        if Entries::decode(*input).is_err() {
            assert!(read.is_err());
            continue;
        }
        let read = read.unwrap();
        assert!(is_same(&read, generated), "{read:?} is not {generated:?}");
    }
    assert_eq!((head.model_name, head.model_version, head.id), (model_name, model_version, id));
    assert_eq!(parameters(&head.parameters), parameters(&generated_parameters));
    assert_eq!(head.outputs.len(), outputs.len());
    for (read, generated) in head.outputs.iter().zip(&outputs) {
        assert_eq!(read.name, generated.name);
        assert_eq!(parameters(&read.parameters), parameters(&generated.parameters));
    }
    assert_eq!(bytes_of(7), raw_input_contents);
}

proptest! {
    #[test]
    fn a_request_is_read_as_generated_code_reads_it(request in infer_request()) {
        check_same(&request.encode_to_vec());
    }

    #[test]
    fn a_damaged_request_is_read_as_generated_code_reads_it_or_refused(
        request in infer_request(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        check_same(&damaged(request.encode_to_vec(), damage));
    }
}

#[test]
fn forms_that_writers_rarely_use_are_read() {
    // A name twice, a shape in numbers of their own, contents in two parts, and a field of another time.
    let fp32 = |value: f32| field(5, &field(6, &value.to_le_bytes()));
    let tensor = [
        field(1, b"first"),
        field(1, b"dense"),
        vec![3 << 3, 2, 3 << 3, 0x81, 0x01],
        fp32(1.5),
        fp32(-2.0),
        field(9, b"later"),
        vec![10 << 3, 7],
        field(4, &[field(1, b"shared_memory_region"), field(2, &[])].concat()),
    ]
    .concat();
    check_same(&field(5, &tensor));
    let tensor = Bytes::from(tensor);
    let read = InputTensor::read(&tensor, &tensor).unwrap();
    assert_eq!((read.name, &read.shape[..], read.shared_memory), ("dense", &[2, 129][..], true));
    assert_eq!(read.contents.unwrap().fp32_contents, [1.5, -2.0]);
}

#[test]
fn bytes_that_are_no_tensor_are_refused() {
    for (bytes, expected) in [
        (vec![1 << 3 | 2, 9, b'x'], "a field ends after the message that it is in"),
        (field(1, &[0xFF]), "a text is not UTF-8"),
        (vec![3 << 3 | 2, 1, 0x80], "failed to decode Protobuf message: invalid varint"),
        (vec![4 << 3 | 2, 2, 10, 5], "a field ends after the message that it is in"),
    ] {
        let bytes = Bytes::from(bytes);
        let error = InputTensor::read(&bytes, &bytes).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}
