use proptest::prelude::*;
use prost::Message;
use prost::bytes::Bytes;

use super::*;
use crate::server::ctr::{PredictHead, PredictMessage};
use crate::server::meter::tests::predict_request;
use crate::server::received::Receive;

/// A column as generated code has it.
fn read(message: &[u8]) -> proto::FeatureColumn {
    let mut column = Column::default();
    let name = column.read(message).unwrap().to_owned();
    let Column { lengths, ids, text, ends } = column;
    let begins = std::iter::once(0).chain(ends.iter().copied());
    let string = |(begin, end): (u32, &u32)| Bytes::copy_from_slice(&text[begin as usize..*end as usize]);
    proto::FeatureColumn { name, lengths, ids, strings: begins.zip(&ends).map(string).collect() }
}

/// Checks that the columns of a message are those that generated code has read.
fn check_columns(message: &[u8], dense: &[f32], features: &[proto::FeatureColumn]) {
    let (mut read_dense, mut columns) = (Vec::new(), Vec::new());
    for field in fields(message).map(Result::unwrap) {
        match field.number {
            DENSE => field.floats(&mut read_dense).unwrap(),
            FEATURES => columns.push(read(field.bytes().unwrap())),
            _ => {}
        }
    }
    let bits = |numbers: &[f32]| numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&read_dense), bits(dense));
    assert_eq!(columns, features);
}

/// Checks that a message is read as generated code reads it, if that reads it.
pub(crate) fn check_same(message: &[u8]) {
    let bytes = || Bytes::copy_from_slice(message);
    if let Ok(generated) = proto::PredictRequest::decode(message) {
        // Without `..`, so that a new field of the message must be one of the head.
        let proto::PredictRequest {
            model,
            version,
            samples,
            dense,
            features,
            timeout_ms,
            priority,
            logits,
            label,
            request_id,
            dense_order,
        } = generated;
        let received = PredictMessage::receive(bytes()).unwrap();
        let head = PredictHead {
            model,
            version,
            samples,
            timeout_ms,
            priority,
            logits,
            label,
            request_id,
            dense_order,
        };
        assert_eq!(received.head, head);
        check_columns(&received.message, &dense, &features);
    }
    if let Ok(generated) = proto::LearnRequest::decode(message) {
        let proto::LearnRequest { model, samples, dense, features, labels, dense_order } = generated;
        let received = LearnMessage::receive(bytes()).unwrap();
        // NaN is not equal to itself.
        let head = LearnHead { model, samples, labels, dense_order };
        assert_eq!(received.head.encode_to_vec(), head.encode_to_vec());
        check_columns(&received.message, &dense, &features);
    }
}

proptest! {
    #[test]
    fn a_request_is_read_as_generated_code_reads_it(request in predict_request()) {
        check_same(&request.encode_to_vec());
    }

    #[test]
    fn a_damaged_request_is_read_as_generated_code_reads_it_or_refused(
        request in predict_request(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        check_same(&damaged(request.encode_to_vec(), damage));
    }
}

/// Replaces some bytes.
pub(crate) fn damaged(mut message: Vec<u8>, damage: Vec<(prop::sample::Index, u8)>) -> Vec<u8> {
    for (at, byte) in damage {
        let at = at.index(message.len());
        message[at] = byte;
    }
    message
}

/// Writes a field of some bytes.
pub(crate) fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat()
}

#[test]
fn forms_that_writers_rarely_use_are_read() {
    // A name after the values and twice, numbers packed and alone, an unknown field, a length of 33 bits.
    let column = [
        vec![3 << 3, 7, 3 << 3, 0x81, 0x01],
        field(3, &[1, 2, 0x80, 0x01]),
        field(2, &[0x85, 0x80, 0x80, 0x80, 0x10]),
        field(4, b""),
        field(9, b"later"),
        field(1, b"first"),
        field(1, b"user"),
    ]
    .concat();
    let float = |value: f32| [&[4 << 3 | 5][..], &value.to_le_bytes()].concat();
    let message =
        [float(1.5), field(5, &column), field(4, &(-2.0_f32).to_le_bytes()), float(0.5), field(5, &[])];
    check_same(&message.concat());
    let column = read(&column);
    assert_eq!(
        (&column.name[..], &column.ids[..], &column.lengths[..]),
        ("user", &[7, 129, 1, 2, 128][..], &[5][..])
    );
    assert_eq!(column.strings, [Bytes::new()]);
}

#[test]
fn malformed_columns_are_refused_by_their_place() {
    let inputs = Inputs::new(crate::fake::Fake::new().schema.clone(), 9);
    let good = field(5, &[field(1, b"user"), field(3, &[1])].concat());
    for (bad, expected) in [
        (
            field(5, &[1 << 3 | 2, 9, b'x']),
            "features[1]: malformed: a field ends after the message that it is in",
        ),
        (field(5, &field(1, &[0xFF])), "features[1]: malformed: a text is not UTF-8"),
        (field(5, &[1 << 3, 1]), "features[1]: malformed: field 1 has another type"),
        (field(5, &[3 << 3 | 5, 1, 0, 0, 0]), "features[1]: malformed: field 3 has another type"),
        (
            field(5, &field(2, &[0x80])),
            "features[1]: malformed: failed to decode Protobuf message: invalid varint",
        ),
        (vec![5 << 3, 1], "message: malformed: field 5 has another type"),
        (field(4, &[1, 2, 3]), "message: malformed: a field ends after the message that it is in"),
        (vec![4 << 3, 1], "message: malformed: field 4 has another type"),
    ] {
        let request = PredictMessage {
            head: PredictHead { samples: 1, ..Default::default() },
            message: [good.clone(), bad].concat().into(),
        };
        let error = inputs.encode(&request, &mut Batch::default()).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}
