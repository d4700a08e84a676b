pub(crate) mod fuzz;

use std::collections::HashMap;
use std::mem::size_of;

use proptest::prelude::*;
use prost::Message;
use prost::bytes::Bytes;

use super::super::inference::infer_parameter::ParameterChoice;
use super::super::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use super::super::inference::{InferParameter, InferTensorContents, ModelInferRequest};
use super::super::proto::{FeatureColumn, PredictRequest};
use super::*;
use crate::batcher::Priority;
use crate::config::message_bytes;
use crate::schema::MAX_FEATURES;

const MAX_BYTES: usize = 1 << 20;

fn framed(message: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0];
    bytes.extend((message.len() as u32).to_be_bytes());
    bytes.extend(message);
    bytes
}

/// The cost of a body that arrives in pieces.
fn cost(body: &[u8], piece: usize) -> Result<usize, Fault> {
    cost_by(&CTR, body, piece)
}

fn cost_by(layout: &'static Layout, body: &[u8], piece: usize) -> Result<usize, Fault> {
    let mut meter = Meter::new(layout, MAX_BYTES);
    let costs = body.chunks(piece).map(|piece| meter.feed(piece, |_| ()));
    costs.sum()
}

/// Whether the decoder does not get a message.
pub(crate) fn is_refused(layout: &'static Layout, message: &[u8]) -> bool {
    cost_by(layout, &framed(message), usize::MAX).is_err()
}

/// The memory of a received message and of its conversion, at least.
fn held(message: &PredictRequest) -> usize {
    let columns = message.features.iter().map(|column| {
        let text: usize = column.strings.iter().map(Bytes::len).sum();
        4 * column.lengths.len() + 8 * column.ids.len() + text + 4 * column.strings.len()
    });
    message.model.len()
        + message.label.len()
        + message.request_id.len()
        + 4 * message.dense.len()
        + columns.sum::<usize>()
}

fn column() -> impl Strategy<Value = FeatureColumn> {
    let strings = prop::collection::vec(prop::collection::vec(any::<u8>(), 0..5), 0..20);
    let numbers = prop::collection::vec(any::<u32>(), 0..9);
    (".{0,9}", numbers, prop::collection::vec(0..1000u64, 0..40), strings).prop_map(
        |(name, lengths, ids, strings)| {
            let strings = strings.into_iter().map(Bytes::from).collect();
            FeatureColumn { name, lengths, ids, strings }
        },
    )
}

pub(crate) fn predict_request() -> impl Strategy<Value = PredictRequest> {
    let dense = prop::collection::vec(any::<f32>(), 0..30);
    let features = prop::collection::vec(column(), 0..12);
    (".{0,9}", dense, features, (".{0,9}", ".{0,40}")).prop_map(
        |(model, dense, features, (label, request_id))| PredictRequest {
            model,
            version: 1 << 40,
            samples: 3,
            dense,
            features,
            timeout_ms: 1 << 31,
            priority: 1,
            logits: true,
            label,
            request_id,
            dense_order: 1 << 60,
        },
    )
}

proptest! {
    #[test]
    fn the_cost_covers_the_decoded_message_however_it_is_cut(
        message in predict_request(),
        piece in 1..50usize,
    ) {
        let wire = framed(&message.encode_to_vec());
        let whole = cost(&wire, wire.len()).unwrap();
        prop_assert_eq!(cost(&wire, piece), Ok(whole));
        prop_assert!(whole >= held(&message) + wire.len() - 5, "{} for {}", whole, held(&message));
    }

    #[test]
    fn everything_that_is_decoded_was_charged(message in prop::collection::vec(any::<u8>(), 0..60)) {
        if let Ok(decoded) = PredictRequest::decode(&message[..]) {
            let groups = Fault::Malformed("a group, which the protocol does not use");
            match cost(&framed(&message), 7) {
                Ok(cost) => prop_assert!(cost >= held(&decoded)),
                Err(fault) => prop_assert_eq!(fault, groups),
            }
        }
    }
}

#[test]
fn tiny_entries_cost_what_their_conversion_takes() {
    // In a column that is not short, and in short ones.
    let mut strings = vec![0x2a, 0xd0, 0x0f];
    strings.extend([0x22, 0].repeat(1000));
    assert!(cost(&framed(&strings), 9).unwrap() >= 1000 * 2 * 4);
    let mut ids = vec![0x2a, 0xeb, 0x07, 0x1a, 0xe8, 0x07];
    ids.extend([1; 1000]);
    assert!(cost(&framed(&ids), 9).unwrap() >= 1000 * 2 * 8);
    let short = [0x2a, 52, 0x1a, 50].into_iter().chain([1; 50]).collect::<Vec<_>>();
    assert!(cost(&framed(&short.repeat(20)), 9).unwrap() >= 1000 * 2 * 8);
}

