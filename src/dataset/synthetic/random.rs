//! Random numbers as pure functions of their purpose and position, so that a sample does not depend on the
//! samples before it. The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
//! number generators", OOPSLA 2014).

use crate::mem::{SplitMix64, finalize64 as mix};

/// Random 64-bit words of one purpose and one place (a feature or a table). Each word has a number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream(u64);

impl Stream {
    pub(crate) fn new(seed: u64, purpose: Purpose, place: u64) -> Self {
        Self(mix(mix(seed ^ mix(purpose as u64)).wrapping_add(mix(place))))
    }

    pub(crate) fn word(self, number: u64) -> u64 {
        mix(self.0.wrapping_add(mix(number)))
    }

    /// A sequence of words for one number, where one word is not enough.
    pub(crate) fn words(self, number: u64) -> SplitMix64 {
        SplitMix64::new(self.word(number))
    }
}

/// What words are used for. Words of different purposes are independent.
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

/// A random word as a number of mean 0, variance 1 and magnitude below 3.5: the scaled sum of four uniform
/// 16-bit numbers.
pub(crate) fn bell(word: u64) -> f64 {
    let sum = (0..4).map(|i| (word >> (16 * i)) & 0xffff).sum::<u64>() as f64;
    // A uniform number of 0..=65535 has mean 32767.5 and variance (65536^2 - 1) / 12.
    (sum - 4.0 * 32_767.5) / (65_536.0 / 3f64.sqrt())
}
