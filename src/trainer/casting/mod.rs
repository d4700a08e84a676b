//! Which gradients each row of a table gets: the casted index of Tensor Casting, section IV.
//!
//! A batch looks rows up sample by sample, so gradients arrive in sample order and a row's are
//! scattered. Sorting (row, occurrence) pairs brings those of a row together, and the backward pass
//! of the table is one gather-reduce: for each row in ascending order, the sum of the gradients of
//! its occurrences in the order in which the batch has them. That order, and so every bit of the
//! sum, is the batch's alone.

mod radix;

use std::cell::RefCell;
use std::iter;
use std::ops::Range;

use rayon::prelude::*;

pub use self::radix::{Pair, RadixSort};
use crate::predict::PredictError;
use crate::schema::{Lookup, Pooling, Schema};
pub(crate) use crate::trainer::pipeline::gpu::Source;
use crate::types::{Batch, TableId};

/// The rows of one table that a batch touches, and each one's gradients.
#[derive(Clone, Debug, Default)]
pub(crate) struct CastedIndex {
    /// The casted `src`: by row, and within a row in batch order.
    sources: Vec<Source>,
    /// The distinct rows, ascending; the casted `dst` is a place here.
    rows: Vec<u64>,
    /// Where the sources of each row end.
    ends: Vec<u32>,
    /// Of each occurrence, its row's place in `rows`, or [`ABSENT`].
    places: Vec<u32>,
}

/// The place of an occurrence that no row stands for.
pub(crate) const ABSENT: u32 = u32::MAX;

/// What casting a table needs only meanwhile. A thread has one for all tables and batches: it is near when it is used, and takes no
/// memory in batches that wait.
#[derive(Default)]
struct Workspace {
    /// Sorted.
    pairs: Vec<Pair>,
    sort: RadixSort,
    /// By occurrence.
    looked_up: Vec<Source>,
}

thread_local! {
    static WORKSPACE: RefCell<Workspace> = RefCell::default();
}

impl CastedIndex {
    /// Collects the rows of `table` that `lookups` of the batch touch. An absent id counts for the
    /// row that stands for it, or for none. Occurrences are counted lookup by lookup, and of a lookup as
    /// its feature has them.
    pub(crate) fn fill(&mut self, schema: &Schema, lookups: &[Lookup], table: TableId, batch: &Batch) {
        WORKSPACE.with_borrow_mut(|workspace| {
            workspace.look_up(schema, lookups, table, batch);
            self.cast(workspace);
        });
    }

