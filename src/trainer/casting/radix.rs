//! Sorts the pairs of a table by row: a radix sort from the least significant digit.
//!
//! Pairs arrive in the order of their occurrences, and a pass is stable. So sorting by row alone also leaves
//! the pairs of a row in batch order. A pass reads the pairs twice and writes them once, without the
//! unpredictable branches of a comparison sort. Only digits in which rows differ get a pass: rows below 2^22
//! need at most two.

use std::mem;

/// A row of a table, and the number of its occurrence in the batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct RowOccurrence {
    /// The row.
    pub row: u64,
    /// The number of the occurrence.
    pub occurrence: u32,
}

/// Bits of a digit. The counts of a pass (8 KiB) fit in the L1 cache.
const DIGIT_BITS: u32 = 11;
const DIGITS: usize = 1 << DIGIT_BITS;

/// With fewer pairs per pass than this, a comparison sort is faster, because a pass also clears and sums its
/// counts.
const FEW: usize = 200;

/// The second buffer of the sort, kept for reuse.
#[derive(Clone, Debug, Default)]
pub struct RadixSort {
    spare: Vec<RowOccurrence>,
}

impl RadixSort {
    /// Sorts pairs that are in the order of their occurrences.
    pub fn sort(&mut self, pairs: &mut Vec<RowOccurrence>) {
        let shifts = differing(pairs);
        if pairs.len() < FEW * shifts.clone().count() {
            pairs.sort_unstable();
            return;
        }
        self.spare.resize(pairs.len(), RowOccurrence::default());
        for shift in shifts {
            pass(pairs, &mut self.spare, shift);
            mem::swap(pairs, &mut self.spare);
        }
    }
}

/// The first bit of each digit in which rows differ, ascending.
fn differing(pairs: &[RowOccurrence]) -> impl Iterator<Item = u32> + Clone + use<> {
    let (any, all) = pairs.iter().fold((0, u64::MAX), |(any, all), pair| (any | pair.row, all & pair.row));
    let bits = any & !all;
    (0..u64::BITS).step_by(DIGIT_BITS as usize).filter(move |&shift| digit(bits, shift) != 0)
}

#[inline(always)]
fn digit(row: u64, shift: u32) -> usize {
    (row >> shift) as usize % DIGITS
}

/// One stable pass from one buffer to the other, by the digit that begins at bit `shift`.
fn pass(from: &[RowOccurrence], to: &mut [RowOccurrence], shift: u32) {
    // A local array and a slice of known length, so that the compiler removes all bounds checks except the
    // one of the last store.
    let mut next = [0u32; DIGITS];
    for pair in from {
        next[digit(pair.row, shift)] += 1;
    }
    let mut start = 0;
    for next in &mut next {
        start += mem::replace(next, start);
    }
    let to = &mut to[..from.len()];
    for &pair in from {
        let next = &mut next[digit(pair.row, shift)];
        to[*next as usize] = pair;
        *next += 1;
    }
}

#[cfg(test)]
mod tests;
