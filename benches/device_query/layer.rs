//! An embedding layer over caches on a device, warm.

use std::sync::Arc;
use std::time::Instant;

use flechette::cache::gpu::{DeviceCache, DeviceCacheError, DeviceWorker, Missing, WorkerShape};
use flechette::cache::{CacheOptions, CacheShape, TableShape};
use flechette::device::cuda::Driver;
use flechette::device::cuda::memory::DeviceMemory;
use flechette::schema::Lookup;
use flechette::store::EmbeddingStore;
use flechette::types::{Batch, TableId};

use crate::harness::Options;
use crate::traffic::Traffic;

/// Batches that come in turn.
const BATCHES: usize = 64;
/// Rounds of them that fill a cache before it is measured.
const WARMING: usize = 3;
/// Bytes that are copied to see what the device's memory can do.
const COPIED: usize = 1 << 30;

/// How a layer gets its rows.
#[derive(Clone, Copy)]
pub enum Way {
    /// One query over all tables, hits copied while the host writes the misses' rows.
    Flat,
    /// The same, and all rows are read when the misses' rows are there.
    Coupled,
    /// One cache, and a query a table, by so many threads.
    Apart { threads: usize },
    /// A cache a table, with a query each, by so many threads.
    PerTable { threads: usize },
}

/// A query: a worker, and the columns of the batches that it takes.
struct Query<D: Driver> {
    worker: DeviceWorker<D>,
    batches: Vec<Batch>,
    /// The store's number of the query's first table.
    first: u32,
}

/// A layer, warm.
pub struct Layer<D: Driver> {
    queries: Vec<Query<D>>,
    /// Kept for as long as the workers.
    _caches: Vec<DeviceCache<D>>,
    store: EmbeddingStore,
    threads: usize,
    ids: u64,
    next: usize,
}

impl<D: Driver> Layer<D> {
    /// A layer with room for this share of the rows.
    pub fn new(driver: &Arc<D>, traffic: &Traffic, fraction: f64, way: Way) -> anyhow::Result<Self> {
        let options = CacheOptions::default();
        let cache = |tables: Vec<TableShape>| -> anyhow::Result<DeviceCache<D>> {
            let shape = CacheShape::for_options(fraction, tables, &options)?;
            Ok(DeviceCache::new(&shape, &options, driver.clone())?)
        };
        let (lookups, batches) = (traffic.schema().lookups(), traffic.batches(BATCHES));
        let caches = match way {
            Way::PerTable { .. } => {
                traffic.shapes().into_iter().map(|table| cache(vec![table])).collect::<anyhow::Result<_>>()?
            }
            _ => vec![cache(traffic.shapes())?],
        };
        let one = |t: usize, cache: &DeviceCache<D>, table: u32| -> anyhow::Result<Query<D>> {
            let lookup = Lookup { feature: 0, table: TableId(table), column: 0, ..lookups[t] };
            let column = |batch: &Batch| Batch { features: vec![batch.features[t].clone()], ..batch.clone() };
            let worker = cache.worker(&shape(vec![lookup], traffic, usize::MAX))?;
            Ok(Query { worker, batches: batches.iter().map(column).collect(), first: t as u32 - table })
        };
        let all = |copy_bytes| -> anyhow::Result<Vec<Query<D>>> {
            let worker = caches[0].worker(&shape(lookups.clone(), traffic, copy_bytes))?;
            Ok(vec![Query { worker, batches: batches.clone(), first: 0 }])
        };
        let tables = 0..traffic.tables;
        let (queries, threads) = match way {
            Way::Flat => (all(usize::MAX)?, 1),
            Way::Coupled => (all(0)?, 1),
            Way::Apart { threads } => {
                (tables.map(|t| one(t, &caches[0], t as u32)).collect::<anyhow::Result<_>>()?, threads)
            }
            Way::PerTable { threads } => {
                (tables.map(|t| one(t, &caches[t], 0)).collect::<anyhow::Result<_>>()?, threads)
            }
        };
        let ids = (traffic.samples * traffic.tables) as u64;
        let mut layer = Self { queries, _caches: caches, store: traffic.store()?, threads, ids, next: 0 };
        for _ in 0..WARMING * BATCHES {
            layer.next();
        }
        Ok(layer)
    }

    /// The next batch. Returns its ids.
    pub fn next(&mut self) -> u64 {
        let (b, store) = (self.next % BATCHES, &self.store);
        self.next += 1;
        let share = self.queries.len().div_ceil(self.threads);
        if self.threads == 1 || self.queries.len() == 1 {
            self.queries.iter_mut().for_each(|query| query.run(b, store));
        } else {
            std::thread::scope(|scope| {
                for queries in self.queries.chunks_mut(share) {
                    scope.spawn(move || queries.iter_mut().for_each(|query| query.run(b, store)));
                }
            });
        }
        self.ids
    }
}

impl<D: Driver> Query<D> {
    fn run(&mut self, batch: usize, store: &EmbeddingStore) {
        let first = self.first;
        let fetch = |missing: &mut Missing<'_>| {
            for m in 0..missing.len() {
                let (table, id) = missing.row(m);
                if let Some(row) = store.row(TableId(first + table.0), id) {
                    missing.bytes_mut(m).copy_from_slice(row);
                }
            }
            Ok::<_, DeviceCacheError>(())
        };
        match self.worker.embed(&self.batches[batch], fetch) {
            Ok(out) => drop(std::hint::black_box(out)),
            Err(error) => unreachable!("a batch of the worker's own traffic: {error}"),
        }
    }
}

/// A worker for these lookups, with room for so many bytes of copied hits, at most one batch's.
fn shape(lookups: Vec<Lookup>, traffic: &Traffic, copy_bytes: usize) -> WorkerShape {
    let max_ids = lookups.len() * traffic.samples;
    WorkerShape {
        features: lookups.len(),
        dense_width: 0,
        stride: lookups.len() * traffic.dim,
        max_samples: traffic.samples,
        max_ids,
        staging_bytes: None,
        copy_bytes: copy_bytes.min(max_ids * 4 * traffic.dim),
        lookups,
    }
}

/// Bytes a second that a copy within the device's memory reads and writes together: the best of some.
pub fn copy_rate<D: Driver>(driver: &Arc<D>, options: &Options) -> anyhow::Result<f64> {
    let (from, mut to) = (DeviceMemory::new(driver, COPIED)?, DeviceMemory::new(driver, COPIED)?);
    let mut best = 0.0_f64;
    for _ in 0..options.pairs.max(3) {
        let began = Instant::now();
        from.copy_to(&mut to)?;
        best = best.max(2.0 * COPIED as f64 / began.elapsed().as_secs_f64());
    }
    Ok(best)
}
