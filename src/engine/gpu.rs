//! Rows by a cache in a device's memory.
//!
//! A batch takes a worker of the front, which has a stream and memory of its own on the device, and gets the
//! model's input back: every lookup pooled, beside the dense values. The store answers for what the cache
//! misses, as it does on the host. The dense layers run on the host, over the same bits.
//!
//! **A batch that is too large for a worker**, or whose missing rows are too many for its staging memory, is
//! taken in halves. A score does not know what shares its batch, so halves change nothing but the time.
//!
//! **A device is tried** before it serves (`trial`).
//!
//! **A device that fails** is given up: the batch, and all after it, are scored from the store, with the same
//! bits. It is said once in the log, and for good in the metrics, since only a restart brings the device back.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Engine, Spent, spend};
use crate::cache::gpu::lane::LaneError;
use crate::cache::gpu::{DeviceCache, DeviceCacheError, DeviceHostRows, DeviceWorker, Missing, WorkerShape};
use crate::cache::{CacheOptions, CacheShape, CacheStats, Warmed};
use crate::device::cuda::Driver;
use crate::device::cuda::memory::PinnedMemory;
use crate::predict::PredictError;
use crate::schema::{AbsentDefault, Arity, Lookup, Schema, Table};
use crate::store::EmbeddingStore;
use crate::types::{Batch, Jagged, TableId};

/// Most ids of a batch that a worker has room for, unless one sample has more: about 80 bytes each.
const MAX_IDS: usize = 1 << 20;
/// Most staging memory that a worker takes when it is not told how much.
const MAX_STAGING_BYTES: usize = 64 << 20;

/// What a front is to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrontShape<'a> {
    /// Whose batches it takes.
    pub schema: &'a Schema,
    /// The cache's size and tables.
    pub cache: &'a CacheShape,
    /// The cache's options.
    pub options: &'a CacheOptions,
    /// How many batches at a time.
    pub workers: usize,
    /// Most samples of a batch.
    pub max_samples: usize,
    /// `cache.staging_bytes`, of all workers together. `None`: for each as much as its largest batch could
    /// miss, at most 64 MiB.
    pub staging_bytes: Option<u64>,
}

/// Why there is no front.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FrontError {
    /// The staging memory does not hold the rows of one sample for each worker.
    #[error(
        "cache.staging_bytes: {got} bytes for {workers} workers cannot hold the rows of a sample for each, minimum {minimum}"
    )]
    Staging {
        /// What was given.
        got: u64,
        /// How many share it.
        workers: usize,
        /// What would do.
        minimum: u64,
    },
    /// The cache could not be made.
    #[error(transparent)]
    Cache(#[from] DeviceCacheError),
}

/// A model's cache on a device, and the workers that take batches through it.
pub struct DeviceFront {
    tier: Box<dyn DeviceTier>,
    /// Where ids are not the numbers of rows: by lookup, what it reads. Each then has a column of its own.
    columns: Option<Columns>,
    lost: AtomicBool,
    worker_bytes: (usize, usize),
    /// Whether rows of the store are pointed at, so that how many is to be tuned.
    points: bool,
}

/// What each lookup reads, and where.
type Columns = Vec<(Lookup, Table)>;

