//! How often each row is used, by the counts of a data set: what LFU asks of each row that comes in (frequency-aware cache,
//! section 4).
//!
//! Millions of rows, of which each batch asks for tens of thousands, none of them near: as in the Hit-Map, a row is looked for from
//! where its hash says, and that place is asked for some turns before, which a map of the standard library does not let one do.

use super::key::Key;
use crate::mem::prefetch::prefetch_line;
use crate::mem::{Huge, OutOfHostMemory, mix64};

/// Counts by rows, made once.
#[derive(Debug)]
pub(crate) struct UseCounts {
    /// A key and one more; 0 where there is none.
    keys: Huge<u64>,
    counts: Huge<u32>,
}

impl UseCounts {
    /// Of these rows, which are distinct, and their counts.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the memory is not to be had.
    pub(crate) fn new(rows: impl ExactSizeIterator<Item = (Key, u32)>) -> Result<Self, OutOfHostMemory> {
        // Half of it stays empty: a search then looks at two or three places.
        let places = 2 * rows.len() + 1;
        let mut all = Self { keys: Huge::zeroed(places)?, counts: Huge::zeroed(places)? };
        for (key, count) in rows {
            let mut at = all.home(key);
            while all.keys[at] != 0 {
                at = all.after(at);
            }
            all.keys[at] = key.number() + 1;
            all.counts[at] = count;
        }
        Ok(all)
    }

    /// Asks memory for what [`Self::get`] looks at.
    #[inline(always)]
    pub(crate) fn prefetch(&self, key: Key) {
        let home = self.home(key);
        prefetch_line(&raw const self.keys[home]);
        prefetch_line(&raw const self.counts[home]);
    }

    /// How often the row is used; 0 where it was not counted.
    #[inline]
    pub(crate) fn get(&self, key: Key) -> u32 {
        let mut at = self.home(key);
        loop {
            match self.keys[at] {
                0 => return 0,
                found if found == key.number() + 1 => return self.counts[at],
                _ => at = self.after(at),
            }
        }
    }

    #[inline(always)]
    fn home(&self, key: Key) -> usize {
        ((u128::from(mix64(key.number())) * self.keys.len() as u128) >> 64) as usize
    }

    #[inline(always)]
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.keys.len() { 0 } else { at + 1 }
    }
}

#[cfg(test)]
mod tests;
