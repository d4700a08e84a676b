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

use crate::mem::mix64;
use crate::types::FlatKey;

/// Bits of a remembered miss: of the hash and, below them, the count.
const BITS: u32 = 16;
const COUNT_BITS: u32 = 4;
const MASK: u64 = (1 << BITS) - 1;
/// The most that is counted to.
const MOST: u64 = (1 << COUNT_BITS) - 1;
/// Misses that a word remembers.
const DEPTH: u32 = u64::BITS / BITS;
/// Bytes of a remembered miss.
pub(crate) const MISS_BYTES: usize = (BITS / u8::BITS) as usize;

/// A sketch of how often keys were missed.
#[derive(Debug)]
pub(crate) struct Sketch {
    /// Each a queue of misses, the newest in the lowest bits; 0 is none.
    words: Box<[AtomicU64]>,
    /// From which count on a key is let in.
    least: u64,
}

impl Sketch {
    /// A sketch of so many bytes, at least one word, that lets a key in at its `least`-th miss, 1 to 15.
    #[must_use]
    pub(crate) fn new(bytes: usize, least: u32) -> Self {
        let words = (bytes / size_of::<u64>()).max(1);
        Self {
            words: (0..words).map(|_| AtomicU64::new(0)).collect(),
            least: u64::from(least).clamp(1, MOST),
        }
    }

    /// Bytes it takes.
    #[must_use]
    pub(crate) fn bytes(&self) -> usize {
        size_of_val::<[AtomicU64]>(&self.words)
    }

    /// Counts a miss. Returns whether the key has been missed often enough.
    pub(crate) fn admits(&self, key: FlatKey) -> bool {
        let hash = mix64(key.0);
        let word = &self.words[((u128::from(hash) * self.words.len() as u128) >> 64) as usize];
        // Another mix, since the high bits chose the word.
        let name = mix64(hash) << COUNT_BITS & MASK;
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
mod tests;
