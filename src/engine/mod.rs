//! From a batch to its scores: look rows up, fetch what is not cached, pool, run the model.
//!
//! - `host`: rows come from the store, or from a cache in RAM;
//! - [`gpu`]: a device looks rows up in a cache in its own memory and pools them; `context_pool`: its batches
//!   wait for an idle context; `row_numbers`: the ids that it looks up;
//! - `self_test`: compares a device with the store before it serves;
//! - `measure`: the metrics of an engine;
//! - `versions`: what belongs to a version, and which versions batches use; `switch`: taking over a new one.
//!
//! In each case the same bytes are added in the same order, and the same code computes the dense layers. So a
//! score does not depend on whether there is a cache, nor on where the cache is.

mod context_pool;
pub(crate) mod gpu;
mod host;
mod measure;
mod row_numbers;
mod self_test;
pub(crate) mod switch;
#[cfg(test)]
#[cfg(not(flechette_loom))]
pub(crate) mod tests;
mod versions;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rayon::prelude::*;

use crate::cache::{CacheStats, FlatCache, HostRows, WarmRow, Warmed};
use crate::metrics::ModelMetrics;
use crate::model::loss::sigmoid;
use crate::model::{Model, Tape, Weights, WeightsError, check_shape};
use crate::pace;
use crate::predict::{Description, Predict, PredictError};
use crate::schema::{Lookup, Schema};
use crate::store::Opened;
use crate::sync::EvenPoisoned;
use crate::trace::recorder::Recorder;
use crate::types::{AbsentId, Batch, RowId, Scores, TableId, Times, Version};
use gpu::GpuLookupTier;
use host::LookupScratch;
pub(crate) use versions::SharedVersion;
use versions::{LoadedVersion, Versions};

/// Where batches look up rows.
pub(crate) enum LookupTier {
    /// In the store, without a cache.
    Store,
    /// In a cache in RAM.
    Host(FlatCache),
    /// In a cache in a device's memory.
    Gpu(GpuLookupTier),
}

impl LookupTier {
    /// Fills the cache with rows of a store, in this order, while there is room.
    fn warm<'r>(&self, mut rows: impl Iterator<Item = WarmRow<'r>>) -> Warmed {
        match self {
            Self::Store => Warmed::default(),
            // The rows of the store fit the cache's tables, so there is no error.
            Self::Host(cache) => cache.warm(rows).unwrap_or_default(),
            Self::Gpu(tier) => tier.warm(&mut rows),
        }
    }
}

/// The parts of an engine, besides the version that it serves.
#[allow(missing_docs)]
pub(crate) struct EngineParts {
    /// The model's name.
    pub name: String,
    pub lookup_tier: LookupTier,
    pub metrics: Arc<ModelMetrics>,
    /// Threads for batches of more than one chunk. Models that share a pool take turns by batches. So that a
    /// model with long batches does not hold up the others, each has a pool of its own, and the system's
    /// scheduler shares the processors.
    pub threads: Arc<rayon::ThreadPool>,
    /// Most samples of a batch.
    pub max_samples: usize,
}

/// One model, ready to score.
pub struct Engine {
    /// Records every batch that is scored. Dropped first: at the end of the process there may be no time left
    /// after the tables.
    recorder: Option<Recorder>,
    name: String,
    schema: Arc<Schema>,
    lookups: Vec<Lookup>,
    model: Model<f32>,
    /// Lets the cache point at rows of the store. A pointer is a row number, so it stays valid for every
    /// version with its tables in RAM.
    host_rows: Vec<HostRows>,
    lookup_tier: LookupTier,
    /// Declared after the tier, which may point at rows of the store and is dropped first.
    versions: Versions<LoadedVersion>,
    /// Held during a switch.
    switching: Mutex<()>,
    metrics: Arc<ModelMetrics>,
    threads: Arc<rayon::ThreadPool>,
    max_samples: usize,
    /// Idle buffers. Each running batch takes one.
    scratches: Pool<LookupScratch>,
    /// Idle tapes. Each running chunk takes one, so the memory depends on the number of threads and not on
    /// the size of a batch.
    tapes: Pool<Tape<f32>>,
    /// The cache's counts that are already in the metrics.
    counted: Mutex<CacheStats>,
}

/// Objects for reuse, so that a batch allocates none in steady state.
struct Pool<T>(Mutex<Vec<T>>);

impl<T> Pool<T> {
    fn take(&self) -> Option<T> {
        self.0.lock().even_poisoned().pop()
    }

    fn put(&self, thing: T) {
        self.0.lock().even_poisoned().push(thing);
    }
}

/// Nanoseconds that all threads spent on a batch.
#[derive(Default)]
pub(crate) struct Spent {
    lookup: AtomicU64,
    dense: AtomicU64,
}

