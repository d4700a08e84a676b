//! Runs a batch through the cache, from its ids to the model's input.

use std::sync::atomic::Ordering;

use super::super::CacheError;
use super::super::key::RowKeys;
use super::super::query::Tally;
use super::context::{ContextParts, ContextShape, LookupContext, LookupKeys, LookupRow, MissedRow};
use super::replace::Offer;
use super::version::BatchHold;
use super::{GpuCache, GpuCacheError, Shared};
use crate::cache::gpu::args::NarrowColumn;
use crate::cache::gpu::table::JobRow;
use crate::compute::gather_pool::rows_ahead;
use crate::device::cuda::Driver;
use crate::mem::WORD_BYTES;
use crate::mem::prefetch::{PREFETCH_AHEAD, prefetch};
use crate::schema::Lookup;
use crate::types::{Batch, RowId, TableId, Version};

/// The distinct rows that a batch reads and that are not cached. The caller writes their bytes.
pub struct MissingRows<'c> {
    lookups: &'c [Lookup],
    misses: &'c [MissedRow],
    row_bytes: &'c dyn Fn(usize) -> usize,
    version: Version,
    bytes: &'c mut [u8],
}

impl MissingRows<'_> {
    /// How many there are, at least one.
    pub(crate) fn len(&self) -> usize {
        self.misses.len()
    }

    /// The version from which the caller must read the rows: that of the batch.
    #[must_use]
    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// The `m`-th row.
    pub(crate) fn row(&self, m: usize) -> RowId {
        RowId::new(self.lookups[self.misses[m].lookup].table, self.misses[m].id)
    }

    /// Writes every row. `row` finds a row's bytes.
    ///
    /// # Errors
    /// The first error of `row`; then nothing is written.
    pub fn fill<'r, E>(&mut self, row: impl Fn(TableId, u64) -> Result<&'r [u8], E>) -> Result<(), E> {
        let find = |m| {
            let missing = self.row(m);
            row(missing.table(), missing.row())
        };
        let rows: Vec<&[u8]> = (0..self.len()).map(find).collect::<Result<_, _>>()?;
        let ahead = rows_ahead(rows.first().map_or(0, |row| row.len()));
        for (m, row) in rows.iter().enumerate() {
            rows.get(m + ahead).into_iter().for_each(|row| prefetch(row));
            self.bytes_mut(m).copy_from_slice(row);
        }
        Ok(())
    }

    /// The bytes of the `m`-th row, which the caller overwrites.
    pub(crate) fn bytes_mut(&mut self, m: usize) -> &mut [u8] {
        let miss = self.misses[m];
        let from = miss.word * WORD_BYTES;
        &mut self.bytes[from..from + (self.row_bytes)(miss.lookup)]
    }
}

impl<D: Driver> GpuCache<D> {
    /// A context that looks up batches of this shape, one at a time.
    ///
    /// # Errors
    /// [`GpuCacheError`] for an inconsistent shape or a lookup that does not fit the cache's tables, and
    /// driver errors.
    pub fn context(&self, shape: &ContextShape) -> Result<LookupContext<D>, GpuCacheError> {
        let shared = &self.shared;
        let keys: Vec<LookupKeys> =
            shape.lookups.iter().map(|lookup| shared.lookup_keys(lookup)).collect::<Result<_, _>>()?;
        Ok(LookupContext::new(&shared.gpu_table, shape, &keys)?)
    }

    /// The model's input for a batch, `samples x stride` values. Each sample has its dense values, then each
    /// lookup's pooled vector at the lookup's column. An id that its table does not have reads as zeros and
    /// counts neither as a hit nor as a miss.
    ///
    /// The batch has the version that is current when it begins; [`LookupContext::version`] returns it
    /// afterwards. If rows are missing, `fetch` is called once to write them, while the device copies the
    /// batch's hits. Afterwards these rows are offered to the cache.
    ///
    /// # Errors
    /// [`GpuCacheError`] for a batch that does not fit the context's shape or misses more rows than
    /// the staging buffer holds, and driver errors; or an error of `fetch`.
    ///
    /// # Panics
    /// If the context belongs to another cache.
    pub fn embed<'c, E: From<GpuCacheError>>(
        &self,
        context: &'c mut LookupContext<D>,
        batch: &Batch,
        fetch: impl FnOnce(&mut MissingRows) -> Result<(), E>,
    ) -> Result<&'c [f32], E> {
        self.embed_held(self.begin(), context, batch, fetch)
    }

    /// Begins a batch: it has the version that is current now. The version's rows must be readable until
    /// [`Self::embed_held`] returns, and a switch waits for that.
    pub(crate) fn begin(&self) -> BatchHold<D> {
        self.shared.begin()
    }

    /// As [`Self::embed`], for a batch that has begun.
    pub(crate) fn embed_held<'c, E: From<GpuCacheError>>(
        &self,
        hold: BatchHold<D>,
        context: &'c mut LookupContext<D>,
        batch: &Batch,
        fetch: impl FnOnce(&mut MissingRows) -> Result<(), E>,
    ) -> Result<&'c [f32], E> {
        assert!(context.is_of(&self.shared.gpu_table), "the lookup context belongs to another cache");
        let mut running = RunningBatch { shared: &self.shared, context: &mut *context, hold: None };
        let RunningBatch { context: running_context, hold: held, .. } = &mut running;
        let hold = held.insert(hold);
        running_context.set_version(hold.version);
        self.shared.run(running_context, hold, batch, fetch)?;
        drop(running);
        Ok(context.out())
    }
}

