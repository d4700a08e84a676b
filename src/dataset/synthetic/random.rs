//! Random numbers as pure functions of what they are for, so that a sample does not depend on
//! which samples were drawn before it. The mixer is the finaliser of SplitMix64 (Steele, Lea and
//! Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

use crate::mem::{SplitMix64, finalize64 as mix};

/// The words of one purpose and place, by their numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream(u64);

impl Stream {
    pub(crate) fn new(seed: u64, purpose: Purpose, place: u64) -> Self {
        Self(mix(mix(seed ^ mix(purpose as u64)).wrapping_add(mix(place))))
    }

    pub(crate) fn word(self, number: u64) -> u64 {
        mix(self.0.wrapping_add(mix(number)))
    }

    /// A sequence of words that belongs to one number.
    pub(crate) fn words(self, number: u64) -> SplitMix64 {
        SplitMix64::new(self.word(number))
    }
}

/// What a word is for; equal numbers of different purposes have nothing to do with each other.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    Ids = 1,
    Dense,
    Label,
    IdWeight,
    DenseWeight,
    Permutation,
    Text,
}

/// A number in `[0, 1)`.
pub(crate) fn unit(word: u64) -> f64 {
    (word >> 11) as f64 / (1u64 << 53) as f64
}

/// A number of mean 0 and variance 1, bounded by 3.5: the sum of four 16-bit uniforms.
pub(crate) fn bell(word: u64) -> f64 {
    let sum = (0..4).map(|i| (word >> (16 * i)) & 0xffff).sum::<u64>() as f64;
    // A uniform of 0..=65535 has mean 32767.5 and variance (65536^2 - 1) / 12.
    (sum - 4.0 * 32_767.5) / (65_536.0 / 3f64.sqrt())
}
