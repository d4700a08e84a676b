//! Counts keys within a fixed number of bytes: exactly while all distinct keys fit, otherwise with a bounded
//! error.
//!
//! **The idea** is that of Misra and Gries in the form of Anderson, Bevan, Lang, Liberty, Rhodes and Thaler,
//! "A High-Performance Algorithm for Identifying Frequent Items in Data Streams" (IMC 2017; arXiv
//! 1705.07001). When there is no room for a new key, `m` is the median of all counts. Every key with a count
//! of at most `m` is dropped. From then on new keys, and keys that were dropped and return, start from `m`,
//! the *floor*. The paper instead subtracts `m` from the remaining counts, and adds the sum of all `m` to
//! every answer.
//!
//! **Bounds** after `n` accesses, with room for `k` keys and a floor of `f`: a kept key had at most as many
//! accesses as its count, and at least its count minus `f`. A key that is not kept had at most `f`. The floor
//! is bounded too. The excess of a key is its count above the floor. An access adds 1 to the sum of all
//! excesses, and raising the floor by `r` takes `r` from each key of the upper half. So
//!
//! ```text
//! f * ceil(k/2) <= n
//! f * (ceil(k/2) - j) <= n_j
//! ```
//!
//! Choose any `j` keys, with `j < ceil(k/2)`: `n_j` is the number of accesses of all other keys. The second
//! line is the same argument for the other keys only: at least `ceil(k/2) - j` of them are in the upper
//! half. If `j` keys have most accesses, as in click logs, the floor is low (bounds by the tail: Berinde,
//! Cormode, Indyk and Strauss, "Space-optimal Heavy Hitters with Strong Error Bounds", PODS 2009).
//!
//! **Memory.** Keys with counts are in one array, 16 bytes each. An index with two 4-byte slots for each
//! key finds them. That is [`KEY_BYTES`] per key, allocated once and touched as keys are added. Dropping
//! keys works in place and rebuilds the index.

use std::collections::TryReserveError;

use crate::mem::mix64;

/// Bytes per counted key, with its index slots.
pub(crate) const KEY_BYTES: usize = size_of::<Counted>() + SLOTS * size_of::<u32>();
/// Least number of index slots per key. A probe then reads 1.5 slots for a key that is present and 2.5 for
/// one that is not (Knuth, The Art of Computer Programming 3, section 6.4, linear probing at load 1/2).
const SLOTS: usize = 2;
/// Initial slots of the index, which doubles as keys are added.
const FIRST_SLOTS: usize = 1024;
/// An empty slot.
const EMPTY: u32 = u32::MAX;

/// A key and its count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counted {
    pub key: u64,
    pub count: u64,
}

/// Counts by key, in bounded memory.
#[derive(Debug)]
pub(crate) struct Summary {
    counted: Vec<Counted>,
    /// Indices into `counted`, by linear probing from the slot of the key's hash.
    index: Vec<u32>,
    room: usize,
    floor: u64,
}

impl Summary {
    /// An empty summary with room for as many keys as fit `bytes`, at least one and at most 2^32 - 1.
    ///
    /// # Errors
    /// When the allocation fails.
    pub(crate) fn within(bytes: usize) -> Result<Self, TryReserveError> {
        let room = (bytes / KEY_BYTES).clamp(1, EMPTY as usize);
        let (mut counted, mut index) = (Vec::new(), Vec::new());
        counted.try_reserve_exact(room)?;
        index.try_reserve_exact(SLOTS * room)?;
        index.resize(FIRST_SLOTS.min(SLOTS * room), EMPTY);
        Ok(Self { counted, index, room, floor: 0 })
    }

    /// Counts one access.
    pub(crate) fn add(&mut self, key: u64) {
        let mut slot = self.slot(key);
        if let Some(counted) = self.counted.get_mut(self.index[slot] as usize) {
            counted.count += 1;
            return;
        }
        if self.counted.len() == self.room {
            self.drop_lower_half();
            slot = self.slot(key);
        } else if SLOTS * (self.counted.len() + 1) > self.index.len() {
            let slots = (2 * self.index.len()).min(SLOTS * self.room);
            self.build_index(slots);
            slot = self.slot(key);
        }
        self.index[slot] = self.counted.len() as u32;
        self.counted.push(Counted { key, count: self.floor + 1 });
    }

    /// Number of kept keys.
    pub(crate) fn keys(&self) -> usize {
        self.counted.len()
    }

    /// The most accesses of a key that is not kept, and the most by which a count is too high. 0 while counts
    /// are exact.
    pub(crate) fn floor(&self) -> u64 {
        self.floor
    }

    /// The keys with their counts, unordered, without a copy.
    pub(crate) fn into_counted(self) -> Vec<Counted> {
        self.counted
    }

    /// The slot of a key, or the empty slot where it belongs.
    fn slot(&self, key: u64) -> usize {
        let slots = self.index.len();
        // Scales the hash from 0..2^64 to 0..slots.
        let mut slot = ((u128::from(mix64(key)) * slots as u128) >> 64) as usize;
        loop {
            // `EMPTY` is past the end of `counted`, so `get` returns `None` for it.
            match self.counted.get(self.index[slot] as usize) {
                Some(counted) if counted.key != key => slot = if slot + 1 == slots { 0 } else { slot + 1 },
                _ => return slot,
            }
        }
    }

    /// Drops at least half of the keys and raises the floor.
    fn drop_lower_half(&mut self) {
        let middle = self.counted.len() / 2;
        self.floor = self.counted.select_nth_unstable_by_key(middle, |counted| counted.count).1.count;
        self.counted.retain(|counted| counted.count > self.floor);
        self.build_index(self.index.len());
    }

    fn build_index(&mut self, slots: usize) {
        self.index.clear();
        // Stays within the reserved capacity.
        self.index.resize(slots, EMPTY);
        for place in 0..self.counted.len() {
            let slot = self.slot(self.counted[place].key);
            self.index[slot] = place as u32;
        }
    }
}

#[cfg(test)]
mod tests;
