//! A set of rows of one table: one bit a row.

use crate::mem::{OutOfHostMemory, set_bits};

const BITS: u64 = u64::BITS as u64;

/// Rows of a table.
#[derive(Clone, Debug, Default)]
pub(crate) struct RowSet {
    words: Vec<u64>,
    len: usize,
}

impl RowSet {
    /// No row of a table of `rows` rows.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the allocation fails.
    pub(crate) fn new(rows: u64) -> Result<Self, OutOfHostMemory> {
        let words = usize::try_from(rows.div_ceil(BITS)).unwrap_or(usize::MAX);
        let bytes = words.saturating_mul(size_of::<u64>());
        let mut none = Vec::new();
        none.try_reserve_exact(words).map_err(|_| OutOfHostMemory { bytes })?;
        none.resize(words, 0);
        Ok(Self { words: none, len: 0 })
    }

    /// Number of rows in the set.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Removes all rows.
    pub(crate) fn clear(&mut self) {
        if self.len > 0 {
            self.words.fill(0);
            self.len = 0;
        }
    }

    /// Adds a row of the table.
    pub(crate) fn insert(&mut self, row: u64) {
        let (word, bit) = (&mut self.words[(row / BITS) as usize], 1 << (row % BITS));
        self.len += usize::from(*word & bit == 0);
        *word |= bit;
    }

    /// Removes a row. Returns whether the set had it.
    pub(crate) fn remove(&mut self, row: u64) -> bool {
        let (word, bit) = (&mut self.words[(row / BITS) as usize], 1 << (row % BITS));
        let had = *word & bit != 0;
        *word &= !bit;
        // Not `-= usize::from(had)`: rustc 1.95 optimises the subtraction away where a caller's `if` on the
        // result is inlined.
        if had {
            self.len -= 1;
        }
        had
    }

    /// Moves the first rows that are not below `row`, at most `most` of them, to the end of `rows`.
    pub(crate) fn take_from(&mut self, row: u64, most: usize, rows: &mut Vec<u64>) {
        let mut left = most.min(self.len);
        // Without the rows below `row`.
        let mut mask = u64::MAX << (row % BITS);
        for (word, bits) in self.words.iter_mut().enumerate().skip((row / BITS) as usize) {
            if left == 0 {
                return;
            }
            for bit in set_bits(*bits & mask).take(left) {
                rows.push(word as u64 * BITS + bit);
                *bits &= !(1 << bit);
                self.len -= 1;
                left -= 1;
            }
            mask = u64::MAX;
        }
    }

    /// The rows of the set, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        let words = self.words.iter().zip(0_u64..);
        words.flat_map(|(&bits, word)| set_bits(bits).map(move |bit| word * BITS + bit))
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rows_removed_in_a_condition_are_counted() {
        let mut set = RowSet::new(300).unwrap();
        (0..300).for_each(|row| set.insert(row));
        let mut removed = Vec::new();
        for row in 0..200 {
            if set.remove(row) {
                removed.push(row);
            }
        }
        assert_eq!((set.len(), removed.len()), (100, 200));
    }

    proptest! {
        #[test]
        fn a_row_set_behaves_like_a_sorted_set(
            actions in proptest::collection::vec((0_u64..300, any::<bool>()), 0..200),
            (from, most) in (0_u64..310, 0_usize..40),
        ) {
            let (mut set, mut expected) = (RowSet::new(300).unwrap(), BTreeSet::new());
            for (row, add) in actions {
                if add {
                    set.insert(row);
                    expected.insert(row);
                } else {
                    prop_assert_eq!(set.remove(row), expected.remove(&row));
                }
                prop_assert_eq!(set.len(), expected.len());
            }
            prop_assert!(set.iter().eq(expected.iter().copied()));
            let (mut left, mut taken) = (set.clone(), Vec::new());
            left.take_from(from, most, &mut taken);
            prop_assert!(taken.iter().copied().eq(expected.range(from..).copied().take(most)));
            prop_assert_eq!(left.len() + taken.len(), set.len());
        }
    }
}
