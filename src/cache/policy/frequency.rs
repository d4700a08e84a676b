//! Admission by frequency: a missed row is let in once it was missed often enough of late.
//!
//! A count-min sketch (Cormode and Muthukrishnan, 2005) of four-bit counters, all four of a key in one
//! word of 64 bits, counts misses; when it has counted a miss for every four counters, all are halved, so
//! that the past fades as in TinyLFU (Einziger, Friedman and Manes, 2017, section 3.3). Only misses are
//! counted, so a hit pays nothing. TinyLFU asks whether the newcomer is more frequent than the victim; here
//! victims are chosen in the background, so the newcomer is held against a fixed number.
//!
//! Counting is a load and a store that others may run into. A lost count is one of many, so nothing is
//! done against it.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::types::{FlatKey, scatter};

/// Counters a word, and the most that one counts to.
const COUNTERS: usize = 16;
const MOST: u64 = 15;
/// Every counter's three lower bits: what is left of a word that was shifted right by one.
const HALVES: u64 = 0x7777_7777_7777_7777;

/// A sketch of how often keys were missed.
#[derive(Debug)]
pub struct Sketch {
    words: Box<[AtomicU64]>,
    /// Misses counted since the last halving.
    counted: AtomicU64,
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
            counted: AtomicU64::new(0),
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
        let before = word.load(Ordering::Relaxed);
        // Another mix, since the high bits chose the word.
        let places = scatter(hash);
        let shifts = [0, 1, 2, 3].map(|i| (places >> (4 * i) & 15) * 4);
        let estimate = shifts.iter().map(|shift| before >> shift & MOST).min().unwrap_or(0);
        if estimate < MOST {
            // Only the smallest of a key's counters are raised: the others were raised by other keys too.
            let mut after = before;
            for shift in shifts {
                if after >> shift & MOST == estimate {
                    after += 1 << shift;
                }
            }
            word.store(after, Ordering::Relaxed);
        }
        if self.counted.fetch_add(1, Ordering::Relaxed) + 1 == (self.words.len() * COUNTERS / 4) as u64 {
            self.halve();
        }
        estimate + 1 >= self.least
    }

    fn halve(&self) {
        for word in &self.words {
            let counts = word.load(Ordering::Relaxed);
            word.store(counts >> 1 & HALVES, Ordering::Relaxed);
        }
        self.counted.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;

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
    fn keys_seen_once_are_mostly_kept_out_of_a_sketch_of_their_size() {
        let sketch = Sketch::new(32 << 10, 2);
        let let_in = (0..8u64 << 10).filter(|&key| sketch.admits(FlatKey(key + 2))).count();
        assert!(let_in < 1 << 10, "{let_in} of 8192 keys of one miss were let in");
    }

    #[test]
    fn what_was_missed_long_ago_is_forgotten() {
        let sketch = Sketch::new(1 << 12, 2);
        assert!(!sketch.admits(FlatKey(7)));
        // Two halvings' worth of other keys.
        for key in 0..16u64 << 10 {
            sketch.admits(FlatKey(1000 + key % 64));
        }
        assert!(!sketch.admits(FlatKey(7)));
    }
}
