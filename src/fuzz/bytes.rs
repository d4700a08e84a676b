//! Changes of valid bytes: flipped bits, cuts, copied parts, wrong numbers and words.

use std::fmt;

use proptest::prelude::*;
use proptest::sample::{Index, select};

/// Bytes that are printed as a literal, which a regression test can use.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Input(pub Vec<u8>);

impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b\"{}\"", self.0.escape_ascii())
    }
}

/// One of the seeds with a few changes, or with none. The words are inserted anywhere.
pub(crate) fn mutated(
    seeds: impl IntoIterator<Item = impl Into<Vec<u8>>>,
    words: &'static [&'static str],
) -> impl Strategy<Value = Input> {
    let seeds: Vec<Vec<u8>> = seeds.into_iter().map(Into::into).collect();
    assert!(!seeds.is_empty(), "a target needs seeds");
    (any::<Index>(), changes(words)).prop_map(move |(seed, changes)| {
        let (mut bytes, other) =
            (seed.get(&seeds).clone(), &seeds[(seed.index(seeds.len()) + 1) % seeds.len()]);
        changes.iter().for_each(|change| change.apply(&mut bytes, other));
        Input(bytes)
    })
}

/// One of the seeds, which are safetensors files, with changes of its header. The length of the header is
/// right, and a multiple of `align` with its own 8 bytes. Sometimes the whole file is changed too.
pub(crate) fn mutated_tensors(
    seeds: impl IntoIterator<Item = impl Into<Vec<u8>>>,
    align: usize,
    words: &'static [&'static str],
) -> impl Strategy<Value = Input> {
    let seeds: Vec<Vec<u8>> = seeds.into_iter().map(Into::into).collect();
    (any::<Index>(), changes(words), seldom_changes(words)).prop_map(move |(seed, changes, last)| {
        let (length, rest) = seed.get(&seeds).split_first_chunk().expect("a length");
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let mut header = header.trim_ascii_end().to_vec();
        changes.iter().for_each(|change| change.apply(&mut header, &[]));
        header.resize((8 + header.len()).next_multiple_of(align) - 8, b' ');
        let mut bytes = [&(header.len() as u64).to_le_bytes()[..], &header, data].concat();
        last.iter().for_each(|change| change.apply(&mut bytes, &[]));
        Input(bytes)
    })
}

/// Sometimes changes, and more often none.
pub(crate) fn seldom_changes(words: &'static [&'static str]) -> impl Strategy<Value = Vec<Change>> {
    (0..4u32, changes(words)).prop_map(|(kind, changes)| if kind < 3 { Vec::new() } else { changes })
}

/// Up to five changes.
pub(crate) fn changes(words: &'static [&'static str]) -> impl Strategy<Value = Vec<Change>> {
    prop::collection::vec(change(words), 0..6)
}

/// A change of bytes.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Flip(Index, u8),
    Cut(Index),
    Remove(Index, usize),
    Insert(Index, Vec<u8>),
    /// Copies bytes from the first place to the second.
    Copy(Index, Index, usize),
    /// Copies bytes of another seed.
    Splice(Index, Index, usize),
    /// Overwrites the bytes of a number, little-endian or big-endian.
    Number(Index, Vec<u8>),
    /// Adds to a byte, with a carry into the following ones.
    Add(Index, i8),
    /// Replaces the next digits.
    Digits(Index, &'static str),
}

/// Numbers at which a parser may go wrong.
pub(crate) const NUMBERS: &[u64] = &[
    0,
    1,
    2,
    3,
    0x7f,
    0x80,
    0xff,
    0x100,
    0x7fff,
    0xffff,
    0x1_0000,
    0xff_ffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    1 << 40,
    1 << 48,
    (1 << 60) - 1,
    1 << 61,
    (1 << 63) - 1,
    1 << 63,
    u64::MAX - 7,
    u64::MAX,
];

const DIGITS: &[&str] = &[
    "",
    "0",
    "-0",
    "1",
    "-1",
    "00",
    "2",
    "255",
    "256",
    "65536",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e400",
    "1e-400",
    "0.0000001",
    "nan",
    "inf",
    "-inf",
    "0x10",
    "1_0",
    "\u{661}",
];

