//! Eviction by frequency rank, as in the frequency-aware cache (Fang et al., 2022): rows are ranked by how
//! often a data set uses them (`flechette plan --counts`), and the row with the last rank is evicted first.
//!
//! Ranks are computed from past data and stay fixed while the cache exists. So they suit steady traffic and
//! not shifting traffic. Rows without a rank are colder than all ranked rows. Among them, the longest unused
//! row is evicted first.
//!
//! A sweep looks up the rank of every entry, so ranks are in a hash table with open addressing. Its size
//! follows from the number of rows, because the table counts towards `cache.bytes`.

use super::super::key::{EMPTY, hash_key};
use crate::types::FlatKey;

/// Ranks of the most frequent rows, 0 the most frequent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ranks {
    /// Open addressing with linear probing. A free place has the key [`EMPTY`].
    keys: Box<[FlatKey]>,
    /// By place of the key in `keys`.
    ranks: Box<[u32]>,
    len: usize,
}

impl Ranks {
    /// Bytes for the ranks of `rows` rows: a key and a rank each, and a third more for free places.
    #[must_use]
    pub(crate) fn bytes_of(rows: usize) -> usize {
        Self::places(rows) * (size_of::<FlatKey>() + size_of::<u32>())
    }

    fn places(rows: usize) -> usize {
        if rows == 0 { 0 } else { rows + rows.div_ceil(3) }
    }

    /// Ranks of keys that are given in descending frequency. A key that occurs twice has its first rank.
    #[must_use]
    pub(crate) fn new(descending: impl ExactSizeIterator<Item = FlatKey>) -> Self {
        let places = Self::places(descending.len());
        let mut ranks = Self { keys: vec![EMPTY; places].into(), ranks: vec![0; places].into(), len: 0 };
        for key in descending {
            // There are more places than keys, so the search finds a free place.
            let place = ranks.place(key);
            if ranks.keys[place] == EMPTY {
                ranks.keys[place] = key;
                ranks.ranks[place] = ranks.len as u32;
                ranks.len += 1;
            }
        }
        ranks
    }

    /// The place of a key, or the free place for it. The table is not empty.
    fn place(&self, key: FlatKey) -> usize {
        let places = self.keys.len();
        let mut place = ((u128::from(hash_key(key)) * places as u128) >> 64) as usize;
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

    /// The coldness of a key that was last used `age` batches ago. Larger values are evicted first.
    #[must_use]
    pub(crate) fn coldness(&self, key: FlatKey, age: u32) -> u64 {
        match self.rank(key) {
            Some(rank) => u64::from(rank),
            None => (1 << 32) + u64::from(age),
        }
    }

    #[must_use]
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.keys) + size_of_val(&*self.ranks)
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
