//! How the elements of a row are stored. The bytes of a row are the same in the store and in the cache.
//!
//! ```text
//! f32    dim x f32
//! f16    dim x f16 (IEEE binary16), padded with zeros to a multiple of 4 bytes
//! int8   dim x u8, padded with zeros to a multiple of 4 bytes, then scale f32, then bias f32
//! ```
//!
//! All numbers are little-endian. A row has a multiple of [`ROW_ALIGN`] bytes and is aligned to it, so that a
//! device can copy it, and read its scale, in whole words.
//!
//! int8 is the row-wise quantisation scheme of FBGEMM (Khudia et al., "FBGEMM: Enabling High-Performance
//! Low-Precision Deep Learning Inference", 2021): the bias is the least element of the row, the scale is
//! (greatest - least) / 255, and an element is the nearest of the 256 steps. Its value is `q * scale + bias`.
//! The product is rounded before the sum: two f32 operations on every device, never a fused one, so that each
//! gives the same bits. A row of equal elements has scale 0 and reads back exactly (except that -0 becomes
//! 0).
//!
//! The bytes can differ from FBGEMM's. Here the range, the scale and the steps are computed in f64 and
//! rounded once, ties to even. FBGEMM computes them in f32, and a step as `(x - bias) * (255 / (range +
//! 1e-8))`. So the scale can differ by one unit in the last place and a step by 1 (or more, if the range is
//! near 1e-8). FBGEMM also does not pad the steps to 4 bytes.
//!
//! Rows are encoded once, when a version is written. Encoding refuses an element that is not finite, or that
//! would not be finite after decoding.

use half::f16;
use serde::{Deserialize, Serialize};

use super::named;

/// The size and alignment of rows are multiples of this.
pub(crate) const ROW_ALIGN: usize = 4;

/// Bytes of the scale and the bias at the end of an int8 row.
const INT8_TAIL: usize = 8;

/// Steps from the least element of an int8 row to the greatest.
const INT8_STEPS: f64 = 255.0;

/// The type of the elements of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Element {
    /// IEEE binary32.
    #[default]
    F32,
    /// IEEE binary16.
    F16,
    /// One byte per element, with a scale and a bias per row: `q * scale + bias`.
    Int8,
}

/// Why a row cannot be stored in an element type.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // the messages document the variants
pub enum RowError {
    #[error("element {element}: expected a finite number, got {got}")]
    NotFinite { element: usize, got: f32 },
    #[error("element {element}: {got} is larger in magnitude than {}, the largest f16", f16::MAX)]
    PastF16 { element: usize, got: f32 },
    #[error("elements from {least} to {greatest}: too far apart for the f32 scale of int8")]
    PastInt8 { least: f32, greatest: f32 },
}

/// No type of element has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown element type {0:?}, expected {names}", names = Element::names())]
pub struct UnknownElement(pub String);

impl Element {
    /// The number that kernels use for the type.
    #[must_use]
    pub(crate) fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Int8 => 2,
        }
    }

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

    /// Encodes a row into `out`, which has [`Self::row_bytes`] bytes.
    ///
    /// # Errors
    /// [`RowError`] for a row that this type cannot hold; `out` is then undefined.
    ///
    /// # Panics
    /// When `out` has another length.
    pub(crate) fn encode(self, row: &[f32], out: &mut [u8]) -> Result<(), RowError> {
        assert_eq!(out.len(), self.row_bytes(row.len()), "bytes for the row");
        if let Some(element) = row.iter().position(|x| !x.is_finite()) {
            return Err(RowError::NotFinite { element, got: row[element] });
        }
        out.fill(0);
        match self {
            Self::F32 => out.as_chunks_mut().0.iter_mut().zip(row).for_each(|(to, x)| *to = x.to_le_bytes()),
            Self::F16 => {
                for (element, (to, &got)) in out.as_chunks_mut().0.iter_mut().zip(row).enumerate() {
                    // To nearest, ties to even.
                    let near = f16::from_f32(got);
                    if near.is_infinite() {
                        return Err(RowError::PastF16 { element, got });
                    }
                    *to = near.to_le_bytes();
                }
            }
            Self::Int8 => encode_int8(row, out)?,
        }
        Ok(())
    }

    /// Decodes a row into `out`.
    ///
    /// # Panics
    /// When `row` has another number of elements than `out`.
    pub(crate) fn decode(self, row: &[u8], out: &mut [f32]) {
        assert_eq!(row.len(), self.row_bytes(out.len()), "bytes of the row");
        match self {
            Self::F32 => out.iter_mut().zip(f32_values(row)).for_each(|(to, x)| *to = x),
            Self::F16 => out.iter_mut().zip(f16_values(row)).for_each(|(to, x)| *to = x),
            Self::Int8 => out.iter_mut().zip(int8_values(row)).for_each(|(to, x)| *to = x),
        }
    }
}