/// A batch while its kernels may run. Its hold is dropped after its last kernel has ended, even if the batch
/// ends in an error or a panic.
struct RunningBatch<'b, D: Driver> {
    shared: &'b Shared<D>,
    context: &'b mut LookupContext<D>,
    hold: Option<BatchHold<D>>,
}

impl<D: Driver> Drop for RunningBatch<'_, D> {
    fn drop(&mut self) {
        if let Err(error) = self.context.settle() {
            // Kernels may still read the slots and the overlay that the hold protects.
            std::mem::forget(self.hold.take());
            self.shared.batch_never_ends(error);
        }
    }
}

impl<D: Driver> Shared<D> {
    fn run<E: From<GpuCacheError>>(
        &self,
        context: &mut LookupContext<D>,
        hold: &BatchHold<D>,
        batch: &Batch,
        fetch: impl FnOnce(&mut MissingRows) -> Result<(), E>,
    ) -> Result<(), E> {
        let driver = |error| E::from(GpuCacheError::from(error));
        let lookup = |error| E::from(GpuCacheError::Lookup(error));
        let misses = context.probe(hold.pin.number(), hold.overlay.as_ref(), batch).map_err(lookup)?;
        self.count(context, batch);
        if misses > 0 {
            context.copy_hits().map_err(driver)?;
            let ContextParts { lookups, misses, staging, .. } = context.parts();
            let row_bytes = |lookup: usize| self.tables[lookups[lookup].table.index()].row_bytes;
            let bytes = bytemuck::cast_slice_mut(staging.words_mut().map_err(driver)?);
            let version = hold.version;
            fetch(&mut MissingRows { lookups, misses, row_bytes: &row_bytes, version, bytes })?;
            context.pool().map_err(driver)?;
        }
        self.offer(context, hold).map_err(E::from)?;
        context.settle().map_err(driver)
    }

    /// Offers to the cache the rows that missed, and the rows that were read through pointers to host memory.
    /// If no row is offered, it takes no lock. During a switch no row is offered, because the switch holds
    /// the locks at times, on a thread that may wait for a processor.
    fn offer(&self, context: &mut LookupContext<D>, hold: &BatchHold<D>) -> Result<(), GpuCacheError> {
        let ContextParts { lookups, misses, pointed, staging } = context.parts();
        if self.is_paused() {
            self.counts.not_admitted.fetch_add((misses.len() + pointed.count()) as u64, Ordering::Relaxed);
            return Ok(());
        }
        let own_key = |miss: &MissedRow| self.keys.own(lookups[miss.lookup].table, miss.id);
        let missed = misses.iter().enumerate().map(|(m, miss)| {
            let ahead = misses.get(m + PREFETCH_AHEAD).and_then(own_key);
            ahead.into_iter().for_each(|key| self.admission.prefetch(key));
            Offer { row: RowId::new(lookups[miss.lookup].table, miss.id), source: JobRow::Staged(miss.word) }
        });
        let pointed = pointed.filter_map(|LookupRow { lookup, id }| {
            let table = lookups[lookup].table;
            let source = JobRow::Host(self.pointer(table, id)?);
            Some(Offer { row: RowId::new(table, id), source })
        });
        let mut offers = missed.chain(pointed).peekable();
        if offers.peek().is_none() {
            return Ok(());
        }
        self.replace(hold.pin.number(), staging, offers)
    }

    fn count(&self, context: &LookupContext<D>, batch: &Batch) {
        let lookups = &context.shape().lookups;
        let mut missed = vec![0; lookups.len()];
        context.misses().iter().for_each(|miss| missed[miss.lookup] += 1);
        let found = missed.iter().zip(context.pointed()).zip(context.collided());
        for (lookup, ((&misses, &pointed), &collided)) in lookups.iter().zip(found) {
            let rows = self.tables[lookup.table.index()].rows;
            let ids = batch.features[lookup.feature].ids.iter().filter(|id| **id < rows).count() as u64;
            let counts = &self.counts.tables[lookup.table.index()];
            let [pointed, collisions] = [pointed, collided].map(u64::from);
            counts.add(&Tally { hits: ids.saturating_sub(misses + pointed), pointed, misses, collisions });
        }
    }

    /// How a lookup's ids become keys of this cache.
    fn lookup_keys(&self, lookup: &Lookup) -> Result<LookupKeys, CacheError> {
        let table = lookup.table.index();
        let Some(code) = self.keys.own_keys().code(lookup.table) else {
            return Err(CacheError::Table { got: table, tables: self.tables.len() });
        };
        let (got, expected) = (lookup.element.row_bytes(lookup.dim), self.tables[table].row_bytes);
        if got != expected {
            return Err(CacheError::RowBytes { table, got, expected });
        }
        let narrow = narrow_column(&self.keys, lookup.table);
        Ok(LookupKeys { base: code.base().0, rows: code.rows(), narrow })
    }
}

/// How ids of a table become index keys; `None` if the index uses the rows' own keys.
fn narrow_column(keys: &RowKeys, table: TableId) -> Option<NarrowColumn> {
    let code = keys.index_keys().code(table).filter(|_| keys.narrow())?;
    Some(NarrowColumn { base: code.base().0, bits: code.bits(), tagged: keys.tagged(table).into() })
}

#[cfg(test)]
#[cfg(all(feature = "cusim", not(flechette_loom)))]
mod cusim_tests;
