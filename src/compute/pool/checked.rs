//! The input of a gather-pool in host memory, for the simulator. [`Pool::check`] refuses an input with which
//! the kernel would access memory out of bounds, so that a wrong test fails with a message.

use super::{MAX_LOOKUPS, PoolLookup, WARP_LANES, pooling_code};
use crate::schema::Pooling;
use crate::types::Element;

/// The input of a gather-pool, in host memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pool<'a> {
    /// Number of samples.
    pub samples: usize,
    /// Dense values per sample, written to columns `0..dense_width`.
    pub dense_width: usize,
    /// Elements from one output row to the next. Columns that belong to no lookup keep their values.
    pub stride: usize,
    /// The lookups. Their columns must not overlap.
    pub lookups: &'a [PoolLookup],
    /// Bag bounds. Lookups of one feature may share them.
    pub offsets: &'a [u32],
    /// The unique row of each occurrence.
    pub occurrences: &'a [u32],
    /// The unique rows, as words of the row's bytes (`types::element`). An empty slice is an absent row.
    pub rows: &'a [&'a [u32]],
    /// `samples x dense_width`, row-major, after the schema's transforms.
    pub dense: &'a [f32],
}

/// Why a kernel could not run a [`Pool`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages document variants and fields")]
pub(crate) enum PoolError {
    #[error("gather-pool {field}: limit {limit}, got {got}")]
    Limit { field: &'static str, limit: u64, got: u64 },
    #[error("gather-pool {field}: expected {expected}, got {got}")]
    Length { field: &'static str, expected: usize, got: usize },
    #[error("gather-pool lookup {lookup}: {what}: expected {expected}, got {got}")]
    Lookup { lookup: usize, what: &'static str, expected: u64, got: u64 },
}

impl Pool<'_> {
    /// Checks all assumptions of the kernel: bounds, indices and widths are in range, and columns do not
    /// overlap.
    ///
    /// # Errors
    /// [`PoolError`] with the field, or the lookup and its field.
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
        // Kernels count threads within a segment in u32, and warps up to one grid after the last one. Neither
        // count may overflow.
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
            return Err(("largest pooling code", 1, lookup.pooling.into()));
        }
        let Some(element) = Element::ALL.into_iter().find(|known| known.code() == lookup.element) else {
            return Err(("largest element code", Element::ALL.len() as u64 - 1, lookup.element.into()));
        };
        if lookup.dim == 0 {
            return Err(("least dim", 1, 0));
        }
        let end = u64::from(lookup.column) + u64::from(lookup.dim);
        if end > self.stride as u64 {
            return Err(("last column within the stride", self.stride as u64, end));
        }
        let (from, to) = (lookup.offsets_at as usize, lookup.offsets_at as usize + self.samples + 1);
        let Some(bounds) = self.offsets.get(from..to) else {
            return Err(("number of offsets", to as u64, self.offsets.len() as u64));
        };
        if let Some(pair) = bounds.windows(2).find(|pair| pair[0] > pair[1]) {
            return Err(("least next offset", pair[0].into(), pair[1].into()));
        }
        let at = lookup.occurrences_at as usize;
        let (first, last) = (at + bounds[0] as usize, at + bounds[self.samples] as usize);
        let Some(occurrences) = self.occurrences.get(first..last) else {
            return Err(("number of occurrences", last as u64, self.occurrences.len() as u64));
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

    /// Threads write without synchronisation, so no column may belong to two lookups.
    fn check_columns(&self) -> Result<(), PoolError> {
        let mut order: Vec<usize> = (0..self.lookups.len()).collect();
        order.sort_unstable_by_key(|&i| self.lookups[i].column);
        let mut free_from = self.dense_width as u64;
        for i in order {
            let column = u64::from(self.lookups[i].column);
            if column < free_from {
                return Err(PoolError::Lookup {
                    lookup: i,
                    what: "first free column",
                    expected: free_from,
                    got: column,
                });
            }
            free_from = column + u64::from(self.lookups[i].dim);
        }
        Ok(())
    }

    /// The exclusive prefix sum of the segments' warps: one entry per lookup, one for the dense values, and
    /// the total. `check` limits the total to 2^31 - 1.
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
