//! A cache in a device's memory and its lookup contexts. Each batch takes an idle context. A server has one
//! for each thread that computes batches, so that none waits.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

use super::switch::{Changes, KNOWN_CHUNK, NextRows};
use super::versions::{LoadedVersion, Versions};
use crate::cache::gpu::context::LookupError;
use crate::cache::gpu::{GpuCache, GpuCacheError, GpuHostRows, LookupContext, MissingRows};
use crate::cache::{CacheStats, Switched, WarmRow, Warmed};
use crate::device::cuda::Driver;
use crate::device::cuda::memory::PinnedMemory;
use crate::predict::PredictError;
use crate::store::EmbeddingStore;
use crate::sync::EvenPoisoned;
use crate::types::{Batch, RowId, TableId, Version};

/// A [`ContextPool`] of any driver, as a trait object.
pub(crate) trait AnyContextPool: Send + Sync {
    fn embed(
        &self,
        batch: &Batch,
        versions: &Versions<LoadedVersion>,
        then: OnInput<'_>,
    ) -> Result<(), EmbedError>;
    fn switch(
        &self,
        to: Version,
        changes: &Changes,
        rows: &mut NextRows<'_>,
    ) -> Result<Switched, GpuCacheError>;
    fn warm(&self, rows: &mut dyn Iterator<Item = WarmRow<'_>>) -> Result<Warmed, GpuCacheError>;
    fn point_at(&self, store: &EmbeddingStore) -> usize;
    fn observe(&self, ids: u64, elapsed: Duration);
    fn hot_rows(&self) -> Result<Vec<RowId>, GpuCacheError>;
    fn stats(&self) -> CacheStats;
}

/// Gets the model's input for a batch, and the batch's version.
pub(crate) type OnInput<'f> = &'f mut dyn FnMut(&[f32], &LoadedVersion);

/// Why a batch was not embedded.
#[derive(Debug)]
pub(crate) enum EmbedError {
    /// The batch does not fit in a context.
    TooLarge(PredictError),
    /// The device failed.
    Device(GpuCacheError),
    /// The batch's version is no longer in use: a switch has failed, so the device is abandoned.
    Abandoned,
    /// Rows could not be fetched, or the batch does not have the schema's shape.
    Rejected(PredictError),
}

impl From<GpuCacheError> for EmbedError {
    fn from(error: GpuCacheError) -> Self {
        match error {
            GpuCacheError::Lookup(LookupError::Capacity { field, limit, got }) => {
                Self::TooLarge(PredictError::Capacity { field, needed: got, limit })
            }
            GpuCacheError::Lookup(LookupError::Shape { field, expected, got }) => {
                Self::Rejected(PredictError::Shape { field, expected, got })
            }
            error => Self::Device(error),
        }
    }
}

/// A cache and its idle contexts.
pub(crate) struct ContextPool<D: Driver> {
    /// Registered rows of the store. Declared before the cache, so that they are dropped first.
    registered: Mutex<Vec<GpuHostRows<D>>>,
    cache: GpuCache<D>,
    idle: Mutex<Vec<LookupContext<D>>>,
    freed: Condvar,
}

/// A context in use. Dropping it puts the context back.
struct InUse<'p, D: Driver> {
    context: Option<LookupContext<D>>,
    pool: &'p ContextPool<D>,
}

impl<D: Driver> ContextPool<D> {
    /// A pool of these contexts of the cache.
    pub(crate) fn new(cache: GpuCache<D>, idle: Vec<LookupContext<D>>) -> Self {
        Self { registered: Mutex::default(), cache, idle: Mutex::new(idle), freed: Condvar::new() }
    }

    /// Takes an idle context. With more threads than contexts, waits until another batch has ended.
    fn take(&self) -> InUse<'_, D> {
        let idle = self.idle.lock().even_poisoned();
        let waited = self.freed.wait_while(idle, |idle| idle.is_empty());
        InUse { context: waited.even_poisoned().pop(), pool: self }
    }
}

impl<D: Driver> Drop for InUse<'_, D> {
    fn drop(&mut self) {
        self.pool.idle.lock().even_poisoned().extend(self.context.take());
        self.pool.freed.notify_one();
    }
}

impl<D: Driver> AnyContextPool for ContextPool<D> {
    fn embed(
        &self,
        batch: &Batch,
        versions: &Versions<LoadedVersion>,
        then: OnInput<'_>,
    ) -> Result<(), EmbedError> {
        let mut in_use = self.take();
        // `take` waits for a context, so there is one.
        let Some(context) = &mut in_use.context else { return Ok(()) };
        let hold = self.cache.begin();
        // Taken while the batch is held: the dense layers run after the hold has ended.
        let version = versions.of(hold.version).ok_or(EmbedError::Abandoned)?;
        let write = |missing: &mut MissingRows<'_>| fetch(&version, missing).map_err(EmbedError::Rejected);
        then(self.cache.embed_held(hold, context, batch, write)?, &version);
        Ok(())
    }

    fn switch(
        &self,
        to: Version,
        changes: &Changes,
        rows: &mut NextRows<'_>,
    ) -> Result<Switched, GpuCacheError> {
        match changes {
            Changes::Unknown => self.cache.switch(to, |cached| Ok(rows.compared(&cached.rows()?))),
            Changes::Rows(changed) => {
                let chunks = changed.chunks(KNOWN_CHUNK);
                self.cache.switch(to, |_| Ok(chunks.flat_map(|chunk| rows.known(chunk))))
            }
        }
    }

    fn warm(&self, rows: &mut dyn Iterator<Item = WarmRow<'_>>) -> Result<Warmed, GpuCacheError> {
        self.cache.warm(rows)
    }

    /// Returns the number of tables at which the cache may point.
    fn point_at(&self, store: &EmbeddingStore) -> usize {
        let mut registered = self.registered.lock().even_poisoned();
        // First, because a table that did not change is registered again with the same memory: removes the
        // pointers into the memory of the version before.
        drop(std::mem::take(&mut *registered));
        for (t, table) in store.tables().iter().enumerate().map(|(t, table)| (TableId(t as u32), table)) {
            // Rows in other memory cannot be pointed at.
            let memory = table.shared_rows().and_then(|rows| rows.downcast::<PinnedMemory<D>>().ok());
            let Some(memory) = memory else { continue };
            match self.cache.host_rows(store.version(), t, memory) {
                Ok(rows) => registered.push(rows),
                Err(GpuCacheError::SharedKeys { .. }) => {}
                // The table's rows are cached all the same, and other tables can be pointed at.
                Err(error) => tracing::warn!(table = t.0, %error, "cache.pointers: no pointers to a table"),
            }
        }
        registered.len()
    }

    fn observe(&self, ids: u64, elapsed: Duration) {
        self.cache.observe(ids, elapsed);
    }

    fn hot_rows(&self) -> Result<Vec<RowId>, GpuCacheError> {
        self.cache.hot_rows()
    }

    fn stats(&self) -> CacheStats {
        self.cache.stats()
    }
}

/// Writes the rows of a batch that are not cached.
fn fetch(version: &LoadedVersion, missing: &mut MissingRows<'_>) -> Result<(), PredictError> {
    let store = &version.store;
    debug_assert_eq!(missing.version(), store.version(), "rows of the batch's version");
    store.fetch((0..missing.len()).map(|m| missing.row(m)));
    missing.fill(|table, id| {
        store.row(table, id).ok_or_else(|| PredictError::Store(format!("no row {id} of table {}", table.0)))
    })
}
