//! One bit per row of a table: whether the row was ever written. A log uses it for the pages of its index.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::mem::{OutOfHostMemory, set_bits};

const BITS: u64 = u64::BITS as u64;

/// One bit per row, set after the record of the row was written to the file, and never cleared.
pub(crate) struct Bitmap(Vec<AtomicU64>);

impl Bitmap {
    /// A bitmap of `rows` rows, none of them marked.
    pub(crate) fn new(rows: u64) -> Result<Self, OutOfHostMemory> {
        let words = rows.div_ceil(BITS);
        let bytes = usize::try_from(words.saturating_mul(BITS / 8)).unwrap_or(usize::MAX);
        let mut bits = Vec::new();
        bits.try_reserve_exact(bytes / size_of::<u64>()).map_err(|_| OutOfHostMemory { bytes })?;
        bits.extend((0..words).map(|_| AtomicU64::new(0)));
        Ok(Self(bits))
    }

    /// Whether the row was marked. If so, the caller sees everything that the marking thread did before.
    pub(crate) fn has(&self, row: u64) -> bool {
        let word = usize::try_from(row / BITS).ok().and_then(|word| self.0.get(word));
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (row % BITS) & 1 == 1)
    }

    pub(crate) fn mark(&self, row: u64) {
        self.0[(row / BITS) as usize].fetch_or(1 << (row % BITS), Ordering::Release);
    }

    /// The marked rows of a range, ascending.
    pub(crate) fn within(&self, rows: Range<u64>) -> impl Iterator<Item = u64> + '_ {
        let words = rows.start / BITS..rows.end.div_ceil(BITS);
        let marked = words.flat_map(|word| {
            let bits = self.0[word as usize].load(Ordering::Acquire);
            set_bits(bits).map(move |bit| word * BITS + bit)
        });
        marked.filter(move |row| rows.contains(row))
    }
}

#[cfg(test)]
mod tests;
