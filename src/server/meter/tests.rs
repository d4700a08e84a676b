use proptest::prelude::*;
use prost::Message;

use super::super::proto::PredictRequest;
use super::*;
use crate::config::message_bytes;

const MAX_BYTES: usize = 1 << 20;

fn framed(message: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0];
    bytes.extend((message.len() as u32).to_be_bytes());
    bytes.extend(message);
    bytes
}

/// The cost of a body that arrives in pieces.
fn cost(body: &[u8], piece: usize) -> Result<usize, Fault> {
    let mut meter = Meter::new(MAX_BYTES);
    let costs = body.chunks(piece).map(|piece| meter.feed(piece));
    costs.sum()
}

/// The memory of a decoded message, by the capacities of its vectors.
fn held(message: &PredictRequest) -> usize {
    let columns = message.features.iter().map(|column| {
        column.name.capacity()
            + 4 * column.lengths.capacity()
            + 8 * column.ids.capacity()
            + size_of::<Bytes>() * column.strings.capacity()
    });
    message.model.capacity()
        + 4 * message.dense.capacity()
        + size_of::<FeatureColumn>() * message.features.capacity()
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

proptest! {
    #[test]
    fn the_cost_covers_the_decoded_message_however_it_is_cut(
        model in ".{0,9}",
        dense in prop::collection::vec(any::<f32>(), 0..30),
        features in prop::collection::vec(column(), 0..12),
        piece in 1..50usize,
    ) {
        let message = PredictRequest { model, version: 1 << 40, samples: 3, dense, features };
        let wire = framed(&message.encode_to_vec());
        let whole = cost(&wire, wire.len()).unwrap();
        prop_assert_eq!(cost(&wire, piece), Ok(whole));
        let decoded = PredictRequest::decode(&wire[5..]).unwrap();
        // The first entry of an empty vector allocates room for four.
        prop_assert!(whole + 16 >= held(&decoded) + wire.len() - 5, "{} for {}", whole, held(&decoded));
    }

    #[test]
    fn everything_that_is_decoded_was_charged(message in prop::collection::vec(any::<u8>(), 0..60)) {
        if let Ok(decoded) = PredictRequest::decode(&message[..]) {
            let groups = Fault::Malformed("a group, which the protocol does not use");
            match cost(&framed(&message), 7) {
                Ok(cost) => prop_assert!(cost >= size_of::<FeatureColumn>() * decoded.features.len()),
                Err(fault) => prop_assert_eq!(fault, groups),
            }
        }
    }
}

#[test]
fn tiny_entries_cost_their_decoded_size() {
    let columns = framed(&[0x2a, 0].repeat(MAX_FEATURES));
    assert!(cost(&columns, 1000).unwrap() >= MAX_FEATURES * size_of::<FeatureColumn>());
    let more = framed(&[0x2a, 0].repeat(MAX_FEATURES + 1));
    assert_eq!(cost(&more, 1000), Err(Fault::TooManyColumns));
    let mut strings = vec![0x2a, 0xd0, 0x0f];
    strings.extend([0x22, 0].repeat(1000));
    assert!(cost(&framed(&strings), 9).unwrap() >= 1000 * 2 * size_of::<Bytes>());
    let mut ids = vec![0x2a, 0xeb, 0x07, 0x1a, 0xe8, 0x07];
    ids.extend([1; 1000]);
    assert!(cost(&framed(&ids), 9).unwrap() >= 1000 * 2 * 8);
}

#[test]
fn a_second_message_is_charged_and_one_too_long_is_left_to_the_decoder() {
    let one = framed(&[0x10, 1]);
    assert_eq!(cost(&one.repeat(3), 4), Ok(3 * one.len()));
    let long = [vec![0, 0xff, 0, 0, 0], vec![0xff; 40]].concat();
    assert_eq!(cost(&long, 4), Ok(long.len()));
}

#[test]
fn the_largest_message_costs_at_most_what_the_configuration_assumes() {
    for size in [1 << 10, 64 << 10, MAX_BYTES] {
        let most = message_bytes(size as u64) as usize + 5;
        // Columns without content, and columns of the smallest entries of each field.
        let mut bodies = vec![[0x2a, 0].repeat(MAX_FEATURES.min(size / 2))];
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
        for body in bodies {
            let cost = cost(&framed(&body), 9999).unwrap();
            assert!(body.len() <= size && cost <= most, "{cost} of {most} for {} bytes", body.len());
        }
    }
}
