//! Eviction by frequency rank, as the frequency-aware cache has it: rows were ranked by how often a data
//! set asks for them (`flechette plan --counts`), and the row of the lowest rank goes first.
//!
//! Ranks are of the past and do not change, so a hot row of yesterday stays until the next counts; that
//! is what makes it steady where traffic is, and wrong where traffic moves. Rows without a rank are colder
//! than any with one, and the longest unused of them goes first.

//!
//! A rank is looked up for every entry that a sweep sees, so ranks lie in a table of open addressing, of a size that
//! its number of rows says beforehand: it is part of `cache.bytes`.

use super::super::key::{EMPTY, mix64};
use crate::types::FlatKey;

/// Ranks of the most frequent rows, 0 the most frequent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ranks {
    /// [`EMPTY`] where there is none.
    keys: Box<[FlatKey]>,
    /// By place of the key.
    ranks: Box<[u32]>,
    len: usize,
}

impl Ranks {
    /// Bytes that the ranks of so many rows take: a key and a rank each, and a third of it more to be found by.
    #[must_use]
    pub(crate) fn bytes_of(rows: usize) -> usize {
        Self::places(rows) * (size_of::<FlatKey>() + size_of::<u32>())
    }

    fn places(rows: usize) -> usize {
        if rows == 0 { 0 } else { rows + rows.div_ceil(3) }
    }

    /// Ranks of keys in descending frequency. Of a key that comes twice the first rank counts.
    #[must_use]
    pub(crate) fn new(descending: impl ExactSizeIterator<Item = FlatKey>) -> Self {
        let places = Self::places(descending.len());
        let mut ranks = Self { keys: vec![EMPTY; places].into(), ranks: vec![0; places].into(), len: 0 };
        for key in descending {
            // Fewer keys than places, so that there is an empty one.
            let place = ranks.place(key);
            if ranks.keys[place] == EMPTY {
                ranks.keys[place] = key;
                ranks.ranks[place] = ranks.len as u32;
                ranks.len += 1;
            }
        }
        ranks
    }

    /// Where a key is, or else where it would be. There are places.
    fn place(&self, key: FlatKey) -> usize {
        let places = self.keys.len();
        let mut place = ((u128::from(mix64(key)) * places as u128) >> 64) as usize;
        while self.keys[place] != key && self.keys[place] != EMPTY {
            place = if place + 1 == places { 0 } else { place + 1 };
        }
        place
    }

    fn rank(&self, key: FlatKey) -> Option<u32> {
        if self.keys.is_empty() {
            return None;
        }
        let place = self.place(key);
        (self.keys[place] == key).then(|| self.ranks[place])
    }

    /// How cold a key is that was last used `age` batches ago: what is larger goes first.
    #[must_use]
    pub(crate) fn coldness(&self, key: FlatKey, age: u32) -> u64 {
        match self.rank(key) {
            Some(rank) => u64::from(rank),
            None => (1 << 32) + u64::from(age),
        }
    }

    /// Bytes it takes.
    #[must_use]
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.keys) + size_of_val(&*self.ranks)
    }

    /// How many keys have a rank.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether none has.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
