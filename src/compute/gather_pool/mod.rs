//! The host device: every kernel in plain Rust, and so the oracle for every other device.

mod layout;
mod registers;

use std::ops::Range;

use registers::GatherPool;

use crate::mem::prefetch::prefetch_first;
use crate::types::Element;

/// One lookup of a gather-pool: which values each sample has, and where its vector goes.
#[derive(Clone, Copy, Debug)]
pub struct PoolLookup<'a> {
    /// `samples + 1` offsets: sample `s` owns the occurrences `offsets[s]..offsets[s + 1]`.
    pub offsets: &'a [u32],
    /// Elements of a row.
    pub dim: usize,
    /// How they are stored.
    pub element: Element,
    /// Divide the sum by the count.
    pub mean: bool,
    /// Where the vector begins in the output row.
    pub column: usize,
}

impl PoolLookup<'_> {
    /// The occurrences of all its samples.
    #[must_use]
    pub fn occurrences(&self) -> Range<usize> {
        let last = self.offsets.len().saturating_sub(1);
        self.offsets.first().map_or(0..0, |first| *first as usize..self.offsets[last] as usize)
    }

    /// Bytes of a row.
    #[inline(always)]
    fn row_bytes(&self) -> usize {
        self.element.row_bytes(self.dim)
    }

    /// The same lookup of some of its samples: enough for 32 KiB of rows, and at least one.
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

/// Bytes of rows that are collected before they are pooled.
const BLOCK_BYTES: usize = 32 << 10;

/// Bytes of rows that are on their way while one is pooled: what memory gives in the time that it takes
/// to answer. 512 B to 8 KiB were measured, with little between them.
const AHEAD_BYTES: usize = 2 << 10;

/// Finds the row of every occurrence of the lookup, and asks memory for the first of them.
///
/// Finding rows and reading them are loops of their own, so that each keeps all that it knows in
/// registers. One loop for both was measured to take two to three times as long. The guess behind it is
/// that reads of its variables wait for writes whose addresses end in the same 12 bits, and which
/// in turn wait for a row.
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

/// Rows of so many bytes that are on their way while one is pooled.
#[inline(always)]
pub(crate) fn rows_ahead(row_bytes: usize) -> usize {
    (AHEAD_BYTES / row_bytes.max(1)).max(1)
}

/// Pools the rows of each sample's ids into `dim` columns of its output row.
///
/// `rows` holds the bytes of the row of every occurrence from the first sample's on, at any address, or
/// `None` for one that reads as zeros. A bag starts as its first row and the others are added in id order, as every device has it
/// ([`super::pool`]); an empty bag is zeros. `out` holds one row of `stride` elements a sample.
///
/// # Panics
/// When `rows` or `out` is too short, a row is of another length, the columns do not fit the stride, or the
/// offsets fall.
pub fn gather_pool(lookup: &PoolLookup<'_>, rows: &[Option<&[u8]>], out: &mut [f32], stride: usize) {
    if let Some(pool) = GatherPool::new(lookup, rows, out, stride) {
        pool.run();
    }
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests;
