//! Changes of the fields of a valid protobuf message. The lengths around a changed field are right, so the
//! change reaches the code behind the decoder.

use proptest::prelude::*;
use proptest::sample::{Index, select};
use prost::encoding::{decode_varint, encode_varint};

use super::bytes::{Change, Input, NUMBERS, changes, seldom_changes};

#[derive(Clone)]
struct Field {
    number: u64,
    value: Value,
}

#[derive(Clone)]
enum Value {
    Number(u64),
    Fixed(Vec<u8>),
    Bytes(Vec<u8>),
    Message(Vec<Field>),
}

/// A change of one field.
#[derive(Clone, Debug)]
enum Edit {
    Remove,
    /// A second copy at the end of its message.
    Repeat,
    /// Many copies.
    Many(usize),
    Renumber(u64),
    Number(u64),
    /// Changes of a value's bytes, also of a message.
    Bytes(Vec<Change>),
    /// The name of another field in place of this text.
    Text(&'static str),
}

/// One of the messages with a few fields changed, and sometimes its bytes. `nested` has the paths of the
/// fields that are messages. The words replace the texts of fields.
pub(crate) fn mutated(
    messages: Vec<Vec<u8>>,
    nested: &'static [&'static [u64]],
    words: &'static [&'static str],
) -> impl Strategy<Value = Input> {
    let edits = prop::collection::vec((any::<Index>(), edit(words)), 0..5);
    (any::<Index>(), edits, seldom_changes(words)).prop_map(move |(seed, edits, last)| {
        let mut fields = parse(&messages[seed.index(messages.len())], &[], nested).expect("a valid message");
        for (at, edit) in edits {
            let count = count(&fields);
            if count > 0 {
                apply(&mut fields, &mut at.index(count), &edit);
            }
        }
        let mut bytes = encode(&fields);
        last.iter().for_each(|change| change.apply(&mut bytes, &[]));
        Input(bytes)
    })
}

/// One edit. As in a change of bytes, everything is drawn before the kind is known.
fn edit(words: &'static [&'static str]) -> impl Strategy<Value = Edit> {
    let numbers = (0..3u32, 0..12u64, select(NUMBERS), any::<u64>());
    let number = numbers.prop_map(|(kind, small, edge, any)| match kind {
        0 => small,
        1 => edge,
        _ => any,
    });
    (0..11u32, 2..2000usize, number, changes(words), select(words)).prop_map(
        |(kind, copies, number, changes, word)| match kind {
            0 => Edit::Remove,
            1 => Edit::Repeat,
            2 => Edit::Many(copies),
            3 => Edit::Renumber(number),
            4..6 => Edit::Number(number),
            6..10 => Edit::Bytes(changes),
            _ => Edit::Text(word),
        },
    )
}

/// The fields of a message; `None` for bytes that are not a message.
fn parse(mut bytes: &[u8], path: &[u64], nested: &[&[u64]]) -> Option<Vec<Field>> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = decode_varint(&mut bytes).ok()?;
        let number = key >> 3;
        let mut take = |length: usize| {
            let (taken, rest) = bytes.split_at_checked(length)?;
            bytes = rest;
            Some(taken.to_vec())
        };
        let value = match key & 7 {
            0 => Value::Number(decode_varint(&mut bytes).ok()?),
            1 => Value::Fixed(take(8)?),
            5 => Value::Fixed(take(4)?),
            2 => {
                let length = decode_varint(&mut bytes).ok()?;
                let (value, rest) = bytes.split_at_checked(length as usize)?;
                bytes = rest;
                let path = [path, &[number]].concat();
                match nested.contains(&path.as_slice()).then(|| parse(value, &path, nested)).flatten() {
                    Some(message) => Value::Message(message),
                    None => Value::Bytes(value.to_vec()),
                }
            }
            _ => return None,
        };
        fields.push(Field { number, value });
    }
    Some(fields)
}

fn encode(fields: &[Field]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for Field { number, value } in fields {
        let kind = match value {
            Value::Number(_) => 0,
            Value::Fixed(value) if value.len() == 8 => 1,
            Value::Fixed(_) => 5,
            Value::Bytes(_) | Value::Message(_) => 2,
        };
        encode_varint(number << 3 | kind, &mut bytes);
        match value {
            Value::Number(number) => encode_varint(*number, &mut bytes),
            Value::Fixed(value) => bytes.extend(value),
            Value::Bytes(_) | Value::Message(_) => {
                let value = value_bytes(value);
                encode_varint(value.len() as u64, &mut bytes);
                bytes.extend(value);
            }
        }
    }
    bytes
}

fn value_bytes(value: &Value) -> Vec<u8> {
    match value {
        Value::Number(number) => number.to_le_bytes().to_vec(),
        Value::Fixed(value) | Value::Bytes(value) => value.clone(),
        Value::Message(fields) => encode(fields),
    }
}

/// The fields of a message and of the messages in it.
fn count(fields: &[Field]) -> usize {
    let inner = fields.iter().map(|field| match &field.value {
        Value::Message(fields) => count(fields),
        _ => 0,
    });
    fields.len() + inner.sum::<usize>()
}

/// Edits the field with this number, counted in the order of the bytes. Returns whether it was found.
fn apply(fields: &mut Vec<Field>, left: &mut usize, edit: &Edit) -> bool {
    for at in 0..fields.len() {
        if *left == 0 {
            edit.apply(fields, at);
            return true;
        }
        *left -= 1;
        if let Value::Message(inner) = &mut fields[at].value
            && apply(inner, left, edit)
        {
            return true;
        }
    }
    false
}

impl Edit {
    fn apply(&self, fields: &mut Vec<Field>, at: usize) {
        match self {
            Self::Remove => drop(fields.remove(at)),
            Self::Repeat => fields.push(fields[at].clone()),
            Self::Many(copies) => {
                let copy = fields[at].clone();
                // Not more than some hundred kilobytes.
                let copies = (*copies).min((1 << 18) / (1 + value_bytes(&copy.value).len()));
                fields.extend(vec![copy; copies]);
            }
            Self::Renumber(number) => fields[at].number = *number & ((1 << 29) - 1),
            Self::Number(number) => fields[at].value = Value::Number(*number),
            Self::Bytes(changes) => {
                let mut bytes = value_bytes(&fields[at].value);
                changes.iter().for_each(|change| change.apply(&mut bytes, &[]));
                fields[at].value = Value::Bytes(bytes);
            }
            Self::Text(text) => fields[at].value = Value::Bytes(text.as_bytes().to_vec()),
        }
    }
}