/// Rows that are fetched from disk at once while the cache is warmed.
const WARM_CHUNK: usize = 4096;

impl Engine {
    /// An engine for an opened version.
    ///
    /// # Errors
    /// [`WeightsError`] when the dense tensors do not fit the architecture.
    pub(crate) fn new(opened: Opened, parts: EngineParts) -> Result<Self, WeightsError> {
        let model = Model::new(&opened.schema);
        let weights = read_weights(&model, &opened)?;
        let (schema, version) = LoadedVersion::new(opened, weights);
        Ok(Self::serving(version, Arc::new(schema), parts))
    }

    /// An engine without a cache on the same threads, for another version of the same model that
    /// [`Self::accept`] has accepted.
    pub(crate) fn secondary(&self, version: SharedVersion, metrics: Arc<ModelMetrics>) -> Self {
        let (name, max_samples, threads) = (self.name.clone(), self.max_samples, self.threads.clone());
        let parts = EngineParts { name, lookup_tier: LookupTier::Store, metrics, threads, max_samples };
        Self::serving(version, self.schema.clone(), parts)
    }

    fn serving(version: SharedVersion, schema: Arc<Schema>, parts: EngineParts) -> Self {
        let EngineParts { name, lookup_tier, metrics, threads, max_samples } = parts;
        let number = version.version();
        metrics.version.set(number.0 as f64);
        let engine = Self {
            name,
            lookups: schema.lookups(),
            model: Model::new(&schema),
            schema,
            host_rows: Vec::new(),
            lookup_tier,
            versions: Versions::new(number, version),
            switching: Mutex::default(),
            metrics,
            threads,
            max_samples,
            recorder: None,
            scratches: Pool(Mutex::default()),
            tapes: Pool(Mutex::default()),
            counted: Mutex::default(),
        };
        engine.measure();
        engine
    }

    /// Lets the cache point at the rows that the store holds in RAM, or in pinned memory of the cache's
    /// device. The lookup times tune the number of pointers. Without a cache or such rows nothing changes.
    #[must_use]
    pub(crate) fn with_pointers(mut self) -> Self {
        let version = self.versions.current();
        match &mut self.lookup_tier {
            LookupTier::Store => {}
            LookupTier::Host(cache) => {
                let tables = version.store.tables().iter().enumerate().filter(|(_, table)| table.is_owned());
                let host_rows = |(t, _): (usize, _)| cache.host_rows(TableId(t as u32)).ok();
                self.host_rows = tables.filter_map(host_rows).collect();
            }
            LookupTier::Gpu(tier) => tier.point_at(&version.store),
        }
        self
    }

    /// Fills the cache with these rows of the store, in this order, while there is room. Also returns how
    /// many rows were skipped because the store does not have them.
    pub(crate) fn warm(&self, hottest: impl IntoIterator<Item = RowId>) -> (Warmed, u64) {
        let version = self.versions.current();
        let mut skipped = 0;
        let mut hottest = hottest.into_iter();
        let chunks = std::iter::from_fn(|| {
            let chunk: Vec<_> = hottest.by_ref().take(WARM_CHUNK).collect();
            version.store.fetch(chunk.iter().copied());
            (!chunk.is_empty()).then_some(chunk)
        });
        let rows = chunks.flatten().filter_map(|row| {
            let bytes = version.store.row(row.table(), row.row());
            skipped += u64::from(bytes.is_none());
            Some(WarmRow { row, bytes: bytes? })
        });
        (self.lookup_tier.warm(rows), skipped)
    }

    /// The cached rows, most recently used first; none without a cache.
    #[must_use]
    pub(crate) fn hot_rows(&self) -> Vec<RowId> {
        match &self.lookup_tier {
            LookupTier::Store => Vec::new(),
            LookupTier::Host(cache) => cache.hot_rows(),
            LookupTier::Gpu(tier) => tier.hot_rows(),
        }
    }

    /// Records the rows of all batches from now on.
    #[must_use]
    pub(crate) fn with_recorder(mut self, recorder: Recorder) -> Self {
        self.recorder = Some(recorder);
        self
    }

    /// Computes batches of more than one chunk on these threads.
    #[must_use]
    pub(crate) fn with_threads(mut self, threads: Arc<rayon::ThreadPool>) -> Self {
        self.threads = threads;
        self
    }

    /// The version that is served.
    #[must_use]
    pub(crate) fn version(&self) -> Version {
        self.versions.version()
    }

    /// Whether rows are looked up in a cache first.
    pub(crate) fn has_cache(&self) -> bool {
        !matches!(self.lookup_tier, LookupTier::Store)
    }

