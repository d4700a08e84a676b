//! Admission by frequency: a missed row is admitted once it was used often enough recently.
//!
//! **The rule.** Each time that a batch misses a row, the row's count grows by the number of its occurrences
//! in that batch. The row is admitted once the count reaches a fixed number (2 by default), or if the cache
//! has room for it without an eviction. Occurrences are counted, not batches: the server merges requests, and
//! a row that two requests of one batch use is admitted as if each request were a batch. The statistics count
//! such a row as one miss and its other occurrences as hits, since the row is fetched once.
//!
//! **Recently** means: a count is kept until about as many other rows were missed as the sketch has room for.
//! The sketch stores a missed row in 16 bits, 12 of the key's hash and a count of 4 bits. A 64-bit word is a
//! queue of four such entries. A row that is missed again moves to the front of its queue with a higher
//! count. A new entry displaces the oldest entry of a full queue. So the sketch is a list of the rows missed
//! last, like the ghost lists of ARC (Megiddo and Modha, 2003) and S3-FIFO (Yang and others, 2023), with two
//! bytes per row. The alternative, TinyLFU's count-min sketch that is halved periodically (Einziger, Friedman
//! and Manes, 2017), needs four counters for each row, and each halving forgets every row that was missed
//! once, however recently.
//!
//! **Limits.** Two rows of one word with equal 12-bit hashes share a count. This affects about one miss in a
//! thousand. How long a row is remembered varies from word to word. Only misses are counted, so a hit costs
//! nothing. TinyLFU compares the new row with the victim. Here victims are chosen in the background, so the
//! count is compared with a fixed number.
//!
//! An update is a load and a store, which are not atomic together. If two threads update a word at once, a
//! count may be lost, and the row is admitted later.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::mem::mix64;
use crate::mem::prefetch::prefetch_line;
use crate::types::FlatKey;

/// Bits of an entry of a queue: a part of the key's hash, and below it the count.
const BITS: u32 = 16;
const COUNT_BITS: u32 = 4;
const MASK: u64 = (1 << BITS) - 1;
/// Counts saturate at this value.
const MAX_COUNT: u64 = (1 << COUNT_BITS) - 1;
/// Entries of a word's queue.
const DEPTH: u32 = u64::BITS / BITS;
/// Bytes of an entry.
pub(crate) const MISS_BYTES: usize = (BITS / u8::BITS) as usize;

/// Counts how often recently missed rows were used.
#[derive(Debug)]
pub(crate) struct Sketch {
    /// Each word is a queue with the newest entry in the lowest bits. An entry of 0 is empty.
    words: Box<[AtomicU64]>,
    /// Rows with at least this count are admitted.
    least: u64,
}

impl Sketch {
    /// A sketch of `bytes` bytes, but at least one word. It admits a missed row at its `least`-th recent use.
    /// `least` is clamped to 1 to 15.
    #[must_use]
    pub(crate) fn new(bytes: usize, least: u32) -> Self {
        let words = (bytes / size_of::<u64>()).max(1);
        Self {
            words: (0..words).map(|_| AtomicU64::new(0)).collect(),
            least: u64::from(least).clamp(1, MAX_COUNT),
        }
    }

    /// Bytes of a sketch that remembers `misses` missed rows. A cache has one entry of the sketch for each
    /// row that it can hold.
    #[must_use]
    pub(crate) fn bytes_of(misses: usize) -> usize {
        (misses * MISS_BYTES).next_multiple_of(size_of::<u64>())
    }

    #[must_use]
    pub(crate) fn bytes(&self) -> usize {
        size_of_val::<[AtomicU64]>(&self.words)
    }

    fn word(&self, hash: u64) -> &AtomicU64 {
        &self.words[((u128::from(hash) * self.words.len() as u128) >> 64) as usize]
    }

    /// Prefetches the word that [`Self::admits`] changes.
    #[inline]
    pub(crate) fn prefetch(&self, key: FlatKey) {
        prefetch_line(self.word(mix64(key.0)));
    }

    /// Counts a row that a batch missed and that occurs `occurrences` times in the batch. Returns whether the
    /// row has been used often enough to be admitted. Call this once for each missed row of a batch.
    pub(crate) fn admits(&self, key: FlatKey, occurrences: u32) -> bool {
        let hash = mix64(key.0);
        let word = self.word(hash);
        // Mixed again, since the high bits have chosen the word.
        let name = mix64(hash) << COUNT_BITS & MASK;
        let (after, count) = missed(word.load(Ordering::Relaxed), name, occurrences.into());
        word.store(after, Ordering::Relaxed);
        count >= self.least
    }
}

/// Counts `occurrences` uses of a missed row. `name` is the row's hash, in the place that it has in an entry.
/// Returns the new queue and the row's new count.
fn missed(queue: u64, name: u64, occurrences: u64) -> (u64, u64) {
    let entry = |place: u32| queue >> (place * BITS) & MASK;
    let is_row = |place: &u32| entry(*place) & !MAX_COUNT == name && entry(*place) & MAX_COUNT > 0;
    let found = (0..DEPTH).find(is_row);
    let before = found.map_or(0, |place| entry(place) & MAX_COUNT);
    let count = (before + occurrences).min(MAX_COUNT);
    // All newer entries move up by one place. This overwrites the row's old entry, or else the oldest entry.
    let moving = u64::MAX >> (u64::BITS - BITS * (found.unwrap_or(DEPTH - 1) + 1));
    let after = queue & !moving | queue << BITS & moving | name | count;
    (after, count)
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
