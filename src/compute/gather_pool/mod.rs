//! Gather-pool on the CPU. [`super::pool`] defines the operation. The bits of this implementation are the
//! reference for every device.

mod layout;
mod registers;

use std::ops::Range;

use registers::GatherPool;

use crate::mem::prefetch::prefetch_first;
use crate::types::Element;

/// One lookup of a gather-pool: the bags of all samples, and the columns of their pooled vectors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolLookup<'a> {
    /// `samples + 1` offsets: sample `s` owns the occurrences `offsets[s]..offsets[s + 1]`.
    pub offsets: &'a [u32],
    /// Elements per row.
    pub dim: usize,
    /// Type of the elements.
    pub element: Element,
    /// Whether the sum is divided by the count.
    pub mean: bool,
    /// First column of the vector in the output row.
    pub column: usize,
}

impl PoolLookup<'_> {
    /// The occurrences of all its samples.
    #[must_use]
    pub(crate) fn occurrences(&self) -> Range<usize> {
        let last = self.offsets.len().saturating_sub(1);
        self.offsets.first().map_or(0..0, |first| *first as usize..self.offsets[last] as usize)
    }

    /// Bytes per row.
    #[inline(always)]
    fn row_bytes(&self) -> usize {
        self.element.row_bytes(self.dim)
    }

    /// Cuts the lookup into blocks of samples with about 32 KiB of rows each, and at least one sample.
    pub(crate) fn blocks(self) -> impl Iterator<Item = (Range<usize>, Self)> {
        let samples = self.offsets.len().saturating_sub(1);
        let bytes = self.occurrences().len() * self.row_bytes();
        let count = bytes.div_ceil(BLOCK_BYTES).clamp(1, samples.max(1));
        let block = samples.div_ceil(count).max(1);
        (0..samples).step_by(block).map(move |first| {
            let end = (first + block).min(samples);
            (first..end, Self { offsets: &self.offsets[first..=end], ..self })
        })
    }
}

/// Bytes of rows in a block. `model/input.rs` finds the rows of a block while it pools the block before.
const BLOCK_BYTES: usize = 32 << 10;

/// Bytes of rows that are prefetched ahead: about the memory's bandwidth times its latency. Values from 512 B
/// to 8 KiB were measured, with little difference.
const AHEAD_BYTES: usize = 2 << 10;

/// Finds the row of every occurrence of the lookup, and prefetches the first rows.
///
/// Finding rows and pooling them are two loops, so that each keeps its variables in registers. A single loop
/// took two to three times as long. A likely reason is 4 KiB aliasing: a load of a variable on the stack
/// waits for an earlier store with the same low 12 address bits, and that store waits for a row.
pub(crate) fn collect_rows<'r>(
    lookup: &PoolLookup<'_>,
    row: impl Fn(usize) -> Option<&'r [u8]>,
    rows: &mut Vec<Option<&'r [u8]>>,
) {
    rows.clear();
    rows.extend(lookup.occurrences().map(row));
    let row_bytes = lookup.row_bytes();
    let first = rows.len().min(rows_ahead(row_bytes));
    for row in &rows[..first] {
        let Some(row) = row else { continue };
        prefetch_first(row, row_bytes);
    }
}

/// How many rows of this size are prefetched ahead of the row that is being pooled.
#[inline(always)]
pub(crate) fn rows_ahead(row_bytes: usize) -> usize {
    (AHEAD_BYTES / row_bytes.max(1)).max(1)
}

/// Pools the rows of each sample's ids into `dim` columns of its output row.
///
/// `rows` has an entry for every occurrence of the lookup, in order: the bytes of its row, with any
/// alignment, or `None` for a row that reads as zeros. `out` has one row of `stride` elements per sample.
///
/// # Panics
/// When `rows` or `out` is too short, a row has another length, the columns do not fit the stride, or the
/// offsets decrease.
pub(crate) fn gather_pool(lookup: &PoolLookup<'_>, rows: &[Option<&[u8]>], out: &mut [f32], stride: usize) {
    if let Some(pool) = GatherPool::new(lookup, rows, out, stride) {
        pool.run();
    }
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests;
