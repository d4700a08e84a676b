//! Writes input rows: dense values and pooled vectors side by side, in the schema's layout.

use std::ops::Range;

use super::tape::Tape;
use crate::compute::gather_pool::{PoolLookup, collect_rows, gather_pool};
use crate::mem::prefetch::prefetch;
use crate::predict::PredictError;
use crate::schema::{Lookup, Pooling, Schema};
use crate::types::Batch;

/// Everything that input rows are computed from, except the embedding rows.
#[derive(Clone, Copy)]
pub struct InputRows<'a> {
    /// Dense values per sample.
    pub dense_width: usize,
    /// The schema's lookups.
    pub lookups: &'a [Lookup],
    /// The samples.
    pub batch: &'a Batch,
}

impl InputRows<'_> {
    /// Writes the input rows of `tape.samples` samples, from sample `first` on, into buffer 0 of the tape.
    /// `rows(l)` returns a function for lookup `l`: from the index of an id, among the feature's ids in the
    /// batch, to the bytes of its row, or `None` for a row of zeros.
    pub fn write<'r, R>(&self, first: usize, tape: &mut Tape<f32>, rows: impl Fn(usize) -> R)
    where
        R: Fn(usize) -> Option<&'r [u8]>,
    {
        self.write_at(first..first + tape.samples, tape, 0, rows);
    }

    /// Writes the input rows of these samples into buffer 0 of the tape, from row `at` of the tape on. For
    /// `rows` see [`Self::write`].
    pub(crate) fn write_at<'r, R>(
        &self,
        samples: Range<usize>,
        tape: &mut Tape<f32>,
        at: usize,
        rows: impl Fn(usize) -> R,
    ) where
        R: Fn(usize) -> Option<&'r [u8]>,
    {
        let (first, samples, width) = (samples.start, samples.len(), self.dense_width);
        let input = &mut tape.values[0];
        for s in 0..samples {
            let dense = &self.batch.dense[(first + s) * width..][..width];
            input.from_mut(at + s, 0)[..width].copy_from_slice(dense);
        }
        let pool = |lookup: &Lookup| PoolLookup {
            offsets: &self.batch.features[lookup.feature].offsets[first..=first + samples],
            dim: lookup.dim,
            element: lookup.element,
            mean: lookup.pooling == Pooling::Mean,
            column: lookup.column,
        };
        let blocks =
            self.lookups.iter().enumerate().flat_map(|(l, lookup)| {
                pool(lookup).blocks().map(move |(samples, block)| (l, samples, block))
            });
        let mut blocks = blocks.peekable();
        let mut write = |(samples, block): (Range<usize>, PoolLookup<'_>), found: &[_]| {
            let stride = input.stride();
            gather_pool(&block, found, input.from_mut(at + samples.start, 0), stride);
        };
        // While a block is pooled, the rows of the next block and the ids of the one after it are prefetched.
        let (mut found, mut ahead) = (Vec::new(), Vec::new());
        let mut collected = None;
        while let Some((l, samples, block)) = blocks.next() {
            if let Some((next, _, block)) = blocks.peek() {
                prefetch(&self.batch.features[self.lookups[*next].feature].ids[block.occurrences()]);
            }
            collect_rows(&block, rows(l), &mut ahead);
            if let Some(previous) = collected.replace((samples, block)) {
                write(previous, &found);
            }
            std::mem::swap(&mut found, &mut ahead);
        }
        if let Some(last) = collected {
            write(last, &found);
        }
    }
}

/// Checks that the batch has the schema's columns, that each feature has `samples + 1` offsets, and that its
/// last offset is its number of ids.
///
/// # Errors
/// [`PredictError::Shape`] with the first wrong column.
pub(crate) fn check_shape(schema: &Schema, batch: &Batch) -> Result<(), PredictError> {
    check_length("dense", batch.samples.saturating_mul(schema.dense_width()), batch.dense.len())?;
    check_length("features", schema.features.len(), batch.features.len())?;
    for (feature, ids) in schema.features.iter().zip(&batch.features) {
        check_length(&feature.name, batch.samples.saturating_add(1), ids.offsets.len())?;
        let end = ids.offsets.last().copied().unwrap_or(0) as usize;
        check_length(&feature.name, end, ids.ids.len())?;
    }
    Ok(())
}

/// Checks the number of values of `field`.
///
/// # Errors
/// [`PredictError::Shape`] if it differs from `expected`.
pub(crate) fn check_length(field: &str, expected: usize, got: usize) -> Result<(), PredictError> {
    let shape = || PredictError::Shape { field: field.into(), expected: expected as u64, got: got as u64 };
    if expected == got { Ok(()) } else { Err(shape()) }
}
