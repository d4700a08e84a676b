//! From a batch to its scores: look rows up, fetch what the cache misses, pool, run the model.
//!
//! - `on_host`: rows are read where the store has them, or from a cache in RAM;
//! - [`on_device`]: rows are looked up and pooled by a device, whose cache lies in its own memory; `trial`: whether
//!   it does so rightly.
//!
//! Whichever it is, the very same bytes are added in the very same order, and the dense layers are one
//! program, so a score does not know whether there is a cache, nor where.

pub(crate) mod on_device;
mod on_host;
mod self_test;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rayon::prelude::*;

use crate::cache::{CacheStats, FlatCache, HostRows, Warmed};
use crate::metrics::ModelMetrics;
use crate::model::loss::sigmoid;
use crate::model::{Model, Tape, Weights, WeightsError, check_shape};
use crate::predict::{Description, Predict, PredictError};
use crate::schema::{Lookup, Schema};
use crate::store::{EmbeddingStore, Opened};
use crate::trace::recorder::Recorder;
use crate::types::{AbsentId, Batch, Scores, TableId, Version};
use on_device::DeviceFront;
use on_host::Scratch;
pub(crate) use self_test::SelfTestError;

/// What stands between batches and the store.
pub enum LookupTier {
    /// Nothing: rows are read where the store has them.
    Store,
    /// A cache in the host's RAM.
    Host(FlatCache),
    /// A cache in a device's memory.
    Device(DeviceFront),
}

/// What an engine is made of, besides the version it serves.
pub struct EngineParts {
    /// The model's name.
    pub name: String,
    /// Where rows are looked up.
    pub front: LookupTier,
    /// Where it counts.
    pub metrics: Arc<ModelMetrics>,
    /// Threads for batches of more than one chunk.
    pub threads: Arc<rayon::ThreadPool>,
    /// Most samples a batch.
    pub max_samples: usize,
}

/// One model, ready to score.
pub struct Engine {
    name: String,
    schema: Arc<Schema>,
    lookups: Vec<Lookup>,
    model: Model<f32>,
    weights: Weights<f32>,
    /// The cache's right to point at rows of the store: above it, so that it ends before the store does.
    host_rows: Vec<HostRows>,
    front: LookupTier,
    store: EmbeddingStore,
    metrics: Arc<ModelMetrics>,
    threads: Arc<rayon::ThreadPool>,
    max_samples: usize,
    /// Shown every batch that is scored.
    recorder: Option<Recorder>,
    /// One a batch in flight; taken and put back, so that none is allocated in steady state.
    scratches: Stock<Scratch>,
    /// One a chunk in work, so that a large batch takes no more memory than its threads do.
    tapes: Stock<Tape<f32>>,
    /// The cache's counts that the metrics have already.
    counted: Mutex<CacheStats>,
}

/// Things that are taken and put back.
struct Stock<T>(Mutex<Vec<T>>);

impl<T> Stock<T> {
    fn take(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    fn put(&self, thing: T) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(thing);
    }
}

/// Nanoseconds that threads spent on a batch.
#[derive(Default)]
pub(crate) struct Spent {
    lookup: AtomicU64,
    dense: AtomicU64,
}

/// Rows that the disk is asked for at once while the cache is warmed.
const WARMED_AT_ONCE: usize = 4096;

impl Engine {
    /// An engine for an opened version.
    ///
    /// # Errors
    /// [`WeightsError`] when the dense tensors are not the architecture's.
    pub fn new(opened: Opened, parts: EngineParts) -> Result<Self, WeightsError> {
        let model = Model::new(&opened.schema);
        let weights = read_weights(&model, &opened)?;
        let EngineParts { name, front, metrics, threads, max_samples } = parts;
        metrics.version.set(opened.store.version().0 as f64);
        let schema = Arc::new(opened.schema);
        let engine = Self {
            name,
            lookups: schema.lookups(),
            schema,
            model,
            weights,
            host_rows: Vec::new(),
            front,
            store: opened.store,
            metrics,
            threads,
            max_samples,
            recorder: None,
            scratches: Stock(Mutex::default()),
            tapes: Stock(Mutex::default()),
            counted: Mutex::default(),
        };
        engine.measure();
        Ok(engine)
    }

