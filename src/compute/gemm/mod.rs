//! Matrix products whose every element is the same to the bit whatever the batch.
//!
//! `C = A B`, where `B` was packed into panels of [`LANES`] columns. One element of `C` is one
//! chain of multiply-adds over the depth, from the first to the last, in one accumulator: it
//! depends on its row of `A`, its column of `B` and nothing else, so neither the number of rows
//! nor the number of threads nor the height of a tile can change a bit of it
//! Libraries choose their kernels by the shape and give no such promise.
//!
//! A tile of `MR` rows and one panel, or half of one, is held in registers. With AVX-512 that is 12 rows of two
//! registers: 24 chains hide the latency of the two multiply-add ports, and each step of the depth
//! costs two loads of `B` and twelve broadcasts of `A`. AVX2 has half as many registers of half the length: 6 rows of two.
//! `A` is never packed: it is read by broadcast, where strides cost nothing as long as rows do not share a cache set, which
//! [`row_stride`] sees to. AVX2 computes the same chains, so the bits are equal; without fused
//! multiply-add a product is rounded before it is added, so they are not.

mod kernel;
#[cfg(test)]
mod tests;
mod transpose;

use super::Real;

pub(crate) use crate::compute::gemm::kernel::{product_f32, product_portable};
pub(crate) use crate::compute::gemm::transpose::pack_transposed;
pub(crate) use crate::compute::gemm::transpose::{Block, transpose_f32, transpose_portable};

/// Columns of a packed panel.
pub(crate) const LANES: usize = 32;

/// Elements of a packed matrix of `depth` rows and `columns` columns.
#[must_use]
pub(crate) fn packed_len(depth: usize, columns: usize) -> usize {
    columns.div_ceil(LANES) * LANES * depth
}

/// The stride for a matrix of `columns` columns: whole vectors, and an odd number of them, so that
/// the same column of neighbouring rows falls into different cache sets.
#[must_use]
pub(crate) fn row_stride(columns: usize) -> usize {
    (columns.div_ceil(16) | 1) * 16
}

/// What a tile's accumulators start from.
#[derive(Clone, Copy)]
pub enum Start<'a, T> {
    /// Zero.
    Zero,
    /// One value a column, at least as many as `C` has columns, padded to whole panels.
    Bias(&'a [T]),
    /// What `C` holds.
    Add,
}

/// A left operand: element `(row, step)` lies at `row * row_stride + step * step_stride`.
#[derive(Clone, Copy)]
pub struct Left<'a, T> {
    /// The elements.
    pub data: &'a [T],
    /// From one row of `C` to the next.
    pub row_stride: usize,
    /// From one step of the depth to the next.
    pub step_stride: usize,
}

/// A result: element `(row, column)` lies at `row * stride + column`.
pub struct Output<'a, T> {
    /// The elements.
    pub data: &'a mut [T],
    /// From one row to the next.
    pub stride: usize,
}

/// `C = start + A B`, and then negatives to zero when `relu`. A NaN stays one, so that a loss shows it.
pub struct Product<'a, T> {
    /// Rows of `A` and `C`.
    pub rows: usize,
    /// Columns of `A`, rows of `B`.
    pub depth: usize,
    /// Columns of `B` and `C`.
    pub columns: usize,
    /// `A`.
    pub left: Left<'a, T>,
    /// `B` in panels: `ceil(columns / LANES)` of them, each `depth x LANES`.
    pub panels: &'a [T],
    /// What is added to.
    pub start: Start<'a, T>,
    /// Whether negative results become zero.
    pub relu: bool,
    /// `C`.
    pub output: Output<'a, T>,
}

impl<T: Real> Product<'_, T> {
    /// Computes it.
    ///
    /// # Panics
    /// When a slice is too short for the shape, or rows of the result overlap.
    pub(crate) fn run(&mut self) {
        T::product(self);
    }

    /// Whether there is anything to compute; and then every element that the shape names lies inside
    /// its slice, for the kernels read and write without bounds checks. All offsets grow with row,
    /// step and column, so the last one stands for all.
    fn check(&self) -> bool {
        let Self { rows, depth, columns, .. } = *self;
        if rows == 0 || columns == 0 {
            return false;
        }
        let last = |last_row: usize, stride: usize, rest: Option<usize>| {
            last_row.checked_mul(stride).and_then(|at| at.checked_add(rest?))
        };
        if depth > 0 {
            let step = (depth - 1).checked_mul(self.left.step_stride);
            let end = last(rows - 1, self.left.row_stride, step);
            assert!(end.is_some_and(|end| end < self.left.data.len()), "left operand: too short");
        }
        let padded = columns.checked_next_multiple_of(LANES);
        let packed = padded.and_then(|columns| columns.checked_mul(depth));
        assert!(packed.is_some_and(|packed| packed <= self.panels.len()), "panels: too short");
        assert!(columns <= self.output.stride || rows == 1, "output: rows overlap");
        let end = last(rows - 1, self.output.stride, Some(columns - 1));
        assert!(end.is_some_and(|end| end < self.output.data.len()), "output: too short");
        if let Start::Bias(bias) = self.start {
            assert!(padded.is_some_and(|padded| padded <= bias.len()), "bias: too short");
        }
        true
    }
}

/// Writes `rows x columns` of row-major `matrix` into panels: the right operand of `X matrix`.
/// Lanes past the last column are zero.
///
/// # Panics
/// When a slice is too short for the shape.
pub(crate) fn pack<T: Real>(matrix: &[T], stride: usize, rows: usize, columns: usize, panels: &mut [T]) {
    for (p, panel) in panels.chunks_exact_mut((rows * LANES).max(1)).enumerate() {
        let first = p * LANES;
        let width = columns.saturating_sub(first).min(LANES);
        for (row, lanes) in panel.chunks_exact_mut(LANES).enumerate() {
            lanes[..width].copy_from_slice(&matrix[row * stride + first..][..width]);
            lanes[width..].fill(T::default());
        }
    }
}

/// Turns the panels of a `rows x columns` matrix into panel `p` of its transpose: the rows
/// `p * LANES..` of the matrix, as columns.
///
/// # Panics
/// When a slice is too short for the shape.
pub(crate) fn pack_transposed_panel<T: Real>(
    panels: &[T],
    rows: usize,
    columns: usize,
    p: usize,
    out: &mut [T],
) {
    let first = p * LANES;
    let width = rows.saturating_sub(first).min(LANES);
    for (q, block) in out.chunks_mut(LANES * LANES).enumerate() {
        // `block` is (up to 32 columns of the matrix) x (32 of its rows).
        let source = &panels[q * rows * LANES + first * LANES..][..width * LANES];
        pack_transposed(source, LANES, width, (columns - q * LANES).min(LANES), block);
    }
}
