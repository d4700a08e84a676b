//! Eviction by frequency rank, as the frequency-aware cache has it: rows were ranked by how often a data
//! set asks for them (`flechette plan --counts`), and the row of the lowest rank goes first.
//!
//! Ranks are of the past and do not change, so a hot row of yesterday stays until the next counts; that
//! is what makes it steady where traffic is, and wrong where traffic moves. Rows without a rank are colder
//! than any with one, and the longest unused of them goes first.

use std::collections::HashMap;

use crate::types::FlatKey;

/// Ranks of the most frequent rows, 0 the most frequent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranks(HashMap<FlatKey, u32>);

impl Ranks {
    /// Ranks of keys in descending frequency. Of a key that comes twice the first rank counts.
    #[must_use]
    pub fn new(descending: impl IntoIterator<Item = FlatKey>) -> Self {
        let mut ranks = HashMap::new();
        for key in descending {
            let rank = ranks.len() as u32;
            ranks.entry(key).or_insert(rank);
        }
        Self(ranks)
    }

    /// How cold a key is that was last used `age` batches ago: what is larger goes first.
    #[must_use]
    pub fn coldness(&self, key: FlatKey, age: u32) -> u64 {
        match self.0.get(&key) {
            Some(&rank) => u64::from(rank),
            None => (1 << 32) + u64::from(age),
        }
    }

    /// How many keys have a rank.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether none has.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;

    #[test]
    fn ranked_keys_are_warmer_than_others_whatever_their_age() {
        let ranks = Ranks::new([5, 9, 5, 7].map(FlatKey));
        assert_eq!(ranks.len(), 3);
        let mut keys = [(9, 1000), (3, 2), (5, 3), (4, 0), (7, 0)];
        keys.sort_by_key(|&(key, age)| ranks.coldness(FlatKey(key), age));
        assert_eq!(keys.map(|(key, _)| key), [5, 9, 7, 4, 3]);
    }
}
