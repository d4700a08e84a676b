//! Scores batches through a cache in a device's memory.
//!
//! Each batch uses a lookup context, which has its own stream and memory on the device. The result is the
//! model's input: dense values and pooled vectors. The store supplies the rows that are not cached. The dense
//! layers run on the host.
//!
//! **A batch that is too large** for a context, or misses more rows than its staging buffer holds, is split
//! in halves. The scores are the same, because a score does not depend on the other samples of its batch.
//!
//! **A device that fails** is abandoned: this batch and all later ones are scored from the store, with the
//! same bits. The failure is logged once and stays in the metrics, because the device is not used again until
//! a restart.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::switch::{Changes, KNOWN_CHUNK, NextRows};
use super::versions::{LoadedVersion, Versions};
use super::{Engine, Spent, spend};
use crate::cache::gpu::context::{ContextBytes, LookupError};
use crate::cache::gpu::{ContextShape, GpuCache, GpuCacheError, GpuHostRows, LookupContext, MissingRows};
use crate::cache::{CacheError, CacheOptions, CacheShape, CacheStats, Switched, WarmRow, Warmed};
use crate::device::cuda::Driver;
use crate::device::cuda::memory::PinnedMemory;
use crate::model::Tape;
use crate::predict::PredictError;
use crate::schema::{AbsentDefault, Arity, Lookup, Schema, Table};
use crate::store::EmbeddingStore;
use crate::sync::EvenPoisoned;
use crate::types::{Batch, Jagged, RowId, Scores, TableId, Version};

/// Most ids of a batch in one context, unless one sample can have more. An id takes about 80 bytes in the
/// context.
const MAX_IDS: usize = 1 << 20;
/// Largest default staging buffer of a context.
const MAX_STAGING_BYTES: usize = 64 << 20;

/// The size of a GPU lookup tier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GpuTierOptions<'a> {
    pub schema: &'a Schema,
    pub cache: &'a CacheShape,
    pub options: &'a CacheOptions,
    /// Batches that run at the same time.
    pub contexts: usize,
    /// Most samples of a batch.
    pub max_samples: usize,
    /// `cache.staging_bytes`, for all contexts together. `None`: for each context as much as its largest
    /// batch can miss, at most 64 MiB.
    pub staging_bytes: Option<u64>,
}

/// Why a GPU lookup tier cannot be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GpuTierError {
    #[error(
        "cache.staging_bytes: {got} bytes for {contexts} workers cannot hold the rows of one sample for \
         each, minimum {minimum}"
    )]
    Staging { got: u64, contexts: usize, minimum: u64 },
    #[error(transparent)]
    Cache(#[from] GpuCacheError),
}

/// A model's cache on a device and its lookup contexts.
pub(crate) struct GpuLookupTier {
    /// The cache and its contexts, for any driver.
    pool: Box<dyn AnyContextPool>,
    /// `Some` if the ids of a table are not row numbers (lossy bits, default row). Each lookup then gets
    /// its own feature, with row numbers.
    columns: Option<Columns>,
    lost: AtomicBool,
    context_bytes: ContextBytes,
    /// Whether the cache may point at rows of the store. If so, lookup times tune the number of pointers.
    points: bool,
}

/// Each lookup with its table.
type Columns = Vec<(Lookup, Table)>;

