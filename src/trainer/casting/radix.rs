//! Sorts the pairs of a table by row, digit by digit: a radix sort from the least digit on.
//!
//! Pairs come in the order of their occurrences, and a pass by one digit keeps the order of those whose digit is the
//! same. So sorting by the row alone leaves a row's pairs in batch order: what sorting by both would give. A pass
//! reads the pairs twice and writes them once, whatever their order, where comparing costs a branch that is guessed
//! wrong every other time. Only digits in which rows differ get a pass: rows below 4 Mi need two at most.

use std::mem;

/// A row of a table, and which of the occurrences in the batch it is.
pub type Pair = (u64, u32);

/// Bits of a digit. The counts of one stay in the L1 cache.
const DIGIT_BITS: u32 = 11;
const DIGITS: usize = 1 << DIGIT_BITS;

/// Pairs a pass below which comparing is faster: to clear and add up a pass's counts takes as long as to sort so many.
const FEW: usize = 200;

/// The sort's other buffer, to be used again.
#[derive(Clone, Debug, Default)]
pub struct RadixSort {
    spare: Vec<Pair>,
}

impl RadixSort {
    /// Sorts pairs whose occurrences ascend.
    pub fn sort(&mut self, pairs: &mut Vec<Pair>) {
        let shifts = differing(pairs);
        if pairs.len() < FEW * shifts.clone().count() {
            pairs.sort_unstable();
            return;
        }
        self.spare.resize(pairs.len(), (0, 0));
        for shift in shifts {
            pass(pairs, &mut self.spare, shift);
            mem::swap(pairs, &mut self.spare);
        }
    }
}

/// Where the digits begin in which not all rows are the same, from the least on.
fn differing(pairs: &[Pair]) -> impl Iterator<Item = u32> + Clone + use<> {
    let (any, all) = pairs.iter().fold((0, u64::MAX), |(any, all), &(row, _)| (any | row, all & row));
    let bits = any & !all;
    (0..u64::BITS).step_by(DIGIT_BITS as usize).filter(move |&shift| digit(bits, shift) != 0)
}

#[inline(always)]
fn digit(row: u64, shift: u32) -> usize {
    (row >> shift) as usize % DIGITS
}

/// From one buffer to the other, by the digit that begins at `shift`; what has the same stays in order.
fn pass(from: &[Pair], to: &mut [Pair], shift: u32) {
    // An array of its own, and a slice of the length that is read: so the loops check no bound but the last one.
    let mut next = [0u32; DIGITS];
    for &(row, _) in from {
        next[digit(row, shift)] += 1;
    }
    let mut start = 0;
    for next in &mut next {
        start += mem::replace(next, start);
    }
    let to = &mut to[..from.len()];
    for &pair in from {
        let next = &mut next[digit(pair.0, shift)];
        to[*next as usize] = pair;
        *next += 1;
    }
}

#[cfg(test)]
mod tests;
