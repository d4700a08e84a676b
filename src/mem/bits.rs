//! The set bits of a word.

use std::iter::successors;

/// The positions of the set bits, ascending.
pub(crate) fn set_bits(word: u64) -> impl Iterator<Item = u64> {
    // Each step clears the lowest set bit.
    let rest = successors(Some(word), |bits| Some(bits & bits.wrapping_sub(1)));
    rest.take_while(|&bits| bits != 0).map(|bits| u64::from(bits.trailing_zeros()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_set_bits_of_a_word_are_its_bits_that_are_one_ascending() {
        for word in [0, 1, 1 << 63, u64::MAX, 0x8000_1234_0000_0001] {
            let expected = (0..u64::from(u64::BITS)).filter(|bit| word >> bit & 1 == 1);
            assert!(set_bits(word).eq(expected), "{word:#x}");
        }
    }
}
