//! Admission by frequency: a missed row is let in once it was missed often enough of late.
//!
//! **Of late** means: while as many other rows were missed as the sketch has room for. It remembers a miss as
//! sixteen bits, twelve of the key's hash and a count of four, and a word of 64 bits is a queue of four of them:
//! a row that is missed again moves to its front with one more, and one that is not is pushed out by the newer
//! misses that fall into its word. So it is a list of the rows missed last, as the ghosts of ARC (Megiddo and
//! Modha, 2003) and S3-FIFO (Yang and others, 2023) are, in two bytes a row. A count-min sketch that is halved now and then,
//! as TinyLFU has it (Einziger, Friedman and Manes, 2017), needs four counters for each row and forgets all
//! that was missed once at every halving, however short ago.
//!
//! Its limits: two rows of one word and one hash are taken for each other, once in a thousand misses. How long
//! a miss is remembered differs from word to word, as chance fills them. Only misses are counted, so that a
//! hit pays nothing. TinyLFU asks whether the newcomer is more frequent than the victim; here victims are chosen in the
//! background, so the newcomer is held against a fixed number.
//!
//! A miss is a load and a store that others may run into. A miss that is lost so is one of many, and nothing is
//! done against it.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::types::{FlatKey, scatter};

/// Bits of a remembered miss: of the hash and, below them, the count.
const BITS: u32 = 16;
const COUNT_BITS: u32 = 4;
const MASK: u64 = (1 << BITS) - 1;
/// The most that is counted to.
const MOST: u64 = (1 << COUNT_BITS) - 1;
/// Misses that a word remembers.
const DEPTH: u32 = u64::BITS / BITS;
/// Bytes of a remembered miss.
pub const MISS_BYTES: usize = (BITS / u8::BITS) as usize;

/// A sketch of how often keys were missed.
#[derive(Debug)]
pub struct Sketch {
    /// Each a queue of misses, the newest in the lowest bits; 0 is none.
    words: Box<[AtomicU64]>,
    /// From which count on a key is let in.
    least: u64,
}

impl Sketch {
    /// A sketch of so many bytes, at least one word, that lets a key in at its `least`-th miss, 1 to 15.
    #[must_use]
    pub fn new(bytes: usize, least: u32) -> Self {
        let words = (bytes / size_of::<u64>()).max(1);
        Self {
            words: (0..words).map(|_| AtomicU64::new(0)).collect(),
            least: u64::from(least).clamp(1, MOST),
        }
    }

    /// Bytes it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val::<[AtomicU64]>(&self.words)
    }

    /// Counts a miss. Returns whether the key has been missed often enough.
    pub fn admits(&self, key: FlatKey) -> bool {
        let hash = scatter(key.0);
        let word = &self.words[((u128::from(hash) * self.words.len() as u128) >> 64) as usize];
        // Another mix, since the high bits chose the word.
        let name = scatter(hash) << COUNT_BITS & MASK;
        let (after, count) = missed(word.load(Ordering::Relaxed), name);
        word.store(after, Ordering::Relaxed);
        count >= self.least
    }
}

/// A queue after a miss of this name, and how often it was missed now.
fn missed(queue: u64, name: u64) -> (u64, u64) {
    let entry = |place: u32| queue >> (place * BITS) & MASK;
    let is_it = |place: &u32| entry(*place) & !MOST == name && entry(*place) & MOST > 0;
    let found = (0..DEPTH).find(is_it);
    let count = found.map_or(1, |place| (entry(place) & MOST) + 1).min(MOST);
    // What is newer moves up by a place, over the one that was found or else over the oldest.
    let moving = u64::MAX >> (u64::BITS - BITS * (found.unwrap_or(DEPTH - 1) + 1));
    let after = queue & !moving | queue << BITS & moving | name | count;
    (after, count)
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_word_is_a_queue_of_the_names_missed_last_with_their_counts(
            names in prop::collection::vec(0u64..7, 0..80),
        ) {
            let (mut queue, mut list) = (0, Vec::<(u64, u64)>::new());
            for name in names {
                let known = list.iter().position(|&(n, _)| n == name);
                let count = known.map_or(1, |at| list.remove(at).1 + 1).min(MOST);
                list.insert(0, (name, count));
                list.truncate(DEPTH as usize);
                let (after, counted) = missed(queue, name << COUNT_BITS);
                prop_assert_eq!(counted, count);
                let packed = |word, &(n, c): &(u64, u64)| word << BITS | n << COUNT_BITS | c;
                prop_assert_eq!(after, list.iter().rev().fold(0, packed));
                queue = after;
            }
        }
    }

    #[test]
    fn a_key_is_let_in_at_its_nth_miss_and_no_earlier_where_keys_are_few() {
        for least in [1, 2, 5] {
            let sketch = Sketch::new(1 << 16, least);
            for key in 2..100 {
                let admitted: Vec<bool> = (0..6).map(|_| sketch.admits(FlatKey(key))).collect();
                let first = admitted.iter().position(|a| *a);
                assert_eq!(first, Some(least as usize - 1), "key {key}: {admitted:?}");
            }
        }
    }

    #[test]
    fn keys_seen_once_are_kept_out_however_many_they_are() {
        let sketch = Sketch::new(1 << 12, 2);
        let let_in = (0..1u64 << 18).filter(|&key| sketch.admits(FlatKey(key + 2))).count();
        assert!(let_in < 1 << 9, "{let_in} of {} keys of one miss were let in", 1 << 18);
    }

    /// What share of the keys is let in at a second miss, so many other misses after the first.
    fn remembered(others: u64) -> f64 {
        const KEYS: u64 = 200;
        let let_in = |key: &u64| {
            let sketch = Sketch::new(ROOM as usize * MISS_BYTES, 2);
            assert!(!sketch.admits(FlatKey(*key)));
            let let_in = (0..others).filter(|other| sketch.admits(FlatKey(1000 + key * others + other)));
            assert!(let_in.count() <= others as usize / 100, "rows missed once");
            sketch.admits(FlatKey(*key))
        };
        (2..2 + KEYS).filter(let_in).count() as f64 / KEYS as f64
    }

    /// Misses that the sketch has room for.
    const ROOM: u64 = 1 << 10;

    #[test]
    fn a_miss_is_remembered_for_about_as_many_others_as_there_is_room_for() {
        let shares = [ROOM / 4, ROOM / 2, 2 * ROOM, 4 * ROOM].map(remembered);
        assert!(shares[0] > 0.95 && shares[1] > 0.8, "soon after: {shares:?}");
        assert!(shares[2] < 0.2 && shares[3] < 0.02, "long after: {shares:?}");
    }
}