    /// The cache's counts, if there is a cache.
    #[must_use]
    pub(crate) fn cache_stats(&self) -> Option<CacheStats> {
        match &self.lookup_tier {
            LookupTier::Store => None,
            LookupTier::Host(cache) => Some(cache.stats()),
            LookupTier::Gpu(tier) => Some(tier.stats()),
        }
    }

    /// Scores a batch that [`Predict::predict`] has checked. Absent ids are left out.
    fn score(&self, batch: &Batch) -> Result<Scores, PredictError> {
        let spent = Spent::default();
        let mut scores = match &self.lookup_tier {
            LookupTier::Store => self.score_from_store(batch, &spent),
            LookupTier::Host(cache) => self.score_from_cache(cache, batch, &spent)?,
            LookupTier::Gpu(tier) if tier.is_lost() => self.score_from_store(batch, &spent),
            LookupTier::Gpu(tier) => self.score_on_gpu(tier, batch, &spent)?,
        };
        let [lookup, dense] =
            [spent.lookup, spent.dense].map(|nanos| Duration::from_nanos(nanos.into_inner()));
        self.metrics.batches.lookup_seconds.record(lookup);
        self.metrics.batches.dense_seconds.record(dense);
        scores.times = Times { lookup, dense, ..Times::default() };
        Ok(scores)
    }

    /// Scores every chunk of a batch; a single chunk runs on this thread. `write` fills a tape with the input
    /// rows of its samples, starting at the given sample.
    fn run_chunks(
        &self,
        LoadedVersion { weights, store, .. }: &LoadedVersion,
        batch: &Batch,
        spent: &Spent,
        write: impl Fn(usize, &mut Tape<f32>) + Sync,
    ) -> Scores {
        let mut probabilities = vec![0.0; batch.samples];
        let threads = self.threads.current_num_threads();
        let size = self.model.scoring_chunk(batch.samples, threads);
        // If the logits are returned too, the probabilities are computed from them at the end.
        // An infinite logit is no score, but its sigmoid would be 0 or 1.
        let finite = |logit: f32| if logit.is_finite() { logit } else { f32::NAN };
        let score = |logit| if batch.logits { finite(logit) } else { sigmoid(finite(logit)) };
        let run = |(chunk, out): (usize, &mut [f32])| {
            let mut tape = self.tapes.take().unwrap_or_else(|| self.model.scoring_tape());
            tape.samples = out.len();
            let started = Instant::now();
            write(chunk * size, &mut tape);
            let looked_up = spend(&spent.lookup, started);
            self.model.forward(weights, &mut tape);
            spend(&spent.dense, looked_up);
            out.iter_mut().enumerate().for_each(|(s, p)| *p = score(self.model.logit(&tape, s)));
            self.tapes.put(tape);
        };
        if batch.samples <= size || threads == 1 {
            probabilities.chunks_mut(size).enumerate().for_each(run);
        } else {
            self.threads.install(|| probabilities.par_chunks_mut(size).enumerate().for_each(run));
        }
        let mut logits = Vec::new();
        if batch.logits {
            logits.clone_from(&probabilities);
            probabilities.iter_mut().for_each(|p| *p = sigmoid(*p));
        }
        Scores {
            version: store.version(),
            probabilities,
            logits,
            absent: Vec::new(),
            times: Times::default(),
        }
    }

    /// Every absent id, in sample order: an id that a table of its feature does not hold. An id that is
    /// absent from several tables of its feature is listed once. The metrics count absent ids by table.
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
        pace::count_batch();
        let scores = self.score(batch)?;
        // The requests of a batch that fails are computed again, one by one.
        if let Some(recorder) = &self.recorder {
            recorder.record(batch);
        }
        Ok(Scores { absent: self.absent(batch), ..scores })
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

    fn measure(&self) {
        self.export_metrics();
    }
}

/// The dense weights of an opened version, laid out for the model.
///
/// # Errors
/// [`WeightsError`] naming the first tensor that is missing, misshapen or not finite.
pub(crate) fn read_weights(model: &Model<f32>, opened: &Opened) -> Result<Weights<f32>, WeightsError> {
    let mut not_finite = None;
    let weights = model.read_tensors(|name| {
        let tensor = opened.dense.get(name)?;
        // With such a weight every score would be refused, as if the request were wrong.
        if not_finite.is_none() && tensor.values().iter().any(|weight| !weight.is_finite()) {
            not_finite = Some(name.to_owned());
        }
        Some((tensor.shape().to_vec(), tensor.values().to_vec()))
    })?;
    not_finite.map_or(Ok(weights), |name| Err(WeightsError::NotFinite(name)))
}

/// Adds the time since `from` to `on`, in nanoseconds. Returns the current time.
fn spend(on: &AtomicU64, from: Instant) -> Instant {
    let now = Instant::now();
    on.fetch_add((now - from).as_nanos() as u64, Ordering::Relaxed);
    now
}
