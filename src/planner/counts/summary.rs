//! Counts of keys in the bytes that are given, and no more: exact while the distinct keys fit, and
//! within a known error past that.
//!
//! **The idea** is that of Misra and Gries in the form of Anderson, Bevan, Lang, Liberty, Rhodes and
//! Thaler, "A High-Performance Algorithm for Identifying Frequent Items in Data Streams" (IMC 2017;
//! arXiv 1705.07001): when there is no room for a new key, the median `m` of all counts is taken, every
//! key of at most `m` is forgotten, and a key that comes (back) starts from `m`, the *floor*. Theirs takes
//! `m` off the counts that stay and adds the sum to every answer; here it stays in.
//!
//! **What holds** after `n` accesses, with room for `k` keys and a floor of `f`. A key that is there
//! had at most as many accesses as its count, and at least its count less `f`; one that is not had at
//! most `f`. And the floor is bounded. Call what a count has above the floor its excess: an access adds 1
//! to the sum of all, and a rise of the floor by `r` takes `r` from each of the upper half. So
//!
//! ```text
//! f * ceil(k/2) <= n
//! f * (ceil(k/2) - j) <= n_j      n_j: the accesses of all keys but any j, j < ceil(k/2)
//! ```
//!
//! where the second is the same sum over the other keys alone, of which at least `ceil(k/2) - j` are in the
//! upper half. So the skew of click logs makes the floor low (such bounds by the tail are those of Berinde,
//! Cormode, Indyk and Strauss, "Space-optimal Heavy Hitters with Strong Error Bounds", PODS 2009).
//!
//! **Memory.** Keys with their counts lie one behind the other, 16 bytes each, and an index of two
//! 4-byte slots a key finds them: [`KEY_BYTES`] a key, taken from the system once, and touched as keys
//! come. Forgetting works in place and builds the index again.

use std::collections::TryReserveError;

use crate::mem::mix64;

/// Bytes that a counted key takes.
pub(crate) const KEY_BYTES: usize = size_of::<Counted>() + SLOTS * size_of::<u32>();
/// Slots of the index a key, at least: a probe then reads 1.5 of them for a key that is there, 2.5 for one
/// that is not (Knuth, The Art of Computer Programming 3, section 6.4, linear probing at load 1/2).
const SLOTS: usize = 2;
/// Slots of the index at first; it doubles as keys come.
const FIRST_SLOTS: usize = 1024;
/// A slot of no key.
const EMPTY: u32 = u32::MAX;

/// A key, and how often it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counted {
    pub key: u64,
    pub count: u64,
}

/// Counts by key, in bounded memory.
#[derive(Debug)]
pub(crate) struct Summary {
    counted: Vec<Counted>,
    /// Places in `counted`, by linear probing from where the key hashes to.
    index: Vec<u32>,
    room: usize,
    floor: u64,
}

impl Summary {
    /// No keys, and room for as many as these bytes hold, at least one and at most 2^32 - 1.
    ///
    /// # Errors
    /// The system does not give so many bytes.
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
            self.forget();
            slot = self.slot(key);
        } else if SLOTS * (self.counted.len() + 1) > self.index.len() {
            let slots = (2 * self.index.len()).min(SLOTS * self.room);
            self.build_index(slots);
            slot = self.slot(key);
        }
        self.index[slot] = self.counted.len() as u32;
        self.counted.push(Counted { key, count: self.floor + 1 });
    }

    /// How many keys are there.
    pub(crate) fn keys(&self) -> usize {
        self.counted.len()
    }

    /// The most accesses that a key which is not there may have had, and by which a count may be too
    /// high: 0 while all is exact.
    pub(crate) fn floor(&self) -> u64 {
        self.floor
    }

    /// The keys with their counts, in no order, in the memory that they lie in.
    pub(crate) fn into_counted(self) -> Vec<Counted> {
        self.counted
    }

    /// The slot that a key has, or would have.
    fn slot(&self, key: u64) -> usize {
        let slots = self.index.len();
        // The hash as a share of 2^64, of the slots.
        let mut slot = ((u128::from(mix64(key)) * slots as u128) >> 64) as usize;
        loop {
            // An empty slot is past every place.
            match self.counted.get(self.index[slot] as usize) {
                Some(counted) if counted.key != key => slot = if slot + 1 == slots { 0 } else { slot + 1 },
                _ => return slot,
            }
        }
    }

    /// Forgets at least half of the keys.
    fn forget(&mut self) {
        let middle = self.counted.len() / 2;
        self.floor = self.counted.select_nth_unstable_by_key(middle, |counted| counted.count).1.count;
        self.counted.retain(|counted| counted.count > self.floor);
        self.build_index(self.index.len());
    }

    fn build_index(&mut self, slots: usize) {
        self.index.clear();
        // Within what was reserved.
        self.index.resize(slots, EMPTY);
        for place in 0..self.counted.len() {
            let slot = self.slot(self.counted[place].key);
            self.index[slot] = place as u32;
        }
    }
}

#[cfg(test)]
mod tests;