#[test]
fn a_second_message_is_charged_and_one_too_long_is_left_to_the_decoder() {
    let one = framed(&[0x10, 1]);
    assert_eq!(cost(&one.repeat(3), 4), Ok(3 * (one.len() + CTR.spare)));
    let long = [vec![0, 0xff, 0, 0, 0], vec![0xff; 40]].concat();
    assert_eq!(cost(&long, 4), Ok(long.len()));
}

/// The memory of a decoded map. A table of a hash map is at least 7/16 full.
fn parameters_held(parameters: &HashMap<String, InferParameter>) -> usize {
    let strings = parameters.iter().map(|(key, value)| {
        let value = match &value.parameter_choice {
            Some(ParameterChoice::StringParam(value)) => value.capacity(),
            _ => 0,
        };
        key.capacity() + value
    });
    parameters.capacity() * (size_of::<(String, InferParameter)>() + 1) + strings.sum::<usize>()
}

/// The memory of a received KServe request, and of its tensors while they are converted, at least.
fn infer_held(message: &ModelInferRequest) -> usize {
    let inputs = message.inputs.iter().map(|input| {
        let contents = input.contents.as_ref().map_or(0, |contents| {
            size_of::<InferTensorContents>()
                + contents.bool_contents.capacity()
                + 4 * contents.int_contents.capacity()
                + 8 * contents.int64_contents.capacity()
                + 4 * contents.uint_contents.capacity()
                + 8 * contents.uint64_contents.capacity()
                + 4 * contents.fp32_contents.capacity()
                + 8 * contents.fp64_contents.capacity()
                + size_of::<Bytes>() * contents.bytes_contents.capacity()
        });
        8 * input.shape.capacity() + contents
    });
    let outputs =
        message.outputs.iter().map(|output| output.name.capacity() + parameters_held(&output.parameters));
    message.model_name.capacity()
        + message.id.capacity()
        + parameters_held(&message.parameters)
        + size_of::<InferRequestedOutputTensor>() * message.outputs.capacity()
        + size_of::<&[u8]>() * (message.inputs.len() + message.raw_input_contents.len())
        + inputs.sum::<usize>()
        + outputs.sum::<usize>()
}

fn parameters() -> impl Strategy<Value = HashMap<String, InferParameter>> {
    let choice = prop_oneof![
        ".{0,20}".prop_map(ParameterChoice::StringParam),
        any::<i64>().prop_map(ParameterChoice::Int64Param),
    ];
    let parameter = choice.prop_map(|choice| InferParameter { parameter_choice: Some(choice) });
    prop::collection::hash_map(".{0,5}", parameter, 0..9)
}

fn strings(most: usize) -> impl Strategy<Value = Vec<Bytes>> {
    let bytes = prop::collection::vec(any::<u8>(), 0..9).prop_map(Bytes::from);
    prop::collection::vec(bytes, 0..most)
}

fn contents() -> impl Strategy<Value = InferTensorContents> {
    let bools = prop::collection::vec(any::<bool>(), 0..9);
    let ints = prop::collection::vec(any::<i32>(), 0..9);
    let longs = prop::collection::vec(0..1000_i64, 0..40);
    let floats = prop::collection::vec(any::<f32>(), 0..9);
    (bools, ints, longs, floats, strings(20)).prop_map(|(bools, ints, longs, floats, strings)| {
        InferTensorContents {
            bool_contents: bools,
            uint_contents: ints.iter().map(|int| int.unsigned_abs()).collect(),
            uint64_contents: longs.iter().map(|long| long.unsigned_abs()).collect(),
            fp64_contents: floats.iter().map(|float| f64::from(*float)).collect(),
            int_contents: ints,
            int64_contents: longs,
            fp32_contents: floats,
            bytes_contents: strings,
        }
    })
}

fn tensor() -> impl Strategy<Value = InferInputTensor> {
    let shape = prop::collection::vec(any::<i64>(), 0..5);
    (".{0,9}", ".{0,9}", shape, parameters(), prop::option::of(contents())).prop_map(
        |(name, datatype, shape, parameters, contents)| InferInputTensor {
            name,
            datatype,
            shape,
            parameters,
            contents,
        },
    )
}

pub(crate) fn infer_request() -> impl Strategy<Value = ModelInferRequest> {
    let inputs = prop::collection::vec(tensor(), 0..9);
    let outputs = prop::collection::vec((".{0,9}", parameters()), 0..5);
    (".{0,9}", ".{0,9}", parameters(), inputs, outputs, strings(9)).prop_map(
        |(model_name, id, parameters, inputs, outputs, raw_input_contents)| ModelInferRequest {
            model_name,
            model_version: "7".to_owned(),
            id,
            parameters,
            inputs,
            outputs: outputs
                .into_iter()
                .map(|(name, parameters)| InferRequestedOutputTensor { name, parameters })
                .collect(),
            raw_input_contents,
        },
    )
}

