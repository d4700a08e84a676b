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

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::context_pool::{AnyContextPool, ContextPool, EmbedError, OnInput};
use super::row_numbers::{RowNumbers, max_ids};
use super::switch::{Changes, NextRows};
use super::versions::{LoadedVersion, Versions};
use super::{Engine, Spent, spend};
use crate::cache::gpu::context::ContextBytes;
use crate::cache::gpu::{ContextShape, GpuCache, GpuCacheError, LookupContext};
use crate::cache::{CacheError, CacheOptions, CacheShape, CacheStats, Switched, WarmRow, Warmed};
use crate::device::cuda::Driver;
use crate::model::Tape;
use crate::pace;
use crate::predict::PredictError;
use crate::schema::{Lookup, Schema};
use crate::store::EmbeddingStore;
use crate::types::{Batch, RowId, Scores, Version};

/// Most ids of a batch in one context, unless one sample can have more. An id takes about 80 bytes in the
/// context.
const MAX_IDS: usize = 1 << 20;
/// Largest default staging buffer of a context.
const MAX_STAGING_BYTES: usize = 64 << 20;

/// The size of a GPU lookup tier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GpuTierOptions<'a> {
    pub schema: &'a Schema,
    pub cache_shape: &'a CacheShape,
    pub cache_options: &'a CacheOptions,
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

impl GpuTierOptions<'_> {
    /// The shape of each context, for batches as they are or with row numbers as ids.
    fn context_shape(&self, row_numbers: Option<&RowNumbers>) -> Result<ContextShape, GpuTierError> {
        let Self { schema, max_samples, .. } = *self;
        let (features, lookups, ids) = match row_numbers {
            None => {
                let ids = (0..schema.features.len()).map(|feature| max_ids(schema, feature)).sum();
                (schema.features.len(), schema.lookups(), ids)
            }
            Some(row_numbers) => (row_numbers.features(), row_numbers.lookups(), row_numbers.max_ids(schema)),
        };
        let staging_bytes = self.context_staging_bytes()?;
        Ok(ContextShape {
            features,
            lookups,
            dense_width: schema.dense_width(),
            stride: schema.input_width(),
            max_samples,
            max_ids: max_samples.saturating_mul(ids).min(MAX_IDS).max(ids),
            staging_bytes: Some(staging_bytes),
            // Hits are copied to this buffer. A batch that hits all its rows needs as much as one that misses
            // all.
            copy_bytes: staging_bytes,
        })
    }

    /// Bytes of the staging buffer of each context.
    ///
    /// # Errors
    /// [`GpuTierError::Staging`] when it cannot hold the rows of a sample.
    fn context_staging_bytes(&self) -> Result<usize, GpuTierError> {
        let bytes =
            |lookup: &Lookup| max_ids(self.schema, lookup.feature) * lookup.element.row_bytes(lookup.dim);
        let sample_bytes: usize = self.schema.lookups().iter().map(bytes).sum();
        let contexts = self.contexts.max(1);
        let largest = self.max_samples.saturating_mul(sample_bytes).min(MAX_STAGING_BYTES).max(sample_bytes);
        let staging = self.staging_bytes.map_or(largest, |all| (all / contexts as u64) as usize);
        if staging < sample_bytes {
            let (got, minimum) = (self.staging_bytes.unwrap_or(0), (contexts * sample_bytes) as u64);
            return Err(GpuTierError::Staging { got, contexts, minimum });
        }
        Ok(staging)
    }
}

/// A model's cache on a device and its lookup contexts.
pub(crate) struct GpuLookupTier {
    /// The cache and its contexts, for any driver.
    pool: Box<dyn AnyContextPool>,
    /// `Some` if the ids of a table are not row numbers.
    row_numbers: Option<RowNumbers>,
    lost: AtomicBool,
    context_bytes: ContextBytes,
    /// Whether the cache may point at rows of the store. If so, lookup times tune the number of pointers.
    points: bool,
}

impl GpuLookupTier {
    /// Allocates the cache and its contexts.
    ///
    /// # Errors
    /// [`GpuTierError`] for an inconsistent shape, and driver errors.
    pub(crate) fn new<D: Driver>(driver: Arc<D>, options: &GpuTierOptions<'_>) -> Result<Self, GpuTierError> {
        let row_numbers = RowNumbers::needed(options.schema);
        let shape = options.context_shape(row_numbers.as_ref())?;
        let cache = GpuCache::new(options.cache_shape, options.cache_options, driver)?;
        let contexts = 0..options.contexts.max(1);
        let idle: Vec<_> = contexts.map(|_| cache.context(&shape)).collect::<Result<_, _>>()?;
        let context_bytes = idle.iter().map(LookupContext::bytes).sum();
        let pool = Box::new(ContextPool::new(cache, idle));
        Ok(Self { pool, row_numbers, lost: AtomicBool::new(false), context_bytes, points: false })
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
        then: OnInput<'_>,
    ) -> Result<(), EmbedError> {
        match &self.row_numbers {
            Some(row_numbers) => self.pool.embed(&row_numbers.of(batch), versions, then),
            None => self.pool.embed(batch, versions, then),
        }
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
            // It takes locks of batches.
            pace::with_locks(|| self.pool.point_at(rows.store()));
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
        let embedded = tier.embed(batch, &self.versions, &mut |input, version| {
            tier.observe(batch, started.elapsed());
            spend(&spent.lookup, started);
            let write = |first: usize, tape: &mut Tape<f32>| {
                for s in 0..tape.samples {
                    let row = &input[(first + s) * stride..][..stride];
                    tape.values[0].from_mut(s, 0)[..stride].copy_from_slice(row);
                }
            };
            scores = Some(self.run_chunks(version, batch, spent, write));
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
