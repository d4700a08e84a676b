//! Casting a batch: building the casted index of each table (Tensor Casting, section IV), which lists where
//! the gradients of each row come from.
//!
//! An *occurrence* is one id that the batch looks up. A batch looks up rows sample by sample, so the
//! occurrences of a row are scattered over the batch. Sorting (row, occurrence) pairs brings them together.
//! The backward pass of a table is then one gather-reduce: for each row in ascending order, it sums the
//! gradients of the row's occurrences in batch order. So every bit of the sum depends on the batch alone.

mod radix;

use std::cell::RefCell;
use std::iter;
use std::ops::Range;

use rayon::prelude::*;

pub use self::radix::{RadixSort, RowOccurrence};
use crate::pace::give_way;
use crate::predict::PredictError;
use crate::schema::{Lookup, Pooling, Schema};
use crate::types::{Batch, TableId};

/// Where a part of a row's gradient comes from: one occurrence of the row. Kernels read this layout.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct GradientSource {
    /// Index of the sample in the batch.
    pub sample: u32,
    /// First column, in the sample's input row, of the vector that the row was pooled into.
    pub column: u32,
    /// Divisor of the gradient: the bag's size under mean pooling, else 1.
    pub divisor: f32,
}

/// The rows of one table that a batch uses, and the sources of each row's gradient.
#[derive(Clone, Debug, Default)]
pub(crate) struct CastedIndex {
    /// The paper's casted `src`: ordered by row, and within a row in batch order.
    sources: Vec<GradientSource>,
    /// The distinct rows, ascending. The paper's casted `dst` is an index into them.
    rows: Vec<u64>,
    /// For each row, the end of its sources in `sources`.
    ends: Vec<u32>,
    /// For each occurrence, the index of its row in `rows`, or [`ABSENT`].
    places: Vec<u32>,
}

/// In lists of places: marks an occurrence that has no row, because its id is absent from the table.
pub(crate) const ABSENT: u32 = u32::MAX;

/// Temporary memory of casting. Each thread has one for all tables and batches, so it stays in the
/// processor's cache, and batches that are queued do not hold any.
#[derive(Default)]
struct Workspace {
    pairs: Vec<RowOccurrence>,
    sort: RadixSort,
    /// The source of the gradient of each occurrence.
    looked_up: Vec<GradientSource>,
}

thread_local! {
    static WORKSPACE: RefCell<Workspace> = RefCell::default();
}

impl CastedIndex {
    /// Casts the lookups of `table`. An absent id counts as the table's default row, if there is one.
    /// Occurrences are numbered lookup by lookup, and within a lookup in the order of the feature.
    pub(crate) fn fill(&mut self, schema: &Schema, lookups: &[Lookup], table: TableId, batch: &Batch) {
        WORKSPACE.with_borrow_mut(|workspace| {
            workspace.look_up(schema, lookups, table, batch);
            self.cast(workspace);
        });
    }

    /// Builds the casted arrays from the sorted pairs.
    fn cast(&mut self, Workspace { pairs, looked_up, .. }: &Workspace) {
        let Self { sources, rows, ends, places } = self;
        sources.clear();
        sources.extend(pairs.iter().map(|pair| looked_up[pair.occurrence as usize]));
        places.clear();
        places.resize(looked_up.len(), ABSENT);
        // Room for the case that all rows are distinct.
        rows.resize(pairs.len(), 0);
        ends.resize(pairs.len(), 0);
        let distinct = distinguish(pairs, rows, ends, places);
        rows.truncate(distinct);
        ends.truncate(distinct);
    }

    /// The distinct rows, ascending.
    #[must_use]
    pub(crate) fn rows(&self) -> &[u64] {
        &self.rows
    }

    /// For each occurrence, the index of its row in [`Self::rows`], or [`ABSENT`].
    #[must_use]
    pub(crate) fn places(&self) -> &[u32] {
        &self.places
    }

    /// The sources of the gradient of row `k` of [`Self::rows`], in batch order.
    #[inline(always)]
    #[must_use]
    pub(crate) fn sources(&self, k: usize) -> &[GradientSource] {
        let start = if k == 0 { 0 } else { self.ends[k - 1] };
        &self.sources[start as usize..self.ends[k] as usize]
    }

    /// Returns, for a range of rows, their sources end to end, the end of each row's sources, and the start
    /// of the first row's sources. Ends and start are indices among the sources of all rows.
    #[must_use]
    pub(crate) fn part(&self, rows: Range<usize>) -> (&[GradientSource], &[u32], u32) {
        let first = if rows.start == 0 { 0 } else { self.ends[rows.start - 1] };
        let ends = &self.ends[rows];
        let end = ends.last().copied().unwrap_or(first);
        (&self.sources[first as usize..end as usize], ends, first)
    }
}

