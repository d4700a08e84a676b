//! Finds a row that is not finite while the bytes of its file pass by for the checksum.
//!
//! Our writers refuse such rows, but other programs write versions too. Every request that reads such a row
//! would be refused as if its own values were wrong. A first check of many rows at once costs little beside
//! the checksum, and may suspect a good row. Then each row is decoded.

use std::path::Path;

use rayon::prelude::*;

use super::StoreError;
use super::format::{WEIGHT, parse_header};
use super::record::RowFormat;
use super::table::BadRow;
use crate::pace::give_way;
use crate::types::element::int8_parts;
use crate::types::{Element, RowError};

/// The exponent bits of an f32 and of an f16. Only numbers that are not finite have all of them.
const F32_EXPONENT: u32 = 0x7f80_0000;
const F16_EXPONENT: u16 = 0x7c00;

/// Values that one thread checks at a time.
const CHECKED: usize = 1 << 16;

/// Whether all of these values are finite.
pub(crate) fn all_finite(values: &[f32]) -> bool {
    values.par_chunks(CHECKED).all(|values| {
        give_way();
        values.iter().fold(0, |most, value| most.max(value.to_bits() & F32_EXPONENT)) != F32_EXPONENT
    })
}

/// The error for a tensor from which training could not continue.
pub(super) fn not_finite(path: &Path, name: &str) -> StoreError {
    StoreError::Tensor {
        path: path.to_owned(),
        tensor: name.to_owned(),
        expected: "finite values".to_owned(),
        got: "NaN or infinity".to_owned(),
    }
}

/// Checks the rows of a file. It gets the bytes of the whole file in pieces.
pub(crate) struct RowCheck {
    format: RowFormat,
    /// Bytes before the first row, and bytes of rows, that have not passed.
    before: u64,
    left: u64,
    /// The first bytes of a row whose other bytes have not passed.
    part: Vec<u8>,
    /// Rows that have passed.
    rows: u64,
    bad: Option<BadRow>,
}

impl RowCheck {
    /// For the rows of a table's file; `None` if it has none. Its header need not
    /// be intact.
    pub(crate) fn of_file(file: &[u8], format: RowFormat) -> Option<Self> {
        let tensors = parse_header(file).ok()?;
        let weight = tensors.into_iter().find(|tensor| tensor.name == WEIGHT)?;
        let (before, left) = (weight.begin, weight.end - weight.begin);
        Some(Self { format, before, left, part: Vec::new(), rows: 0, bad: None })
    }

    /// The next bytes of the file.
    pub(crate) fn feed(&mut self, piece: &[u8]) {
        let piece = &piece[take(&mut self.before, piece.len())..];
        let mut piece = &piece[..take(&mut self.left, piece.len())];
        let row_bytes = self.format.row_bytes().max(1);
        if !self.part.is_empty() {
            let (now, later) = piece.split_at(piece.len().min(row_bytes - self.part.len()));
            self.part.extend_from_slice(now);
            piece = later;
            if self.part.len() < row_bytes {
                return;
            }
            let whole = std::mem::take(&mut self.part);
            self.check(&whole, row_bytes);
        }
        let (whole, part) = piece.split_at(piece.len() - piece.len() % row_bytes);
        self.check(whole, row_bytes);
        self.part.extend_from_slice(part);
    }

    /// The first row that is not finite, by its position in the file.
    pub(crate) fn bad(self) -> Option<BadRow> {
        self.bad
    }

    fn check(&mut self, rows: &[u8], row_bytes: usize) {
        if self.bad.is_none() && self.suspects(rows, row_bytes) {
            let mut values = vec![0.0; self.format.dim];
            self.bad = (self.rows..).zip(rows.chunks_exact(row_bytes)).find_map(|(row, bytes)| {
                self.format.element.decode(bytes, &mut values);
                let element = values.iter().position(|value| !value.is_finite())?;
                Some(BadRow { row, reason: RowError::NotFinite { element, got: values[element] } })
            });
        }
        self.rows += (rows.len() / row_bytes) as u64;
    }

    /// Whether some of these rows may not be finite. The loops are vectorised.
    fn suspects(&self, rows: &[u8], row_bytes: usize) -> bool {
        match self.format.element {
            Element::F32 => {
                let bits = rows.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
                bits.fold(0, |most, bits| most.max(bits & F32_EXPONENT)) == F32_EXPONENT
            }
            Element::F16 => {
                let bits = rows.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes));
                bits.fold(0, |most, bits| most.max(bits & F16_EXPONENT)) == F16_EXPONENT
            }
            Element::Int8 => rows.chunks_exact(row_bytes).any(|row| {
                let (_, [scale, bias]) = int8_parts(row);
                !(f32::from(u8::MAX) * scale + bias).is_finite()
            }),
        }
    }
}

/// Takes up to `most` from a count.
fn take(count: &mut u64, most: usize) -> usize {
    let taken = (*count).min(most as u64);
    *count -= taken;
    taken as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check of `rows` rows of zeros, of which the last element of `bad` has been changed, fed in pieces
    /// of `piece` bytes with 7 bytes before the rows and 5 after them.
    fn checked(element: Element, bad: Option<(usize, f32)>, piece: usize) -> Option<(u64, usize)> {
        let (dim, rows) = (3, 50);
        let row_bytes = element.row_bytes(dim);
        let mut file = vec![0xff; 7];
        for row in 0..rows {
            let mut bytes = vec![0; row_bytes];
            element.encode(&[1.0, 2.0, 3.0], &mut bytes).unwrap();
            if let Some((_, value)) = bad.filter(|(bad, _)| *bad == row) {
                match element {
                    Element::F32 => bytes[8..].copy_from_slice(&value.to_le_bytes()),
                    Element::F16 => bytes[4..6].copy_from_slice(&half::f16::from_f32(value).to_le_bytes()),
                    Element::Int8 => bytes[row_bytes - 4..].copy_from_slice(&value.to_le_bytes()),
                }
            } else if element == Element::F16 {
                bytes[6..].fill(0xff);
            }
            file.extend(bytes);
        }
        file.extend([0xff; 5]);
        let left = (rows * row_bytes) as u64;
        let mut check = RowCheck {
            format: RowFormat { element, dim },
            before: 7,
            left,
            part: Vec::new(),
            rows: 0,
            bad: None,
        };
        file.chunks(piece).for_each(|piece| check.feed(piece));
        check.bad().map(|BadRow { row, reason }| match reason {
            RowError::NotFinite { element, .. } => (row, element),
            other => panic!("{other}"),
        })
    }

    #[test]
    fn the_first_row_that_is_not_finite_is_found_whatever_the_pieces() {
        for element in [Element::F32, Element::F16, Element::Int8] {
            for piece in [1, 5, 12, 64, 10_000] {
                assert_eq!(checked(element, None, piece), None, "{element:?}, {piece}");
                for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    // A bias is for all elements of its row.
                    let at = if element == Element::Int8 { 0 } else { 2 };
                    for row in [0, 17, 49] {
                        let found = checked(element, Some((row, value)), piece);
                        assert_eq!(found, Some((row as u64, at)), "{element:?}, {piece}, {value}");
                    }
                }
            }
        }
    }
}