/// One change. Everything that any kind needs is drawn before the kind is known, because `prop_oneof` hands
/// each alternative half of the bytes that libFuzzer chose (`guided.rs`), which leaves none.
fn change(words: &'static [&'static str]) -> impl Strategy<Value = Change> {
    let length = (select(&[8usize, 199, 4999][..]), any::<Index>()).prop_map(|(most, at)| 1 + at.index(most));
    let number = (select(NUMBERS), select(&[1usize, 2, 4, 8][..]), any::<bool>()).prop_map(
        |(number, width, little)| {
            if little {
                number.to_le_bytes()[..width].to_vec()
            } else {
                number.to_be_bytes()[8 - width..].to_vec()
            }
        },
    );
    let word =
        select(if words.is_empty() { &["\0"] } else { words }).prop_map(|word| word.as_bytes().to_vec());
    let inserted = prop::collection::vec(any::<u8>(), 1..9);
    let mask =
        (any::<bool>(), 0..8u32, 1..=u8::MAX).prop_map(|(one, bit, any)| if one { 1 << bit } else { any });
    let added =
        (any::<bool>(), -3..=3i8, any::<i8>()).prop_map(|(small, few, any)| if small { few } else { any });
    let drawn = (any::<[Index; 2]>(), length, number, word, inserted, mask, added, select(DIGITS));
    (0..19u32, drawn).prop_map(|(kind, drawn)| {
        let ([at, to], length, number, word, inserted, mask, added, digits) = drawn;
        match kind {
            0..3 => Change::Flip(at, mask),
            3 => Change::Cut(at),
            4..6 => Change::Remove(at, length),
            6 => Change::Insert(at, inserted),
            7..9 => Change::Insert(at, word),
            9..11 => Change::Copy(at, to, length),
            11 => Change::Splice(at, to, length),
            12..15 => Change::Number(at, number),
            15..17 => Change::Add(at, added),
            _ => Change::Digits(at, digits),
        }
    })
}

impl Change {
    /// Changes the bytes. Parts that are spliced in are those of `other`.
    pub(crate) fn apply(&self, bytes: &mut Vec<u8>, other: &[u8]) {
        let place = |at: &Index, bytes: &[u8]| at.index(bytes.len() + 1);
        let part =
            |from: usize, length: usize, all: &[u8]| all[from..(from + length).min(all.len())].to_vec();
        match self {
            Self::Flip(at, mask) => {
                let at = place(at, bytes);
                bytes.get_mut(at).into_iter().for_each(|byte| *byte ^= mask);
            }
            Self::Cut(at) => bytes.truncate(place(at, bytes)),
            Self::Remove(at, length) => {
                let from = place(at, bytes);
                bytes.drain(from..(from + length).min(bytes.len()));
            }
            Self::Insert(at, inserted) => insert(bytes, place(at, bytes), inserted),
            Self::Copy(from, to, length) => {
                let copied = part(place(from, bytes), *length, bytes);
                insert(bytes, place(to, bytes), &copied);
            }
            Self::Splice(from, to, length) => {
                insert(bytes, place(to, bytes), &part(place(from, other), *length, other));
            }
            Self::Number(at, number) => {
                let at = place(at, bytes);
                bytes[at..].iter_mut().zip(number).for_each(|(byte, new)| *byte = *new);
            }
            Self::Add(at, added) => {
                let (at, mut carry) = (place(at, bytes), i32::from(*added));
                for byte in bytes[at..].iter_mut().take(8) {
                    let sum = i32::from(*byte) + carry;
                    (*byte, carry) = (sum.rem_euclid(256) as u8, sum.div_euclid(256));
                }
            }
            Self::Digits(at, digits) => {
                let at = place(at, bytes);
                let Some(from) = bytes[at..].iter().position(u8::is_ascii_digit) else { return };
                let from = at + from;
                let length = bytes[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
                bytes.splice(from..from + length, digits.bytes());
            }
        }
    }
}

fn insert(bytes: &mut Vec<u8>, at: usize, inserted: &[u8]) {
    bytes.splice(at..at, inserted.iter().copied());
}