impl Workspace {
    /// Collects the sorted pairs of the table's lookups, and the source of each occurrence.
    fn look_up(&mut self, schema: &Schema, lookups: &[Lookup], table: TableId, batch: &Batch) {
        self.pairs.clear();
        self.looked_up.clear();
        let shape = &schema.tables[table.index()];
        for lookup in lookups.iter().filter(|l| l.table == table) {
            let ids = &batch.features[lookup.feature];
            let occurrences = self.looked_up.len() as u32..;
            let pairs =
                ids.ids.iter().zip(occurrences).filter_map(|(&id, occurrence)| {
                    Some(RowOccurrence { row: shape.row_of(id)?, occurrence })
                });
            self.pairs.extend(pairs);
            for (bag, sample) in ids.offsets.windows(2).zip(0..) {
                let len = (bag[1] - bag[0]) as usize;
                let divisor = if lookup.pooling == Pooling::Mean { len as f32 } else { 1.0 };
                let source = GradientSource { sample, column: lookup.column as u32, divisor };
                self.looked_up.extend(iter::repeat_n(source, len));
            }
        }
        self.sort.sort(&mut self.pairs);
    }
}

/// Writes the distinct rows of sorted pairs to `rows`, the end of each row's pairs to `ends`, and the index
/// in `rows` of each occurrence's row to `places`. Returns the number of distinct rows.
fn distinguish(pairs: &[RowOccurrence], rows: &mut [u64], ends: &mut [u32], places: &mut [u32]) -> usize {
    let Some(&RowOccurrence { row: mut last, .. }) = pairs.first() else { return 0 };
    let mut k = 0;
    for (&RowOccurrence { row, occurrence }, end) in pairs.iter().zip(1..) {
        // Row and end are written for every pair, because the processor would often mispredict a branch on
        // whether the row is new.
        k += usize::from(row != last);
        last = row;
        rows[k] = row;
        ends[k] = end;
        places[occurrence as usize] = k as u32;
    }
    k + 1
}

/// The casted indices of all tables of a batch.
#[derive(Clone, Debug, Default)]
pub struct Casting {
    tables: Vec<CastedIndex>,
    /// For each lookup, the number of its first occurrence among those of its table.
    first: Vec<usize>,
}

impl Casting {
    /// Casts the batch for all tables, on the rayon pool of the caller.
    ///
    /// # Errors
    /// [`PredictError::Capacity`] when a batch looks up more than 2^32 - 1 ids in one table.
    pub fn fill(&mut self, schema: &Schema, lookups: &[Lookup], batch: &Batch) -> Result<(), PredictError> {
        self.prepare(schema, lookups, batch)?;
        self.tables.par_iter_mut().enumerate().for_each(|(t, casted)| {
            give_way();
            casted.fill(schema, lookups, TableId(t as u32), batch);
        });
        Ok(())
    }

    /// [`Self::fill`] on the caller's thread only, so that the threads that train are not used.
    ///
    /// # Errors
    /// As [`Self::fill`].
    pub(crate) fn fill_alone(
        &mut self,
        schema: &Schema,
        lookups: &[Lookup],
        batch: &Batch,
    ) -> Result<(), PredictError> {
        self.prepare(schema, lookups, batch)?;
        for (casted, t) in self.tables.iter_mut().zip(0..) {
            give_way();
            casted.fill(schema, lookups, TableId(t), batch);
        }
        Ok(())
    }

    fn prepare(&mut self, schema: &Schema, lookups: &[Lookup], batch: &Batch) -> Result<(), PredictError> {
        let mut occurrences = vec![0; schema.tables.len()];
        self.first.clear();
        for lookup in lookups {
            let of_table: &mut usize = &mut occurrences[lookup.table.index()];
            self.first.push(*of_table);
            *of_table += batch.features[lookup.feature].ids.len();
        }
        let (needed, limit) = (occurrences.into_iter().max().unwrap_or(0) as u64, u64::from(u32::MAX));
        if needed > limit {
            return Err(PredictError::Capacity { field: "ids of one table in a batch", needed, limit });
        }
        self.tables.resize_with(schema.tables.len(), CastedIndex::default);
        Ok(())
    }

    /// The casted index of each table, in the order of the schema.
    #[must_use]
    pub(crate) fn tables(&self) -> &[CastedIndex] {
        &self.tables
    }

    /// For each occurrence of lookup number `l`, which is `lookup`, the index of its row or [`ABSENT`]. The
    /// occurrences of the table's later lookups follow.
    #[must_use]
    pub(crate) fn places(&self, l: usize, lookup: &Lookup) -> &[u32] {
        &self.tables[lookup.table.index()].places()[self.first[l]..]
    }
}

#[cfg(test)]
mod tests;
