//! Matrix products that give the same bits for every batch size and thread count.
//!
//! `C = A B`, where `B` is packed into panels of [`LANES`] columns. An element of `C` is one chain of
//! multiply-adds over the depth, in order, in one accumulator. It depends only on its row of `A` and its
//! column of `B`. The number of rows, the number of threads and the height of a tile do not change it.
//! Libraries do not guarantee this: they choose their kernels by the shape.
//!
//! A tile of `MR` rows and one panel, or half of a panel, is held in registers. With AVX-512 a tile is 12
//! rows of two registers: 24 chains hide the latency of the two multiply-add ports, and a step of the depth
//! needs two loads of `B` and twelve broadcasts of `A`. AVX2 has half as many registers of half the length,
//! so a tile is 6 rows of two registers. `A` is not packed: it is read by broadcast, and strides cost nothing
//! as long as rows fall into different cache sets, which [`row_stride`] ensures. AVX-512 and AVX2 give the
//! same bits. Without fused multiply-add the product is rounded before the sum, so the bits differ.

mod kernel;
#[cfg(test)]
mod tests;
mod transpose;

use super::Real;

pub(crate) use crate::compute::gemm::kernel::{product_f32, product_portable};
pub(crate) use crate::compute::gemm::transpose::{Block, pack_transposed, transpose_f32, transpose_portable};

/// Columns of a panel.
pub(crate) const LANES: usize = 32;

/// Elements of a matrix of `depth` rows and `columns` columns after packing.
#[must_use]
pub(crate) fn packed_len(depth: usize, columns: usize) -> usize {
    columns.div_ceil(LANES) * LANES * depth
}

/// The stride for rows of `columns` columns: an odd number of 16-element vectors, so that the same column of
/// neighbouring rows falls into different cache sets.
#[must_use]
pub(crate) fn row_stride(columns: usize) -> usize {
    (columns.div_ceil(16) | 1) * 16
}

/// Initial values of the accumulators.
#[derive(Clone, Copy)]
pub enum Start<'a, T> {
    /// Zeros.
    Zero,
    /// One value per column, padded to whole panels.
    Bias(&'a [T]),
    /// The values of `C`.
    Add,
}

/// The left operand: element `(row, step)` is at `row * row_stride + step * step_stride`.
#[derive(Clone, Copy)]
pub struct Left<'a, T> {
    /// The elements.
    pub data: &'a [T],
    /// From one row to the next.
    pub row_stride: usize,
    /// From one step of the depth to the next.
    pub step_stride: usize,
}

/// The result: element `(row, column)` is at `row * stride + column`.
pub struct Output<'a, T> {
    /// The elements.
    pub data: &'a mut [T],
    /// From one row to the next.
    pub stride: usize,
}

/// `C = start + A B`, followed by a ReLU if `relu`. The ReLU keeps a NaN, so that it shows in the loss.
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
    /// The values to which the product is added.
    pub start: Start<'a, T>,
    /// Whether negative results become 0.
    pub relu: bool,
    /// `C`.
    pub output: Output<'a, T>,
}

impl<T: Real> Product<'_, T> {
    /// Computes the product.
    ///
    /// # Panics
    /// When a slice is too short for the shape, or rows of the result overlap.
    pub(crate) fn run(&mut self) {
        T::product(self);
    }

    /// Returns whether there is anything to compute. Before it returns true, it checks that every element of
    /// the shape lies within its slice, because kernels access memory without bounds checks. Offsets grow
    /// with row, step and column, so checking the last one is enough.
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

/// A row-major matrix: element `(row, column)` is at `row * stride + column`.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    pub data: &'a [T],
    pub stride: usize,
    pub rows: usize,
    pub columns: usize,
}

/// Packs a matrix into panels, as the right operand of a product. Lanes after the last column are zero.
///
/// # Panics
/// When a slice is too short for the shape.
pub(crate) fn pack<T: Real>(matrix: Matrix<'_, T>, panels: &mut [T]) {
    let Matrix { data, stride, rows, columns } = matrix;
    for (p, panel) in panels.chunks_exact_mut((rows * LANES).max(1)).enumerate() {
        let first = p * LANES;
        let width = columns.saturating_sub(first).min(LANES);
        for (row, lanes) in panel.chunks_exact_mut(LANES).enumerate() {
            lanes[..width].copy_from_slice(&data[row * stride + first..][..width]);
            lanes[width..].fill(T::default());
        }
    }
}

/// A matrix that was packed into panels.
#[derive(Clone, Copy)]
pub(crate) struct Packed<'a, T> {
    pub panels: &'a [T],
    pub rows: usize,
    pub columns: usize,
}

/// Makes panel `p` of the transpose of a packed matrix. Its rows from `p * LANES` on become the columns of
/// the panel.
///
/// # Panics
/// When a slice is too short for the shape.
pub(crate) fn pack_transposed_panel<T: Real>(packed: Packed<'_, T>, p: usize, out: &mut [T]) {
    let Packed { panels, rows, columns } = packed;
    let first = p * LANES;
    let height = rows.saturating_sub(first).min(LANES);
    for (q, block) in out.chunks_mut(LANES * LANES).enumerate() {
        // `block` is up to 32 columns of the matrix by 32 of its rows.
        let data = &panels[q * rows * LANES + first * LANES..][..height * LANES];
        let columns = (columns - q * LANES).min(LANES);
        pack_transposed(Matrix { data, stride: LANES, rows: height, columns }, block);
    }
}
