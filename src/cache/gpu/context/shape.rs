//! What a lane has room for, and whether a batch is one that it was made for: all that its kernels take for
//! granted.

use super::args::NarrowColumn;
use crate::compute::pool::MAX_LOOKUPS;
use crate::device::cuda::DriverError;
use crate::types::{Batch, Element, ROW_ALIGN};

/// One pooled vector of the output row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneLookup {
    /// Which feature's ids it reads.
    pub feature: usize,
    /// The first of its table's own keys: a row's own key is `base | id`.
    pub base: u64,
    /// How its ids become keys of the index, where those are not the rows' own: of all lookups or of none.
    pub narrow: Option<NarrowColumn>,
    /// Ids of its table are below; others read as zeros.
    pub rows: u64,
    /// Values of a row.
    pub dim: usize,
    /// How a row's elements are stored.
    pub element: Element,
    /// Where its vector begins in an output row.
    pub column: usize,
    /// As [`crate::compute::pool::pooling_code`].
    pub pooling: u32,
}

impl LaneLookup {
    /// Words of 4 bytes of a row.
    #[must_use]
    pub(crate) fn row_words(&self) -> usize {
        self.element.row_bytes(self.dim) / ROW_ALIGN
    }
}

/// What a lane has room for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneShape {
    /// Columns of a batch.
    pub features: usize,
    /// The lookups; their columns do not overlap.
    pub lookups: Vec<LaneLookup>,
    /// Dense values a sample.
    pub dense_width: usize,
    /// Values of an output row.
    pub stride: usize,
    /// Most samples of a batch.
    pub max_samples: usize,
    /// Most ids of a batch, all features together.
    pub max_ids: usize,
    /// Words for the rows of a batch's misses.
    pub staging_words: usize,
    /// Words for copies of a batch's hits; those that find no room are read in the pool.
    pub copy_words: usize,
}

impl LaneShape {
    /// Whether the index's keys are not the rows' own.
    pub(crate) fn narrow(&self) -> bool {
        self.lookups.iter().any(|lookup| lookup.narrow.is_some())
    }
}

/// Why a lane does not take a batch, or could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaneError {
    /// The driver's word.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A part of the batch, or of the lane's shape, is not as long as the others ask for.
    #[error("{field}: expected {expected}, got {got}")]
    Shape {
        /// Which part.
        field: String,
        /// What would do.
        expected: u64,
        /// What came.
        got: u64,
    },
    /// There is more than the lane has room for.
    #[error("{field}: limit {limit}, got {got}")]
    Capacity {
        /// Which limit.
        field: &'static str,
        /// The limit.
        limit: u64,
        /// What came.
        got: u64,
    },
}

pub(crate) fn limit(field: &'static str, limit: u64, got: usize) -> Result<(), LaneError> {
    if got as u64 > limit {
        return Err(LaneError::Capacity { field, limit, got: got as u64 });
    }
    Ok(())
}

fn expect(field: impl FnOnce() -> String, expected: usize, got: usize) -> Result<(), LaneError> {
    if got != expected {
        return Err(LaneError::Shape { field: field(), expected: expected as u64, got: got as u64 });
    }
    Ok(())
}

pub(crate) fn check_shape(shape: &LaneShape) -> Result<(), LaneError> {
    let LaneShape { lookups, max_samples, .. } = shape;
    limit("lookups", MAX_LOOKUPS as u64, lookups.len())?;
    limit("dense width", shape.stride as u64, shape.dense_width)?;
    limit("words of copied hits", u64::from(u32::MAX >> 1), shape.copy_words)?;
    // As `Pool::check`: a thread's number in its segment and a warp's in the launch fit 31 bits.
    let width: usize = lookups.iter().map(|l| l.dim).sum::<usize>() + shape.dense_width;
    limit(
        "elements of the output",
        u64::from(u32::MAX >> 1),
        max_samples.saturating_mul(width.max(shape.stride)),
    )?;
    limit("offsets", u64::from(u32::MAX >> 1), (max_samples + 1).saturating_mul(shape.features))?;
    let mut order: Vec<&LaneLookup> = lookups.iter().collect();
    order.sort_unstable_by_key(|l| l.column);
    let narrow = shape.narrow();
    let mut free_from = shape.dense_width;
    for (i, lookup) in order.into_iter().enumerate() {
        limit("feature of a lookup", (shape.features as u64).saturating_sub(1), lookup.feature)?;
        limit("pooling code", 1, lookup.pooling as usize)?;
        expect(|| format!("narrow keys of lookup {i}"), narrow.into(), lookup.narrow.is_some().into())?;
        limit("bits of a key", 64, lookup.narrow.map_or(0, |narrow| narrow.bits as usize))?;
        let end = lookup.column + lookup.dim;
        if lookup.dim == 0 || lookup.column < free_from || end > shape.stride {
            let (expected, got) = (free_from as u64, lookup.column as u64);
            return Err(LaneError::Shape { field: format!("column of lookup {i}"), expected, got });
        }
        free_from = end;
    }
    Ok(())
}

pub(crate) fn check_batch(shape: &LaneShape, batch: &Batch) -> Result<(), LaneError> {
    limit("batch: samples", shape.max_samples as u64, batch.samples)?;
    limit("batch: ids", shape.max_ids as u64, batch.features.iter().map(|f| f.ids.len()).sum())?;
    expect(|| "batch: dense values".into(), batch.samples * shape.dense_width, batch.dense.len())?;
    expect(|| "batch: features".into(), shape.features, batch.features.len())?;
    for (f, feature) in batch.features.iter().enumerate() {
        expect(|| format!("batch: offsets of feature {f}"), batch.samples + 1, feature.offsets.len())?;
        expect(|| format!("batch: first offset of feature {f}"), 0, feature.offsets[0] as usize)?;
        let last = feature.offsets[batch.samples] as usize;
        expect(|| format!("batch: last offset of feature {f}"), feature.ids.len(), last)?;
        if let Some(pair) = feature.offsets.windows(2).find(|pair| pair[0] > pair[1]) {
            let (expected, got) = (u64::from(pair[0]), u64::from(pair[1]));
            let field = format!("batch: offset of feature {f} that never falls");
            return Err(LaneError::Shape { field, expected, got });
        }
    }
    Ok(())
}