/// A [`ContextPool`] of any driver, as a trait object.
trait AnyContextPool: Send + Sync {
    fn embed(
        &self,
        batch: &Batch,
        versions: &Versions<LoadedVersion>,
        then: Then<'_>,
    ) -> Result<(), EmbedError>;
    fn switch(&self, to: Version, of: &Changes, rows: &mut NextRows<'_>) -> Result<Switched, GpuCacheError>;
    fn warm(&self, rows: &mut dyn Iterator<Item = WarmRow<'_>>) -> Result<Warmed, GpuCacheError>;
    fn point_at(&self, store: &EmbeddingStore) -> usize;
    fn observe(&self, ids: u64, elapsed: Duration);
    fn hot_rows(&self) -> Result<Vec<RowId>, GpuCacheError>;
    fn stats(&self) -> CacheStats;
}

/// Gets the model's input for a batch, and the batch's version.
pub(crate) type Then<'f> = &'f mut dyn FnMut(&[f32], &LoadedVersion);

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

impl GpuLookupTier {
    /// Allocates the cache and its contexts.
    ///
    /// # Errors
    /// [`GpuTierError`] for an inconsistent shape, and driver errors.
    pub(crate) fn new<D: Driver>(driver: Arc<D>, options: &GpuTierOptions<'_>) -> Result<Self, GpuTierError> {
        let (columns, shape) = context_shape(options)?;
        let cache = GpuCache::new(options.cache, options.options, driver)?;
        let contexts = 0..options.contexts.max(1);
        let idle: Vec<_> = contexts.map(|_| cache.context(&shape)).collect::<Result<_, _>>()?;
        let context_bytes = idle.iter().map(LookupContext::bytes).sum();
        let (registered, idle) = (Mutex::default(), Mutex::new(idle));
        let pool = Box::new(ContextPool { registered, cache, idle, freed: Condvar::new() });
        Ok(Self { pool, columns, lost: AtomicBool::new(false), context_bytes, points: false })
    }

    /// Whether the device has failed and is no longer used.
    #[must_use]
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    #[must_use]
    pub(crate) fn stats(&self) -> CacheStats {
        self.pool.stats()
    }

    /// The memory of all contexts.
    #[must_use]
    pub(crate) fn context_bytes(&self) -> ContextBytes {
        self.context_bytes
    }

    /// Calls `then` with the model's input for a batch, `samples x stride`. Waits for an idle context.
    pub(crate) fn embed(
        &self,
        batch: &Batch,
        versions: &Versions<LoadedVersion>,
        then: Then<'_>,
    ) -> Result<(), EmbedError> {
        self.pool.embed(&self.columns(batch), versions, then)
    }

    /// Switches the cache to the next version. If the device fails, it is abandoned.
    ///
    /// # Errors
    /// [`CacheError::Unfinished`]: a batch did not end in time. Then nothing has changed.
    pub(crate) fn switch(
        &self,
        to: Version,
        changes: &Changes,
        rows: &mut NextRows<'_>,
    ) -> Result<Switched, CacheError> {
        if self.is_lost() {
            return Ok(Switched::default());
        }
        let switched = match self.pool.switch(to, changes, rows) {
            Ok(switched) => switched,
            Err(GpuCacheError::Cache(error @ CacheError::Unfinished(_))) => return Err(error),
            Err(error) => {
                self.lose(&error);
                return Ok(Switched::default());
            }
        };
        if self.points {
            self.pool.point_at(rows.store());
        }
        Ok(switched)
    }

    /// Abandons the device.
    pub(crate) fn lose(&self, error: &dyn std::fmt::Display) {
        if !self.lost.swap(true, Ordering::Relaxed) {
            tracing::error!(%error, "the device failed: the host computes scores until a restart");
        }
    }

    /// Lets the cache point at the tables that the store holds in pinned memory of this driver.
    pub(crate) fn point_at(&mut self, store: &EmbeddingStore) {
        self.points = self.pool.point_at(store) > 0;
    }

    /// Reports how long the lookup of a batch took. These times tune the number of pointers.
    fn observe(&self, batch: &Batch, elapsed: Duration) {
        if self.points {
            self.pool.observe(batch.features.iter().map(|f| f.ids.len() as u64).sum(), elapsed);
        }
    }

    /// Fills the cache, as [`crate::cache::FlatCache::warm`].
    pub(crate) fn warm(&self, rows: &mut dyn Iterator<Item = WarmRow<'_>>) -> Warmed {
        if self.is_lost() {
            return Warmed::default();
        }
        self.pool.warm(rows).unwrap_or_else(|error| {
            self.lose(&error);
            Warmed::default()
        })
    }

    /// The cached rows, most recently used first.
    pub(crate) fn hot_rows(&self) -> Vec<RowId> {
        if self.is_lost() {
            return Vec::new();
        }
        self.pool.hot_rows().unwrap_or_else(|error| {
            self.lose(&error);
            Vec::new()
        })
    }

    /// The batch with row numbers as ids: unchanged if all ids are row numbers, otherwise with one feature
    /// for each lookup.
    fn columns<'b>(&self, batch: &'b Batch) -> Cow<'b, Batch> {
        let Some(columns) = &self.columns else { return Cow::Borrowed(batch) };
        let column = |(lookup, table): &(Lookup, Table)| {
            let Jagged { offsets, ids } = &batch.features[lookup.feature];
            let rows = ids.iter().map(|&id| table.row_of(id).unwrap_or(NO_ROW)).collect();
            Jagged { offsets: offsets.clone(), ids: rows }
        };
        let features = columns.iter().map(column).collect();
        Cow::Owned(Batch { features, dense: batch.dense.clone(), ..*batch })
    }
}

impl Engine {
    /// Scores a batch through the device's cache, in halves if it does not fit in a context.
    pub(crate) fn score_on_gpu(
        &self,
        tier: &GpuLookupTier,
        batch: &Batch,
        spent: &Spent,
    ) -> Result<Scores, PredictError> {
        let mut scores = None;
        let started = Instant::now();
        let stride = self.schema.input_width();
        let embedded = tier.embed(batch, &self.versions, &mut |input, served| {
            tier.observe(batch, started.elapsed());
            spend(&spent.lookup, started);
            let write = |first: usize, tape: &mut Tape<f32>| {
                for s in 0..tape.samples {
                    let row = &input[(first + s) * stride..][..stride];
                    tape.values[0].from_mut(s, 0)[..stride].copy_from_slice(row);
                }
            };
            scores = Some(self.run_chunks(served, batch, spent, write));
        });
        match embedded {
            Ok(()) => Ok(scores.unwrap_or_else(|| self.score_from_store(batch, spent))),
            Err(EmbedError::TooLarge(_)) if batch.samples > 1 => self.score_halves(tier, batch, spent),
            Err(EmbedError::TooLarge(error) | EmbedError::Rejected(error)) => Err(error),
            Err(EmbedError::Abandoned) => Ok(self.score_from_store(batch, spent)),
            Err(EmbedError::Device(error)) => {
                tier.lose(&error);
                Ok(self.score_from_store(batch, spent))
            }
        }
    }

