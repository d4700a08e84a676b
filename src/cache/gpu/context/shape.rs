//! The largest batch that a lookup context accepts, and the checks that its kernels rely on.

use crate::cache::gpu::args::NarrowColumn;
use crate::compute::pool::MAX_LOOKUPS;
use crate::device::cuda::DriverError;
use crate::mem::WORD_BYTES;
use crate::schema::Lookup;
use crate::types::Batch;

/// The largest batch of a context, and how it is pooled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextShape {
    /// Features of a batch.
    pub features: usize,
    /// The pooled vectors of an output row. Their columns do not overlap.
    pub lookups: Vec<Lookup>,
    /// Dense values per sample. An output row begins with them.
    pub dense_width: usize,
    /// Values of an output row.
    pub stride: usize,
    /// Most samples of a batch.
    pub max_samples: usize,
    /// Most ids of a batch, all features together.
    pub max_ids: usize,
    /// Bytes for the missing rows of a batch: `cache.staging_bytes`. `None`: enough for the largest batch.
    pub staging_bytes: Option<usize>,
    /// Device bytes for copies of a batch's hits. Hits that do not fit stay in the pool, where the gather
    /// reads them.
    pub copy_bytes: usize,
}

/// How the ids of a lookup become keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LookupKeys {
    /// The first own key of the lookup's table: a row's own key is `base | id`.
    pub base: u64,
    /// Rows of the table. Ids that are not below this number read as zeros.
    pub rows: u64,
    /// How ids become index keys. `None` for all lookups if the index uses own keys.
    pub narrow: Option<NarrowColumn>,
}

impl ContextShape {
    /// The length of a lookup's rows, in words of 4 bytes.
    pub(crate) fn row_words(&self, lookup: usize) -> usize {
        row_words(&self.lookups[lookup])
    }

    /// Words of the staging buffer.
    pub(crate) fn staging_words(&self) -> usize {
        // In the worst case, all ids belong to the feature with the most words per id, and no row is cached.
        let words =
            |feature| self.lookups.iter().filter(|l| l.feature == feature).map(row_words).sum::<usize>();
        let largest = || self.max_ids * (0..self.features).map(words).max().unwrap_or(0);
        self.staging_bytes.map_or_else(largest, |bytes| bytes / WORD_BYTES)
    }

    /// Words for copies of hits.
    pub(crate) fn copy_words(&self) -> usize {
        self.copy_bytes / WORD_BYTES
    }
}

fn row_words(lookup: &Lookup) -> usize {
    lookup.element.row_bytes(lookup.dim) / WORD_BYTES
}

/// Why a context rejects a batch or a shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages are the documentation
pub enum LookupError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("{field}: expected {expected}, got {got}")]
    Shape { field: String, expected: u64, got: u64 },
    #[error("{field}: limit {limit}, got {got}")]
    Capacity { field: &'static str, limit: u64, got: u64 },
}

pub(super) fn limit(field: &'static str, limit: u64, got: usize) -> Result<(), LookupError> {
    if got as u64 > limit {
        return Err(LookupError::Capacity { field, limit, got: got as u64 });
    }
    Ok(())
}

fn expect(field: impl FnOnce() -> String, expected: usize, got: usize) -> Result<(), LookupError> {
    if got != expected {
        return Err(LookupError::Shape { field: field(), expected: expected as u64, got: got as u64 });
    }
    Ok(())
}

pub(super) fn check_shape(shape: &ContextShape, keys: &[LookupKeys]) -> Result<(), LookupError> {
    let ContextShape { lookups, max_samples, .. } = shape;
    limit("lookups", MAX_LOOKUPS as u64, lookups.len())?;
    expect(|| "keys of lookups".into(), lookups.len(), keys.len())?;
    limit("dense width", shape.stride as u64, shape.dense_width)?;
    limit("words of copied hits", u64::from(u32::MAX >> 1), shape.copy_words())?;
    // The number of a thread in its segment and the number of a warp in the launch must fit 31 bits, as in
    // `compute/pool/checked.rs`.
    let width: usize = lookups.iter().map(|l| l.dim).sum::<usize>() + shape.dense_width;
    limit(
        "elements of the output",
        u64::from(u32::MAX >> 1),
        max_samples.saturating_mul(width.max(shape.stride)),
    )?;
    limit("offsets", u64::from(u32::MAX >> 1), (max_samples + 1).saturating_mul(shape.features))?;
    let narrow = keys.iter().any(|keys| keys.narrow.is_some());
    for (i, keys) in keys.iter().enumerate() {
        expect(|| format!("narrow keys of lookup {i}"), narrow.into(), keys.narrow.is_some().into())?;
        limit("bits of a key", 64, keys.narrow.map_or(0, |narrow| narrow.bits as usize))?;
    }
    let mut order: Vec<(usize, &Lookup)> = lookups.iter().enumerate().collect();
    order.sort_unstable_by_key(|(_, lookup)| lookup.column);
    let mut free_from = shape.dense_width;
    for (i, lookup) in order {
        limit("feature of a lookup", (shape.features as u64).saturating_sub(1), lookup.feature)?;
        let end = lookup.column + lookup.dim;
        if lookup.dim == 0 || lookup.column < free_from || end > shape.stride {
            let (expected, got) = (free_from as u64, lookup.column as u64);
            return Err(LookupError::Shape { field: format!("column of lookup {i}"), expected, got });
        }
        free_from = end;
    }
    Ok(())
}

pub(super) fn check_batch(shape: &ContextShape, batch: &Batch) -> Result<(), LookupError> {
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
            let field = format!("batch: offset of feature {f} (ascending)");
            return Err(LookupError::Shape { field, expected, got });
        }
    }
    Ok(())
}
