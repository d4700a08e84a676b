//! Which rows of a table have been written: one bit a row.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::mem::OutOfHostMemory;

const BITS: u64 = u64::BITS as u64;

/// A bit a row, set once the row's record lies in the file and never cleared.
pub(crate) struct Bitmap(Vec<AtomicU64>);

impl Bitmap {
    /// So many rows, none of them written.
    pub(crate) fn new(rows: u64) -> Result<Self, OutOfHostMemory> {
        let words = rows.div_ceil(BITS);
        let bytes = usize::try_from(words.saturating_mul(BITS / 8)).unwrap_or(usize::MAX);
        let mut bits = Vec::new();
        bits.try_reserve_exact(bytes / size_of::<u64>()).map_err(|_| OutOfHostMemory { bytes })?;
        bits.extend((0..words).map(|_| AtomicU64::new(0)));
        Ok(Self(bits))
    }

    /// Whether the row was marked. Who sees that it was, sees what its marker did before.
    pub(crate) fn has(&self, row: u64) -> bool {
        let word = usize::try_from(row / BITS).ok().and_then(|word| self.0.get(word));
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (row % BITS) & 1 == 1)
    }

    /// Marks a row of the table.
    pub(crate) fn mark(&self, row: u64) {
        self.0[(row / BITS) as usize].fetch_or(1 << (row % BITS), Ordering::Release);
    }

    /// The marked rows of a range of the table's, ascending.
    pub(crate) fn within(&self, rows: Range<u64>) -> impl Iterator<Item = u64> + '_ {
        let words = rows.start / BITS..rows.end.div_ceil(BITS);
        let marked = words.flat_map(|word| {
            let bits = self.0[word as usize].load(Ordering::Acquire);
            // Each step drops the lowest bit that is set.
            let rest = std::iter::successors(Some(bits), |bits| Some(bits & bits.wrapping_sub(1)));
            rest.take_while(|&bits| bits != 0).map(move |bits| word * BITS + u64::from(bits.trailing_zeros()))
        });
        marked.filter(move |row| rows.contains(row))
    }

    /// Its size.
    pub(crate) fn bytes(&self) -> u64 {
        (self.0.len() * size_of::<AtomicU64>()) as u64
    }
}

#[cfg(test)]
mod tests;