    /// Lets the cache point at the rows that the store holds in RAM, or in pinned memory of the cache's device, and
    /// tunes how many it does by the time that lookups take. Where there is no cache, or no such row, nothing changes.
    #[must_use]
    pub(crate) fn pointing(mut self) -> Self {
        match &mut self.front {
            LookupTier::Store => {}
            LookupTier::Host(cache) => {
                let tables = self.store.tables().iter().enumerate().filter(|(_, table)| table.in_ram());
                let right = |(t, _): (usize, _)| cache.host_rows(TableId(t as u32)).ok();
                self.host_rows = tables.filter_map(right).collect();
            }
            LookupTier::Device(front) => front.point_at(&self.store),
        }
        self
    }

    /// Fills the cache with the store's rows, the hottest first, as far as there is room. Rows that the store does
    /// not have are skipped and counted: the second number.
    pub(crate) fn warm(&self, hottest: impl IntoIterator<Item = (TableId, u64)>) -> (Warmed, u64) {
        let mut skipped = 0;
        let mut hottest = hottest.into_iter();
        let chunks = std::iter::from_fn(|| {
            let chunk: Vec<_> = hottest.by_ref().take(WARMED_AT_ONCE).collect();
            self.store.fetch(chunk.iter().copied());
            (!chunk.is_empty()).then_some(chunk)
        });
        let mut rows = chunks.flatten().filter_map(|(table, id)| {
            let row = self.store.row(table, id);
            skipped += u64::from(row.is_none());
            Some((table, id, row?))
        });
        let warmed = match &self.front {
            LookupTier::Store => Warmed::default(),
            // The store's rows are those that the cache was made for.
            LookupTier::Host(cache) => cache.warm(rows).unwrap_or_default(),
            LookupTier::Device(front) => front.warm(&mut rows),
        };
        (warmed, skipped)
    }

    /// The rows that the cache holds, the last used first; none without one.
    #[must_use]
    pub(crate) fn hot_rows(&self) -> Vec<(TableId, u64)> {
        match &self.front {
            LookupTier::Store => Vec::new(),
            LookupTier::Host(cache) => cache.hot_rows(),
            LookupTier::Device(front) => front.hot_rows(),
        }
    }

    /// Has the rows that batches ask for recorded from now on.
    #[must_use]
    pub(crate) fn recorded_by(mut self, recorder: Recorder) -> Self {
        self.recorder = Some(recorder);
        self
    }

    /// The version that scores.
    #[must_use]
    pub fn version(&self) -> Version {
        self.store.version()
    }

    /// The cache's counts, where there is one.
    #[must_use]
    pub(crate) fn cache_stats(&self) -> Option<CacheStats> {
        match &self.front {
            LookupTier::Store => None,
            LookupTier::Host(cache) => Some(cache.stats()),
            LookupTier::Device(front) => Some(front.stats()),
        }
    }

    /// The whole path of a batch.
    fn score(&self, batch: &Batch) -> Result<Vec<f32>, PredictError> {
        let spent = Spent::default();
        let probabilities = match &self.front {
            LookupTier::Store => self.score_from_store(batch, &spent),
            LookupTier::Host(cache) => self.score_through(cache, batch, &spent)?,
            LookupTier::Device(front) if front.is_lost() => self.score_from_store(batch, &spent),
            LookupTier::Device(front) => self.score_on_device(front, batch, &spent)?,
        };
        let seconds = |nanos: AtomicU64| nanos.into_inner() as f64 * 1e-9;
        self.metrics.lookup_seconds.record(seconds(spent.lookup));
        self.metrics.dense_seconds.record(seconds(spent.dense));
        Ok(probabilities)
    }

    /// Scores every chunk of a batch; one alone is not worth a second thread. `write` gives a tape the input of as
    /// many samples as it has, from a sample on.
    fn run_chunks(
        &self,
        samples: usize,
        spent: &Spent,
        write: impl Fn(usize, &mut Tape<f32>) + Sync,
    ) -> Vec<f32> {
        let mut probabilities = vec![0.0; samples];
        let size = self.model.chunk();
        let run = |(chunk, out): (usize, &mut [f32])| {
            let mut tape = self.tapes.take().unwrap_or_else(|| self.model.tape(false));
            tape.samples = out.len();
            let started = Instant::now();
            write(chunk * size, &mut tape);
            let looked_up = spend(&spent.lookup, started);
            self.model.forward(&self.weights, &mut tape);
            spend(&spent.dense, looked_up);
            out.iter_mut().enumerate().for_each(|(s, p)| *p = sigmoid(self.model.logit(&tape, s)));
            self.tapes.put(tape);
        };
        if samples <= size || self.threads.current_num_threads() == 1 {
            probabilities.chunks_mut(size).enumerate().for_each(run);
        } else {
            self.threads.install(|| probabilities.par_chunks_mut(size).enumerate().for_each(run));
        }
        probabilities
    }