/// What the engine asks of a cache on a device, whatever its driver.
trait DeviceTier: Send + Sync {
    fn embed(&self, batch: &Batch, fetch: Fetch<'_>, then: &mut dyn FnMut(&[f32])) -> Result<(), EmbedError>;
    fn warm(&self, rows: &mut dyn Iterator<Item = WarmRow<'_>>) -> Result<Warmed, DeviceCacheError>;
    fn point_at(&self, store: &EmbeddingStore) -> Result<usize, DeviceCacheError>;
    fn observe(&self, ids: u64, elapsed: Duration);
    fn hot_rows(&self) -> Result<Vec<(TableId, u64)>, DeviceCacheError>;
    fn stats(&self) -> CacheStats;
}

/// Writes the rows that are missing.
pub(crate) type Fetch<'f> = &'f dyn Fn(&mut Missing<'_>) -> Result<(), PredictError>;

/// A row that a cache is filled with.
pub(crate) type WarmRow<'r> = (TableId, u64, &'r [u8]);

/// Why a batch was not embedded.
#[derive(Debug)]
pub(crate) enum EmbedError {
    /// It is too large for a worker.
    TooLarge(PredictError),
    /// The device does not work.
    Device(DeviceCacheError),
    /// Whoever fetched says no, or the batch is not of the schema's shape.
    Refused(PredictError),
}

impl From<DeviceCacheError> for EmbedError {
    fn from(error: DeviceCacheError) -> Self {
        match error {
            DeviceCacheError::Lane(LaneError::Capacity { field, limit, got }) => {
                Self::TooLarge(PredictError::Capacity { field, needed: got, limit })
            }
            DeviceCacheError::Lane(LaneError::Shape { field, expected, got }) => {
                Self::Refused(PredictError::Shape { field, expected, got })
            }
            error => Self::Device(error),
        }
    }
}

impl DeviceFront {
    /// Takes the memory, of the device and of the host.
    ///
    /// # Errors
    /// [`FrontError`] for a shape that does not hold together, and what the driver says.
    pub(crate) fn new<D: Driver>(driver: Arc<D>, shape: &FrontShape<'_>) -> Result<Self, FrontError> {
        let (columns, worker) = worker_shape(shape)?;
        let cache = DeviceCache::new(shape.cache, shape.options, driver)?;
        let worker = |_| cache.worker(&worker);
        let idle: Vec<_> = (0..shape.workers.max(1)).map(worker).collect::<Result<_, _>>()?;
        let sum = |(p, d), worker: &DeviceWorker<D>| (p + worker.bytes().0, d + worker.bytes().1);
        let worker_bytes = idle.iter().fold((0, 0), sum);
        let tier = Box::new(Workers {
            pointed: Mutex::default(),
            cache,
            idle: Mutex::new(idle),
            freed: Condvar::new(),
        });
        Ok(Self { tier, columns, lost: AtomicBool::new(false), worker_bytes, points: false })
    }

    /// Whether the device has failed, so that nothing is asked of it any more.
    #[must_use]
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// The cache's counts.
    #[must_use]
    pub(crate) fn stats(&self) -> CacheStats {
        self.tier.stats()
    }

    /// What all workers have of pinned memory of the host, and of the device's, in bytes: beside `cache.bytes`.
    #[must_use]
    pub(crate) fn worker_bytes(&self) -> (usize, usize) {
        self.worker_bytes
    }

    /// Gives `then` the model's input of a batch, `samples x stride`. Waits for a worker.
    pub(crate) fn embed(
        &self,
        batch: &Batch,
        fetch: Fetch<'_>,
        then: &mut dyn FnMut(&[f32]),
    ) -> Result<(), EmbedError> {
        self.tier.embed(&self.columns(batch), fetch, then)
    }

    /// Gives the device up.
    pub(crate) fn lose(&self, error: &dyn std::fmt::Display) {
        if !self.lost.swap(true, Ordering::Relaxed) {
            tracing::error!(%error, "the device failed: scores come from the host from now on, until a restart");
        }
    }

    /// Lets the cache point at the tables that the store holds in the device's pinned memory.
    pub(crate) fn point_at(&mut self, store: &EmbeddingStore) {
        match self.tier.point_at(store) {
            Ok(tables) => self.points = tables > 0,
            Err(error) => tracing::warn!(%error, "cache.pointers: nothing more is pointed at"),
        }
    }

    /// Tells the cache how long a batch took to get its rows: what the number of pointers is tuned by.
    fn observe(&self, batch: &Batch, elapsed: Duration) {
        if self.points {
            self.tier.observe(batch.features.iter().map(|f| f.ids.len() as u64).sum(), elapsed);
        }
    }

    /// Fills the cache, as [`crate::cache::FlatCache::warm`].
    pub(crate) fn warm(&self, rows: &mut dyn Iterator<Item = WarmRow<'_>>) -> Warmed {
        self.tier.warm(rows).unwrap_or_else(|error| {
            self.lose(&error);
            Warmed::default()
        })
    }

    /// The rows that the cache holds, the last used first.
    pub(crate) fn hot_rows(&self) -> Vec<(TableId, u64)> {
        if self.is_lost() {
            return Vec::new();
        }
        self.tier.hot_rows().unwrap_or_else(|error| {
            self.lose(&error);
            Vec::new()
        })
    }

    /// The batch by row numbers: as it is where ids are such, else a column a lookup.
    fn columns<'b>(&self, batch: &'b Batch) -> Cow<'b, Batch> {
        let Some(columns) = &self.columns else { return Cow::Borrowed(batch) };
        let column = |(lookup, table): &(Lookup, Table)| {
            let Jagged { offsets, ids } = &batch.features[lookup.feature];
            let rows = ids.iter().map(|&id| table.row_of(id).unwrap_or(NO_ROW)).collect();
            Jagged { offsets: offsets.clone(), ids: rows }
        };
        let features = columns.iter().map(column).collect();
        Cow::Owned(Batch { samples: batch.samples, dense: batch.dense.clone(), features })
    }
}

impl Engine {
    /// Scores a batch by a device's cache, in halves where it is too large for a worker.
    pub(crate) fn score_on_device(
        &self,
        front: &DeviceFront,
        batch: &Batch,
        spent: &Spent,
    ) -> Result<Vec<f32>, PredictError> {
        let mut scores = Vec::new();
        let started = Instant::now();
        let stride = self.schema.input_width();
        let embedded = front.embed(batch, &|missing| self.fetch(missing), &mut |input| {
            front.observe(batch, started.elapsed());
            spend(&spent.lookup, started);
            scores = self.run_chunks(batch.samples, spent, |first, tape| {
                for s in 0..tape.samples {
                    let row = &input[(first + s) * stride..][..stride];
                    tape.values[0].from_mut(s, 0)[..stride].copy_from_slice(row);
                }
            });
        });
        match embedded {
            Ok(()) => Ok(scores),
            Err(EmbedError::TooLarge(_)) if batch.samples > 1 => {
                let middle = batch.samples / 2;
                for part in [0..middle, middle..batch.samples] {
                    scores.extend(self.score_on_device(front, &batch.part(part), spent)?);
                }
                Ok(scores)
            }
            Err(EmbedError::TooLarge(error) | EmbedError::Refused(error)) => Err(error),
            Err(EmbedError::Device(error)) => {
                front.lose(&error);
                Ok(self.score_from_store(batch, spent))
            }
        }
    }