proptest! {
    #[test]
    fn the_cost_covers_a_decoded_kserve_request_however_it_is_cut(
        message in infer_request(),
        piece in 1..50usize,
    ) {
        let wire = framed(&message.encode_to_vec());
        let whole = cost_by(&KSERVE, &wire, wire.len()).unwrap();
        prop_assert_eq!(cost_by(&KSERVE, &wire, piece), Ok(whole));
        let decoded = ModelInferRequest::decode(&wire[5..]).unwrap();
        let held = infer_held(&decoded) + wire.len() - 5;
        prop_assert!(whole >= held, "{} for {}", whole, held);
    }

    #[test]
    fn everything_in_a_kserve_request_that_is_decoded_was_charged(
        message in prop::collection::vec(any::<u8>(), 0..60),
    ) {
        if let Ok(decoded) = ModelInferRequest::decode(&message[..]) {
            let refused = [
                Fault::Malformed("a group, which the protocol does not use"),
                Fault::Malformed("an entry of a map that is not a message"),
            ];
            match cost_by(&KSERVE, &framed(&message), 7) {
                Ok(cost) => prop_assert!(cost >= infer_held(&decoded)),
                Err(fault) => prop_assert!(refused.contains(&fault)),
            }
        }
    }

    #[test]
    fn the_messages_of_a_stream_cost_as_much_as_each_of_them_alone(
        messages in prop::collection::vec(infer_request(), 0..5),
        piece in 1..300usize,
    ) {
        let framed: Vec<Vec<u8>> = messages.iter().map(|message| framed(&message.encode_to_vec())).collect();
        let (mut meter, mut ended) = (Meter::new(&KSERVE, MAX_BYTES), Vec::new());
        let mut feed = |piece: &[u8]| meter.feed(piece, |message| ended.push(message)).unwrap();
        let all: usize = framed.concat().chunks(piece).map(&mut feed).sum();
        let alone: Vec<MessageSize> = framed
            .iter()
            .map(|message| MessageSize {
                bytes: message.len() - 5,
                cost: cost_by(&KSERVE, message, message.len()).unwrap(),
            })
            .collect();
        prop_assert_eq!(all, ended.iter().map(|message| message.cost).sum::<usize>());
        prop_assert_eq!(ended, alone);
    }
}

#[test]
fn tiny_entries_of_a_kserve_request_cost_their_decoded_size() {
    let most = 2 * MAX_FEATURES + 1;
    let tensors = framed(&[0x2a, 0].repeat(most));
    assert!(cost_by(&KSERVE, &tensors, 1000).unwrap() >= most * size_of::<InferTensorContents>());
    let fault = cost_by(&KSERVE, &framed(&[0x2a, 0].repeat(most + 1)), 1000).unwrap_err();
    assert_eq!(fault.to_string(), "inputs: limit 20001 tensors, got more");
    // 1000 numbers of one byte, in `int64_contents` of one tensor.
    let mut numbers = vec![0x2a, 0xee, 0x07, 0x2a, 0xeb, 0x07, 0x1a, 0xe8, 0x07];
    numbers.extend([1; 1000]);
    assert!(cost_by(&KSERVE, &framed(&numbers), 9).unwrap() >= 1000 * 2 * 8);
    for (key, text) in
        [(0x22, "parameters: limit 20001 entries, got more"), (0x32, "outputs: limit 100 tensors, got more")]
    {
        let fault = cost_by(&KSERVE, &framed(&[key, 0].repeat(most + 1)), 1000).unwrap_err();
        assert_eq!(fault.to_string(), text);
    }
    // Parameters of a repository request.
    let entries = framed(&[0x1a, 0].repeat(1000));
    let entry = size_of::<(String, InferParameter)>();
    assert!(cost_by(&KSERVE, &entries, 1000).unwrap() >= 1000 * entry);
}

#[test]
fn an_entry_of_a_map_that_says_it_is_a_number_is_refused() {
    // The key of the field 4 as a number, and an entry with the name "a". The decoder accepts it.
    let entry = |kind: u8| [&[4 << 3 | kind, 3][..], b"\x0a\x01a"].concat();
    for kind in [0, 1, 5] {
        let message = entry(kind).repeat(1000);
        assert_eq!(ModelInferRequest::decode(message.as_slice()).unwrap().parameters.len(), 1);
        let fault = cost_by(&KSERVE, &framed(&message), 9).unwrap_err();
        assert_eq!(fault, Fault::Malformed("an entry of a map that is not a message"));
    }
    assert!(cost_by(&KSERVE, &framed(&entry(2).repeat(1000)), 9).unwrap() > 100_000);
}

