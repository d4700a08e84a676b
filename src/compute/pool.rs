//! Gather-pool: what turns rows into a model's input, the last step of the embedding layer.
//!
//! For every lookup of every sample, the rows of the sample's ids are added in id order and written
//! at the lookup's columns of the sample's output row; the dense values stand before them. Rows come
//! deduplicated: an occurrence (one id of one sample) names a unique row by its number.
//!
//! [`Pool`] is the host's view, checked by [`Pool::check`] before a launch. [`PoolLookup`] is also
//! what a kernel is given, field for field as in `kernels/gather_pool.cu`.
//!
//! All lookups go into one launch by self-identified fusion (FLECHE section 3.2): each is a segment
//! of `samples x dim` threads rounded up to whole warps, and [`Pool::scan`] is the prefix sum by which
//! a warp finds its segment.
//!
//! Every back end gives the same bits, those of [`super::gather_pool::gather_pool`]: a bag starts as its first
//! row and the others are added one by one in f32; an absent row is +0 where it is the first and adds
//! nothing elsewhere; a mean divides the sum by the bag's count, absent ids included; an empty bag is +0.
//! Elements that are not f32 become f32 on the way: f16 exactly, int8 by `q * scale + bias` with the
//! product rounded and then the sum, never by a fused operation (`types::element`).

use crate::schema::Pooling;
use crate::types::Element;

/// Threads in a warp.
pub(crate) const WARP_LANES: u32 = 32;

/// Most lookups in one launch: their prefix sum must fit a block's shared memory (48 KiB, and 32 KiB
/// are taken at most).
pub(crate) const MAX_LOOKUPS: usize = 8_190;

/// One lookup, as kernels read it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct PoolLookup {
    /// Where its `samples + 1` bounds begin in [`Pool::offsets`].
    pub offsets_at: u32,
    /// Where its occurrences begin in [`Pool::occurrences`]: bounds are counted from here.
    pub occurrences_at: u32,
    /// Elements of a row.
    pub dim: u32,
    /// Where its vector begins in an output row.
    pub column: u32,
    /// How its rows are pooled: 0 sum, 1 mean.
    pub pooling: u32,
    /// How their elements are stored: [`Element::code`].
    pub element: u32,
}

/// The number by which kernels know a pooling.
#[must_use]
pub fn pooling_code(pooling: Pooling) -> u32 {
    match pooling {
        Pooling::Sum => 0,
        Pooling::Mean => 1,
    }
}

/// Everything a gather-pool reads, in host memory.
#[derive(Clone, Copy, Debug)]
pub struct Pool<'a> {
    /// How many samples.
    pub samples: usize,
    /// Dense values a sample, written at columns `0..dense_width`.
    pub dense_width: usize,
    /// Elements from one output row to the next; elements that nothing names are left as they are.
    pub stride: usize,
    /// The lookups; their columns do not overlap.
    pub lookups: &'a [PoolLookup],
    /// Bag bounds. Lookups of one feature may share them.
    pub offsets: &'a [u32],
    /// The unique row of each occurrence.
    pub occurrences: &'a [u32],
    /// The unique rows, whole words as `types::element` has them; an empty slice is an absent row, read
    /// as zeros.
    pub rows: &'a [&'a [u32]],
    /// `samples x dense_width`, row-major, transformed already.
    pub dense: &'a [f32],
}

/// A [`Pool`] that a kernel could not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// More than one launch can hold.
    #[error("gather-pool {field}: limit {limit}, got {got}")]
    Limit {
        /// What there is too much of.
        field: &'static str,
        /// The limit.
        limit: u64,
        /// What came.
        got: u64,
    },
    /// A slice of the wrong length.
    #[error("gather-pool {field}: expected {expected}, got {got}")]
    Length {
        /// Which slice.
        field: &'static str,
        /// The length that the other fields ask for.
        expected: usize,
        /// Its length.
        got: usize,
    },
    /// A lookup that reads or writes out of bounds, or over another's columns.
    #[error("gather-pool lookup {lookup}: {what}: expected {expected}, got {got}")]
    Lookup {
        /// Its place among the lookups.
        lookup: usize,
        /// Which of its fields or slices.
        what: &'static str,
        /// What would do, at most or exactly.
        expected: u64,
        /// What came.
        got: u64,
    },
}