    /// Writes the rows that a device's cache does not hold.
    fn fetch(&self, missing: &mut Missing<'_>) -> Result<(), PredictError> {
        self.store.fetch((0..missing.len()).map(|m| missing.row(m)));
        for m in 0..missing.len() {
            let (table, id) = missing.row(m);
            let row = self.store.row(table, id);
            let row = row.ok_or_else(|| PredictError::Store(format!("no row {id} of table {}", table.0)))?;
            missing.bytes_mut(m).copy_from_slice(row);
        }
        Ok(())
    }
}

/// Past every table, and so read as zeros.
const NO_ROW: u64 = u64::MAX;

/// The columns and the worker of a front.
fn worker_shape(shape: &FrontShape<'_>) -> Result<(Option<Columns>, WorkerShape), FrontError> {
    let FrontShape { schema, max_samples, .. } = *shape;
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
    let workers = shape.workers.max(1);
    let largest = max_samples.saturating_mul(row_bytes).min(MAX_STAGING_BYTES).max(row_bytes);
    let staging = shape.staging_bytes.map_or(largest, |all| (all / workers as u64) as usize);
    if staging < row_bytes {
        let (got, minimum) = (shape.staging_bytes.unwrap_or(0), (workers * row_bytes) as u64);
        return Err(FrontError::Staging { got, workers, minimum });
    }
    let worker = WorkerShape {
        features: columns.as_ref().map_or(schema.features.len(), Vec::len),
        lookups,
        dense_width: schema.dense_width(),
        stride: schema.input_width(),
        max_samples,
        max_ids: max_samples.saturating_mul(ids).min(MAX_IDS).max(ids),
        staging_bytes: Some(staging),
        // The hits of a batch are no more than it could miss.
        copy_bytes: staging,
    };
    Ok((columns, worker))
}

/// A cache and the workers that are not at work.
struct Workers<D: Driver> {
    /// The right to point at rows of the store. It ends first.
    pointed: Mutex<Vec<DeviceHostRows<D>>>,
    cache: DeviceCache<D>,
    idle: Mutex<Vec<DeviceWorker<D>>>,
    freed: Condvar,
}

/// A worker at work, put back whatever happens: there is one until then.
struct AtWork<'w, D: Driver> {
    worker: Option<DeviceWorker<D>>,
    home: &'w Workers<D>,
}

impl<D: Driver> Workers<D> {
    fn take(&self) -> AtWork<'_, D> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.freed.wait_while(idle, |idle| idle.is_empty());
        AtWork { worker: waited.unwrap_or_else(PoisonError::into_inner).pop(), home: self }
    }
}

impl<D: Driver> Drop for AtWork<'_, D> {
    fn drop(&mut self) {
        self.home.idle.lock().unwrap_or_else(PoisonError::into_inner).extend(self.worker.take());
        self.home.freed.notify_one();
    }
}

impl<D: Driver> DeviceTier for Workers<D> {
    fn embed(&self, batch: &Batch, fetch: Fetch<'_>, then: &mut dyn FnMut(&[f32])) -> Result<(), EmbedError> {
        let mut at_work = self.take();
        // There is one: `take` waits for it.
        let Some(worker) = &mut at_work.worker else { return Ok(()) };
        let input = worker.embed(batch, |missing| fetch(missing).map_err(EmbedError::Refused))?;
        then(input);
        Ok(())
    }

    fn warm(&self, rows: &mut dyn Iterator<Item = WarmRow<'_>>) -> Result<Warmed, DeviceCacheError> {
        self.cache.warm(rows)
    }

    fn point_at(&self, store: &EmbeddingStore) -> Result<usize, DeviceCacheError> {
        let mut pointed = self.pointed.lock().unwrap_or_else(PoisonError::into_inner);
        for (t, table) in store.tables().iter().enumerate().map(|(t, table)| (TableId(t as u32), table)) {
            // Rows in memory of another kind are not pointed at.
            let memory = table.shared_rows().and_then(|rows| rows.downcast::<PinnedMemory<D>>().ok());
            let Some(memory) = memory else { continue };
            match self.cache.host_rows(store.version(), t, memory) {
                Ok(right) => pointed.push(right),
                // The others may be pointed at all the same.
                Err(DeviceCacheError::Tagged { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(pointed.len())
    }

    fn observe(&self, ids: u64, elapsed: Duration) {
        self.cache.observe(ids, elapsed);
    }

    fn hot_rows(&self) -> Result<Vec<(TableId, u64)>, DeviceCacheError> {
        self.cache.hot_rows()
    }

    fn stats(&self) -> CacheStats {
        self.cache.stats()
    }
}
