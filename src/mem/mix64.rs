//! Hashing of numbers.

/// Scatters a number over 64 bits: the finaliser of SplitMix64, a bijection in which every input bit
/// reaches every output bit.
#[inline]
#[must_use]
pub fn mix64(number: u64) -> u64 {
    let mut x = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// A number hashed into so many bits, 0 to 64: the high ones of [`mix64`].
#[inline]
#[must_use]
pub fn fold(number: u64, bits: u32) -> u64 {
    mix64(number).checked_shr(u64::BITS - bits).unwrap_or(0)
}