    /// From sorted pairs to the casted arrays.
    fn cast(&mut self, Workspace { pairs, looked_up, .. }: &Workspace) {
        let Self { sources, rows, ends, places } = self;
        sources.clear();
        sources.extend(pairs.iter().map(|&(_, occurrence)| looked_up[occurrence as usize]));
        places.clear();
        places.resize(looked_up.len(), ABSENT);
        // Room for as many rows as if none came twice.
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

    /// Of each occurrence, its row's place in [`Self::rows`], or [`ABSENT`].
    #[must_use]
    pub(crate) fn places(&self) -> &[u32] {
        &self.places
    }

    /// The sources of the gradient of row `k` of [`Self::rows`], in batch order.
    #[inline(always)]
    #[must_use]
    pub(crate) fn sources(&self, k: usize) -> &[Source] {
        let start = if k == 0 { 0 } else { self.ends[k - 1] };
        &self.sources[start as usize..self.ends[k] as usize]
    }

    /// The sources of some of the rows end to end, where each row's end among all sources, and where the first one's
    /// begin.
    #[must_use]
    pub(crate) fn part(&self, rows: Range<usize>) -> (&[Source], &[u32], u32) {
        let first = if rows.start == 0 { 0 } else { self.ends[rows.start - 1] };
        let ends = &self.ends[rows];
        let end = ends.last().copied().unwrap_or(first);
        (&self.sources[first as usize..end as usize], ends, first)
    }
}

impl Workspace {
    /// The pairs of the table's lookups, sorted, and where each occurrence's gradient is.
    fn look_up(&mut self, schema: &Schema, lookups: &[Lookup], table: TableId, batch: &Batch) {
        self.pairs.clear();
        self.looked_up.clear();
        let shape = &schema.tables[table.index()];
        for lookup in lookups.iter().filter(|l| l.table == table) {
            let ids = &batch.features[lookup.feature];
            let occurrences = self.looked_up.len() as u32..;
            let pairs = ids.ids.iter().zip(occurrences).filter_map(|(&id, at)| Some((shape.row_of(id)?, at)));
            self.pairs.extend(pairs);
            for (bag, sample) in ids.offsets.windows(2).zip(0..) {
                let len = (bag[1] - bag[0]) as usize;
                let divisor = if lookup.pooling == Pooling::Mean { len as f32 } else { 1.0 };
                let source = Source { sample, column: lookup.column as u32, divisor };
                self.looked_up.extend(iter::repeat_n(source, len));
            }
        }
        self.sort.sort(&mut self.pairs);
    }
}

/// The distinct rows of sorted pairs, where the pairs of each end, and of each occurrence its row's place. Gives how many rows there
/// are.
fn distinguish(pairs: &[Pair], rows: &mut [u64], ends: &mut [u32], places: &mut [u32]) -> usize {
    let Some(&(mut last, _)) = pairs.first() else { return 0 };
    let mut k = 0;
    for (&(row, occurrence), end) in pairs.iter().zip(1..) {
        // Row and end are written at every pair: whether a row is a new one is anyone's guess, and a branch would be
        // guessed wrong.
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
    /// Of each lookup, where its occurrences begin among its table's.
    first: Vec<usize>,
}

impl Casting {
    /// Casts the batch for all tables, on the threads of the caller's rayon pool.
    ///
    /// # Errors
    /// [`PredictError::Capacity`] where one table is asked for more than 2^32 - 1 ids.
    pub fn fill(&mut self, schema: &Schema, lookups: &[Lookup], batch: &Batch) -> Result<(), PredictError> {
        self.prepare(schema, lookups, batch)?;
        self.tables.par_iter_mut().enumerate().for_each(|(t, casted)| {
            casted.fill(schema, lookups, TableId(t as u32), batch);
        });
        Ok(())
    }

    /// [`Self::fill`] on the caller's thread alone: for a stage beside those that compute.
    ///
    /// # Errors
    /// As above.
    pub(crate) fn fill_alone(
        &mut self,
        schema: &Schema,
        lookups: &[Lookup],
        batch: &Batch,
    ) -> Result<(), PredictError> {
        self.prepare(schema, lookups, batch)?;
        for (casted, t) in self.tables.iter_mut().zip(0..) {
            casted.fill(schema, lookups, TableId(t), batch);
        }
        Ok(())
    }

    fn prepare(&mut self, schema: &Schema, lookups: &[Lookup], batch: &Batch) -> Result<(), PredictError> {
        let mut asked = vec![0; schema.tables.len()];
        self.first.clear();
        for lookup in lookups {
            let of_table: &mut usize = &mut asked[lookup.table.index()];
            self.first.push(*of_table);
            *of_table += batch.features[lookup.feature].ids.len();
        }
        let (needed, limit) = (asked.into_iter().max().unwrap_or(0) as u64, u64::from(u32::MAX));
        if needed > limit {
            return Err(PredictError::Capacity { field: "ids of one table in a batch", needed, limit });
        }
        self.tables.resize_with(schema.tables.len(), CastedIndex::default);
        Ok(())
    }

    /// Each table's, in the schema's order.
    #[must_use]
    pub(crate) fn tables(&self) -> &[CastedIndex] {
        &self.tables
    }

    /// Of lookup `l`, which is `lookup`, the place of each occurrence in the batch among the rows of its table.
    #[must_use]
    pub(crate) fn places(&self, l: usize, lookup: &Lookup) -> &[u32] {
        &self.tables[lookup.table.index()].places()[self.first[l]..]
    }
}

#[cfg(test)]
mod tests;
