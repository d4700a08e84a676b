//! How a row's elements are stored: the bytes of a row, the same in store and cache.
//!
//! ```text
//! f32    dim x f32
//! f16    dim x f16 (IEEE binary16), padded with zeros to a multiple of 4 bytes
//! int8   dim x u8, padded with zeros to a multiple of 4 bytes, then scale f32, then bias f32
//! ```
//!
//! All of it is little-endian. A row is a multiple of [`ROW_ALIGN`] bytes and begins on one, so that a
//! device reads its scale, and copies it, a word at a time.

/// Rows are a multiple of so many bytes, and begin on one.
pub const ROW_ALIGN: usize = 4;

/// Bytes of scale and bias at the end of an int8 row.
const INT8_TAIL: usize = 8;

/// The type of a row's elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE binary32.
    #[default]
    F32,
    /// IEEE binary16.
    F16,
    /// One byte an element, with a scale and a bias a row: `q * scale + bias`.
    Int8,
}

impl Element {
    /// Bytes of a row of `dim` elements.
    #[must_use]
    #[inline(always)]
    pub fn row_bytes(self, dim: usize) -> usize {
        match self {
            Self::F32 => dim * size_of::<f32>(),
            Self::F16 => (dim * size_of::<u16>()).next_multiple_of(ROW_ALIGN),
            Self::Int8 => dim.next_multiple_of(ROW_ALIGN) + INT8_TAIL,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_whole_words_and_no_longer_than_they_must_be() {
        for dim in 1..300 {
            for (element, exact) in
                [(Element::F32, 4 * dim), (Element::F16, 2 * dim), (Element::Int8, dim + 8)]
            {
                let bytes = element.row_bytes(dim);
                assert_eq!(bytes % ROW_ALIGN, 0, "{element:?}");
                assert!((exact..exact + ROW_ALIGN).contains(&bytes), "{element:?} of {dim}: {bytes}");
            }
        }
    }
}