    fn score_halves(
        &self,
        tier: &GpuLookupTier,
        batch: &Batch,
        spent: &Spent,
    ) -> Result<Scores, PredictError> {
        let middle = batch.samples / 2;
        let half = |range| self.score_on_gpu(tier, &batch.part(range), spent);
        let (mut first, second) = (half(0..middle)?, half(middle..batch.samples)?);
        if first.version != second.version {
            // A switch came between the halves. The store scores the whole batch with one version.
            return Ok(self.score_from_store(batch, spent));
        }
        first.probabilities.extend(second.probabilities);
        first.logits.extend(second.logits);
        Ok(first)
    }
}

/// Writes the rows of a batch that are not cached.
fn fetch(served: &LoadedVersion, missing: &mut MissingRows<'_>) -> Result<(), PredictError> {
    let store = &served.store;
    debug_assert_eq!(missing.version(), store.version(), "rows of the batch's version");
    store.fetch((0..missing.len()).map(|m| missing.row(m)));
    missing.fill(|table, id| {
        store.row(table, id).ok_or_else(|| PredictError::Store(format!("no row {id} of table {}", table.0)))
    })
}

/// An id that no table holds, so it reads zeros.
const NO_ROW: u64 = u64::MAX;

/// The columns and the context shape of a tier.
fn context_shape(options: &GpuTierOptions<'_>) -> Result<(Option<Columns>, ContextShape), GpuTierError> {
    let GpuTierOptions { schema, max_samples, .. } = *options;
    let mut lookups = schema.lookups();
    let ids_of = |feature: usize| match schema.features[feature].arity {
        Arity::OneHot => 1,
        Arity::MultiHot { max } => max as usize,
    };
    let row_bytes: usize = lookups.iter().map(|l| ids_of(l.feature) * l.element.row_bytes(l.dim)).sum();
    let is_plain = |t: &Table| t.lossy_bits.is_none() && !matches!(t.default, AbsentDefault::Row(_));
    let columns = (!schema.tables.iter().all(is_plain)).then(|| {
        let column = |l: &Lookup| (*l, schema.tables[l.table.index()].clone());
        let columns: Columns = lookups.iter().map(column).collect();
        lookups.iter_mut().enumerate().for_each(|(l, lookup)| lookup.feature = l);
        columns
    });
    let ids = match &columns {
        None => (0..schema.features.len()).map(ids_of).sum::<usize>(),
        Some(columns) => columns.iter().map(|(lookup, _)| ids_of(lookup.feature)).sum(),
    };
    let contexts = options.contexts.max(1);
    let largest = max_samples.saturating_mul(row_bytes).min(MAX_STAGING_BYTES).max(row_bytes);
    let staging = options.staging_bytes.map_or(largest, |all| (all / contexts as u64) as usize);
    if staging < row_bytes {
        let (got, minimum) = (options.staging_bytes.unwrap_or(0), (contexts * row_bytes) as u64);
        return Err(GpuTierError::Staging { got, contexts, minimum });
    }
    let shape = ContextShape {
        features: columns.as_ref().map_or(schema.features.len(), Vec::len),
        lookups,
        dense_width: schema.dense_width(),
        stride: schema.input_width(),
        max_samples,
        max_ids: max_samples.saturating_mul(ids).min(MAX_IDS).max(ids),
        staging_bytes: Some(staging),
        // Hits are copied to this buffer. A batch that hits all its rows needs as much as one that misses
        // all.
        copy_bytes: staging,
    };
    Ok((columns, shape))
}

/// A cache and its idle contexts.
struct ContextPool<D: Driver> {
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
    /// Waits for an idle context.
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
        then: Then<'_>,
    ) -> Result<(), EmbedError> {
        let mut in_use = self.take();
        // `take` waits for a context, so there is one.
        let Some(context) = &mut in_use.context else { return Ok(()) };
        let hold = self.cache.begin();
        // Taken while the batch is held: the dense layers run after the hold has ended.
        let served = versions.of(hold.version).ok_or(EmbedError::Abandoned)?;
        let write = |missing: &mut MissingRows<'_>| fetch(&served, missing).map_err(EmbedError::Rejected);
        then(self.cache.embed_held(hold, context, batch, write)?, &served);
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