/// KServe bodies of at most `size` bytes: tensors, outputs, parameters and strings without content, and one
/// body with as much of each as fits.
fn costly_kserve_bodies(size: usize) -> Vec<(&'static Layout, Vec<u8>)> {
    let entries = |key: u8, most: usize, size: usize| [key, 0].repeat(most.min(size / 2));
    let (tensors, parameters) = (entries(0x2a, 2 * MAX_FEATURES + 1, size), 2 * MAX_FEATURES + 1);
    let mut mixed = tensors.clone();
    for (key, most) in [(0x22, parameters), (0x32, 100), (0x3a, size)] {
        mixed.extend(entries(key, most, size - mixed.len()));
    }
    let bodies = [
        tensors,
        entries(0x22, parameters, size),
        entries(0x32, 100, size),
        entries(0x3a, size, size),
        mixed,
    ];
    bodies.map(|body| (&KSERVE, body)).into()
}

#[test]
fn the_largest_message_costs_at_most_what_the_configuration_assumes() {
    for size in [1 << 10, 64 << 10, MAX_BYTES] {
        let most = message_bytes(size as u64) as usize + 5;
        // Columns without content, short ones, and columns of the smallest entries of each field.
        let short = [0x2a, 64].into_iter().chain([1; 64]).collect::<Vec<u8>>();
        let mut bodies = vec![[0x2a, 0].repeat(size / 2), short.repeat(size / 66)];
        for entry in [&[0x22, 0][..], &[0x10, 1], &[0x18, 1]] {
            let mut column = vec![0x2a];
            let length = size - 5 - (size - 5) % entry.len();
            prost::encoding::encode_varint(length as u64, &mut column);
            column.extend(entry.repeat(length / entry.len()));
            bodies.push(column);
        }
        let mut packed = vec![0x1a];
        prost::encoding::encode_varint(size as u64 - 10, &mut packed);
        packed.extend(vec![1; size - 10]);
        let mut column = vec![0x2a];
        prost::encoding::encode_varint(packed.len() as u64, &mut column);
        bodies.push([column, packed].concat());
        let native = bodies.into_iter().map(|body| (&CTR, body));
        for (layout, body) in native.chain(costly_kserve_bodies(size)) {
            let cost = cost_by(layout, &framed(&body), 9999).unwrap();
            assert!(body.len() <= size && cost <= most, "{cost} of {most} for {} bytes", body.len());
        }
    }
}

/// The model and the priority that a message names, which arrives in pieces.
fn target(layout: &'static Layout, message: &[u8], piece: usize) -> (Option<String>, Priority) {
    let mut meter = Meter::new(layout, MAX_BYTES);
    for piece in framed(message).chunks(piece) {
        meter.feed(piece, |_| ()).unwrap();
    }
    (meter.target.model, meter.target.priority)
}

#[test]
fn the_model_and_the_priority_are_known_before_a_message_is_decoded() {
    use ParameterChoice::{Int64Param, StringParam, Uint64Param};
    for piece in 1..60 {
        let name = || Some("ads".to_owned());
        for (choice, priority) in [
            (Int64Param(1), Priority::High),
            (Uint64Param(1), Priority::High),
            (Int64Param(0), Priority::Normal),
            (Uint64Param(9), Priority::Low),
            (StringParam("1".to_owned()), Priority::Normal),
        ] {
            let parameter = |choice| InferParameter { parameter_choice: Some(choice) };
            let others = [("a", Int64Param(3)), ("prioritys", Int64Param(3)), ("priority", choice)];
            let parameters = others.map(|(name, choice)| (name.to_owned(), parameter(choice)));
            let mut message = ModelInferRequest { model_name: "ads".to_owned(), ..Default::default() };
            message.parameters.extend(parameters);
            message.inputs.push(InferInputTensor { name: "other".to_owned(), ..Default::default() });
            assert_eq!(target(&KSERVE, &message.encode_to_vec(), piece), (name(), priority));
        }
        for (number, priority) in [(0, Priority::Normal), (1, Priority::High), (2, Priority::Low)] {
            let column = FeatureColumn { name: "user".to_owned(), ids: vec![7], ..Default::default() };
            let mut message = PredictRequest { model: "ads".to_owned(), ..Default::default() };
            message.features.push(column);
            // The field 7.
            let bytes = [message.encode_to_vec(), vec![7 << 3, number]].concat();
            assert_eq!(target(&CTR, &bytes, piece), (name(), priority));
        }
    }
}
