//! Hashing of numbers and pseudo-random sequences: SplitMix64 (Steele, Lea and Flood, "Fast splittable
//! pseudorandom number generators", OOPSLA 2014).

/// The step of SplitMix64's state: 2^64 over the golden ratio.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// A random word as a number in `[0, 1)`. Its 2^53 values are exact in f64.
#[inline]
#[must_use]
pub(crate) fn unit(word: u64) -> f64 {
    (word >> 11) as f64 / (1u64 << 53) as f64
}

/// Hashes a number to 64 bits: the first output of [`SplitMix64`] with this seed. It is a bijection, and
/// every input bit affects every output bit.
#[inline]
#[must_use]
pub(crate) fn mix64(number: u64) -> u64 {
    finalize64(number.wrapping_add(GOLDEN))
}

/// SplitMix64's finaliser: [`mix64`] without the step of the state. It maps 0 to 0.
#[inline]
#[must_use]
pub(crate) fn finalize64(number: u64) -> u64 {
    let mut x = number;
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// A number hashed to `bits` bits, 0 to 64: the high bits of [`mix64`].
#[inline]
#[must_use]
pub(crate) fn fold(number: u64, bits: u32) -> u64 {
    mix64(number).checked_shr(u64::BITS - bits).unwrap_or(0)
}

/// A pseudo-random sequence: the same seed gives the same numbers.
#[derive(Clone, Debug, Default)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// The sequence of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next 64 bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        let number = mix64(self.state);
        self.state = self.state.wrapping_add(GOLDEN);
        number
    }
}

#[cfg(test)]
mod tests;
