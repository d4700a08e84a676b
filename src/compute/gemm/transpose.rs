//! Packs a transpose: rows of a matrix become lanes of panels.
//!
//! An element-by-element copy scatters small writes over the panels, and the next reader of the panels waits
//! for those writes. So blocks of 16 by 16 elements are transposed in registers instead.

#![allow(unsafe_code)]

use crate::compute::Real;
use crate::compute::gemm::{LANES, Matrix};

/// Rows and columns of a block.
const BLOCK: usize = 16;

/// Packs the transpose of a matrix into panels, as the right operand of a product. Lanes after the matrix's
/// last row are zero.
///
/// # Panics
/// When a slice is too short for the shape.
pub(crate) fn pack_transposed<T: Real>(matrix: Matrix<'_, T>, panels: &mut [T]) {
    let Matrix { data, stride, rows, columns } = matrix;
    if rows == 0 || columns == 0 {
        return;
    }
    let end = (rows - 1).checked_mul(stride).and_then(|at| at.checked_add(columns));
    assert!(end.is_some_and(|end| end <= data.len()), "matrix: too short");
    let packed = rows.checked_next_multiple_of(LANES).and_then(|lanes| lanes.checked_mul(columns));
    assert!(packed.is_some_and(|packed| packed <= panels.len()), "panels: too short");
    for (p, panel) in panels.chunks_exact_mut(columns * LANES).take(rows.div_ceil(LANES)).enumerate() {
        for half in (0..LANES).step_by(BLOCK) {
            let first = p * LANES + half;
            let height = rows.saturating_sub(first).min(BLOCK);
            for column in (0..columns).step_by(BLOCK) {
                let block = Block {
                    // After the last row there are no elements.
                    from: if height > 0 { &data[first * stride + column..] } else { &[] },
                    stride,
                    height,
                    width: (columns - column).min(BLOCK),
                };
                T::transpose(&block, &mut panel[column * LANES + half..]);
            }
        }
    }
}

/// A block of at most 16 rows and 16 columns. Each column becomes 16 lanes of a line of the panel; lines are
/// [`LANES`] apart. Lanes after the last row are zero.
pub struct Block<'a, T> {
    from: &'a [T],
    stride: usize,
    height: usize,
    width: usize,
}

/// Transposes a block element by element.
///
/// # Panics
/// When a slice is too short for the block.
pub(crate) fn transpose_portable<T: Real>(block: &Block<'_, T>, to: &mut [T]) {
    for column in 0..block.width {
        let line = &mut to[column * LANES..][..BLOCK];
        for (row, lane) in line.iter_mut().enumerate() {
            *lane = if row < block.height { block.from[row * block.stride + column] } else { T::default() };
        }
    }
}

/// Transposes a block, in registers if the processor has AVX-512.
///
/// # Panics
/// As [`transpose_portable`].
pub(crate) fn transpose_f32(block: &Block<'_, f32>, to: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        let Block { from, stride, height, width } = *block;
        if height == 0 || width == 0 {
            return transpose_portable(block, to);
        }
        assert!(height <= BLOCK && width <= BLOCK, "block: too large");
        let end = (height - 1).checked_mul(stride).and_then(|at| at.checked_add(width));
        assert!(end.is_some_and(|end| end <= from.len()), "matrix: too short");
        assert!((width - 1) * LANES + BLOCK <= to.len(), "panels: too short");
        // SAFETY: the processor has AVX-512F, and the size of the block and the lengths of both slices were
        // just checked.
        return unsafe { transpose_avx512(block, to) };
    }
    transpose_portable(block, to);
}

/// Transposes 16 by 16 elements in four rounds of 16 shuffles. The first round moves elements, the second
/// pairs of elements, and the last two quarters of registers.
///
/// # Safety
/// The processor has AVX-512F. `from` has `height` rows of `width` elements, and `to` has `width` lines of 16
/// lanes; both are at most 16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[allow(clippy::needless_range_loop)]
unsafe fn transpose_avx512(block: &Block<'_, f32>, to: &mut [f32]) {
    use std::arch::x86_64::*;
    let columns = ((1_u32 << block.width) - 1) as u16;
    let mut rows = [_mm512_setzero_ps(); BLOCK];
    for r in 0..block.height {
        // SAFETY: masked lanes are not read, and the caller guarantees the others.
        rows[r] = unsafe { _mm512_maskz_loadu_ps(columns, block.from.as_ptr().add(r * block.stride)) };
    }
    let mut next = rows;
    for i in 0..8 {
        next[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
        next[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
    }
    // Now register 2i + h has, in each quarter q, columns 4q + 2h and 4q + 2h + 1 of rows 2i and 2i + 1.
    for i in 0..4 {
        for h in 0..2 {
            let (a, b) = (_mm512_castps_pd(next[4 * i + h]), _mm512_castps_pd(next[4 * i + 2 + h]));
            rows[4 * i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            rows[4 * i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
    // Now register 4i + j has, in each quarter q, column 4q + j of rows 4i to 4i + 3.
    for j in 0..4 {
        let low = |a, b| _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
        let high = |a, b| _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
        // `even` has quarters 0 and 2, and `odd` has quarters 1 and 3. Index 0 is for rows 0 to 7, index 1
        // for rows 8 to 15.
        let even = [low(rows[j], rows[4 + j]), low(rows[8 + j], rows[12 + j])];
        let odd = [high(rows[j], rows[4 + j]), high(rows[8 + j], rows[12 + j])];
        next[j] = low(even[0], even[1]);
        next[4 + j] = low(odd[0], odd[1]);
        next[8 + j] = high(even[0], even[1]);
        next[12 + j] = high(odd[0], odd[1]);
    }
    for column in 0..block.width {
        // SAFETY: the caller guarantees that `to` has `width` lines of 16 lanes.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr().add(column * LANES), next[column]) };
    }
}