impl Pool<'_> {
    /// Checks all that a kernel takes for granted: every bound, index and width is in range, and no
    /// two writers share a column.
    ///
    /// # Errors
    /// [`PoolError`] naming the field, or the lookup and its field.
    pub(crate) fn check(&self) -> Result<(), PoolError> {
        self.check_limits()?;
        let dense = self.samples * self.dense_width;
        if self.dense.len() != dense {
            return Err(PoolError::Length { field: "dense", expected: dense, got: self.dense.len() });
        }
        for (i, lookup) in self.lookups.iter().enumerate() {
            self.check_lookup(lookup).map_err(|(what, expected, got)| PoolError::Lookup {
                lookup: i,
                what,
                expected,
                got,
            })?;
        }
        self.check_columns()
    }

    fn check_limits(&self) -> Result<(), PoolError> {
        let limits = [
            ("lookups", MAX_LOOKUPS as u64, self.lookups.len()),
            ("stride", u64::from(u32::MAX), self.stride),
            ("dense width", self.stride as u64, self.dense_width),
            ("samples", u64::from(u32::MAX >> 1), self.samples),
        ];
        for (field, limit, got) in limits {
            if got as u64 > limit {
                return Err(PoolError::Limit { field, limit, got: got as u64 });
            }
        }
        let dims = self.lookups.iter().map(|l| u64::from(l.dim)).chain([self.dense_width as u64]);
        let (mut widest, mut warps) = (0, 0_u64);
        for dim in dims {
            let threads = (self.samples as u64).saturating_mul(dim);
            widest = threads.max(widest);
            warps = warps.saturating_add(threads.div_ceil(u64::from(WARP_LANES)));
        }
        // A thread's number in its segment, and a warp's in the launch plus one grid, fit a u32.
        for (field, limit, got) in [
            ("elements of one lookup", u64::from(u32::MAX >> 1), widest),
            ("warps", u64::from(u32::MAX >> 1), warps),
        ] {
            if got > limit {
                return Err(PoolError::Limit { field, limit, got });
            }
        }
        Ok(())
    }

    fn check_lookup(&self, lookup: &PoolLookup) -> Result<(), (&'static str, u64, u64)> {
        if lookup.pooling > pooling_code(Pooling::Mean) {
            return Err(("pooling code", 1, lookup.pooling.into()));
        }
        let Some(element) = Element::ALL.into_iter().find(|known| known.code() == lookup.element) else {
            return Err(("element code", Element::ALL.len() as u64 - 1, lookup.element.into()));
        };
        if lookup.dim == 0 {
            return Err(("dim of at least", 1, 0));
        }
        let end = u64::from(lookup.column) + u64::from(lookup.dim);
        if end > self.stride as u64 {
            return Err(("last column within the stride", self.stride as u64, end));
        }
        let (from, to) = (lookup.offsets_at as usize, lookup.offsets_at as usize + self.samples + 1);
        let Some(bounds) = self.offsets.get(from..to) else {
            return Err(("offsets in all", to as u64, self.offsets.len() as u64));
        };
        if let Some(pair) = bounds.windows(2).find(|pair| pair[0] > pair[1]) {
            return Err(("offset that never falls", pair[0].into(), pair[1].into()));
        }
        let at = lookup.occurrences_at as usize;
        let (first, last) = (at + bounds[0] as usize, at + bounds[self.samples] as usize);
        let Some(occurrences) = self.occurrences.get(first..last) else {
            return Err(("occurrences in all", last as u64, self.occurrences.len() as u64));
        };
        for &unique in occurrences {
            let Some(row) = self.rows.get(unique as usize) else {
                return Err(("unique row below", self.rows.len() as u64, unique.into()));
            };
            let (expected, got) = (element.row_bytes(lookup.dim as usize), size_of_val(*row));
            if got != 0 && got != expected {
                return Err(("bytes of a row", expected as u64, got as u64));
            }
        }
        Ok(())
    }

    /// Threads write without asking one another, so columns belong to one lookup each.
    fn check_columns(&self) -> Result<(), PoolError> {
        let mut order: Vec<usize> = (0..self.lookups.len()).collect();
        order.sort_unstable_by_key(|&i| self.lookups[i].column);
        let mut free_from = self.dense_width as u64;
        for i in order {
            let column = u64::from(self.lookups[i].column);
            if column < free_from {
                return Err(PoolError::Lookup {
                    lookup: i,
                    what: "first column that is free",
                    expected: free_from,
                    got: column,
                });
            }
            free_from = column + u64::from(self.lookups[i].dim);
        }
        Ok(())
    }

    /// The exclusive prefix sum of the segments' warps: one entry a lookup, one for the dense values,
    /// and the total. `check` has bounded it.
    #[must_use]
    pub(crate) fn scan(&self) -> Vec<u32> {
        let widths = self.lookups.iter().map(|l| l.dim as usize).chain([self.dense_width]);
        let mut total = 0;
        let mut scan = vec![0];
        for width in widths {
            total += (self.samples * width).div_ceil(WARP_LANES as usize) as u32;
            scan.push(total);
        }
        scan
    }
}

#[cfg(test)]
mod tests;