    /// Every id past a table of its feature, in sample order; the metrics count by table. One that is
    /// past the wide table too, or past that alone, is one id.
    fn absent(&self, batch: &Batch) -> Vec<AbsentId> {
        let mut fewest = vec![u64::MAX; batch.features.len()];
        for lookup in &self.lookups {
            let rows = self.schema.tables[lookup.table.index()].rows;
            let past = batch.features[lookup.feature].ids.iter().filter(|id| **id >= rows).count();
            if past > 0 {
                self.metrics.tables[lookup.table.index()].absent.increment(past as u64);
                fewest[lookup.feature] = rows.min(fewest[lookup.feature]);
            }
        }
        let mut absent = Vec::new();
        for (feature, rows) in fewest.into_iter().enumerate().filter(|(_, rows)| *rows < u64::MAX) {
            for sample in 0..batch.samples {
                let past = batch.features[feature].sample(sample).iter().filter(|id| **id >= rows);
                let id = AbsentId { sample: sample as u32, feature: feature as u32 };
                absent.extend(past.map(|_| id));
            }
        }
        absent.sort_by_key(|id| id.sample);
        absent
    }
}

impl Predict for Engine {
    fn predict(&self, batch: &Batch) -> Result<Scores, PredictError> {
        if batch.samples > self.max_samples {
            let (needed, limit) = (batch.samples as u64, self.max_samples as u64);
            return Err(PredictError::Capacity { field: "batcher.max_samples", needed, limit });
        }
        check_shape(&self.schema, batch)?;
        self.schema.check_absent(batch)?;
        if let Some(recorder) = &self.recorder {
            recorder.record(batch);
        }
        let absent = self.absent(batch);
        let probabilities = self.score(batch)?;
        if let Some(sample) = probabilities.iter().position(|p| !p.is_finite()) {
            return Err(PredictError::NotFinite { sample });
        }
        Ok(Scores { version: self.version(), probabilities, absent })
    }

    fn describe(&self) -> Description {
        Description {
            model: self.name.clone(),
            version: self.version(),
            schema: self.schema.clone(),
            max_samples: self.max_samples,
        }
    }

    fn ready(&self) -> bool {
        true
    }

    /// Brings the metrics up to the cache's counts.
    fn measure(&self) {
        if let LookupTier::Device(front) = &self.front {
            let (pinned, device) = front.worker_bytes();
            self.metrics.device.lost.set(f64::from(front.is_lost()));
            self.metrics.device.pinned_bytes.set(pinned as f64);
            self.metrics.device.worker_bytes.set(device as f64);
        }
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(now) = self.cache_stats() else { return };
        let zero = Default::default();
        for (t, table) in self.metrics.tables.iter().enumerate() {
            let (now, before) = (now.tables[t], counted.tables.get(t).copied().unwrap_or(zero));
            table.hits.increment(now.hits - before.hits);
            table.misses.increment(now.misses - before.misses);
            table.evictions.increment(now.evictions - before.evictions);
            table.pointed.increment(now.pointed - before.pointed);
            table.collisions.increment(now.collisions - before.collisions);
        }
        let whole = &self.metrics.cache;
        whole.not_admitted.increment(now.not_admitted - counted.not_admitted);
        whole.rejected.increment(now.rejected_full - counted.rejected_full);
        whole.used_bytes.set(now.pool_used_bytes as f64);
        whole.capacity_bytes.set(now.total_bytes as f64);
        whole.entries.set(now.entries as f64);
        whole.pointers.set(now.pointers as f64);
        *counted = now;
    }
}

/// The dense weights of an opened version, laid out for the model.
///
/// # Errors
/// [`WeightsError`] naming the first tensor that is missing or misshapen.
pub(crate) fn read_weights(model: &Model<f32>, opened: &Opened) -> Result<Weights<f32>, WeightsError> {
    model.read_tensors(|name| {
        opened.dense.get(name).map(|tensor| (tensor.shape().to_vec(), tensor.values().to_vec()))
    })
}

/// Adds the time since `from`, and gives the time now.
fn spend(on: &AtomicU64, from: Instant) -> Instant {
    let now = Instant::now();
    on.fetch_add((now - from).as_nanos() as u64, Ordering::Relaxed);
    now
}