named! { Element: F32 = "f32", F16 = "f16", Int8 = "int8"; UnknownElement = UnknownElement }

fn encode_int8(row: &[f32], out: &mut [u8]) -> Result<(), RowError> {
    let least = row.iter().copied().reduce(f32::min).unwrap_or(0.0);
    let greatest = row.iter().copied().reduce(f32::max).unwrap_or(0.0);
    // In f64 the difference cannot overflow, and the step is rounded only once.
    let (scale, bias) = (((f64::from(greatest) - f64::from(least)) / INT8_STEPS) as f32, least);
    if !(INT8_STEPS as f32 * scale + bias).is_finite() {
        return Err(RowError::PastInt8 { least, greatest });
    }
    let tail = out.len() - INT8_TAIL;
    let (steps, tail) = out.split_at_mut(tail);
    for (to, &x) in steps.iter_mut().zip(row) {
        let step = (f64::from(x) - f64::from(bias)) / f64::from(scale);
        // If the scale is 0, because all elements are (almost) equal, `step` is NaN or infinite.
        *to = if scale > 0.0 { step.round_ties_even().clamp(0.0, INT8_STEPS) as u8 } else { 0 };
    }
    tail[..4].copy_from_slice(&scale.to_le_bytes());
    tail[4..].copy_from_slice(&bias.to_le_bytes());
    Ok(())
}

/// The elements of an f32 row.
#[inline(always)]
pub(crate) fn f32_values(row: &[u8]) -> impl Iterator<Item = f32> {
    row.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes))
}

/// The elements of an f16 row, and of its padding.
#[inline(always)]
pub(crate) fn f16_values(row: &[u8]) -> impl Iterator<Item = f32> {
    row.as_chunks().0.iter().map(|bytes| f16_to_f32(u16::from_le_bytes(*bytes)))
}

/// The elements of an int8 row, and of its padding.
#[inline(always)]
pub(crate) fn int8_values(row: &[u8]) -> impl Iterator<Item = f32> {
    let (steps, [scale, bias]) = int8_parts(row);
    steps.iter().map(move |&q| f32::from(q) * scale + bias)
}

/// The steps of an int8 row with their padding, and its scale and bias.
#[inline(always)]
pub(crate) fn int8_parts(row: &[u8]) -> (&[u8], [f32; 2]) {
    match row.split_last_chunk::<INT8_TAIL>() {
        Some((steps, &[s0, s1, s2, s3, b0, b1, b2, b3])) => {
            (steps, [f32::from_le_bytes([s0, s1, s2, s3]), f32::from_le_bytes([b0, b1, b2, b3])])
        }
        None => (&[], [0.0; 2]),
    }
}

/// The exact value of an IEEE binary16. A signalling NaN becomes quiet, as in hardware. The code has no
/// branches, so that loops over it are vectorised.
#[inline(always)]
#[must_use]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    const EXPONENT: u32 = 0x1f << 23;
    const REBIAS: u32 = (127 - 15) << 23;
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff) << (23 - 10);
    let exponent = magnitude & EXPONENT;
    // The bits of a subnormal count steps of 2^-24: add a leading one, then subtract it again.
    let least = f32::from_bits(REBIAS + (1 << 23));
    let subnormal = (f32::from_bits(magnitude + REBIAS + (1 << 23)) - least).to_bits();
    let quiet = if magnitude & 0x007f_ffff == 0 { 0 } else { 1 << 22 };
    let special = (magnitude + 2 * REBIAS) | quiet;
    let value = match exponent {
        0 => subnormal,
        EXPONENT => special,
        _ => magnitude + REBIAS,
    };
    f32::from_bits(value | sign)
}

#[cfg(test)]
mod tests;
