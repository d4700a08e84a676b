//! An embedding layer that reads its rows through warm caches on a device.

use std::sync::Arc;
use std::time::Instant;

use flechette::cache::gpu::{ContextShape, GpuCache, GpuCacheError, LookupContext, MissingRows};
use flechette::cache::{CacheOptions, CacheShape, TableShape};
use flechette::device::cuda::Driver;
use flechette::device::cuda::memory::DeviceMemory;
use flechette::schema::Lookup;
use flechette::store::Table;
use flechette::types::{Batch, TableId};

use crate::harness::Options;
use crate::traffic::Traffic;

/// Number of batches that are generated and then repeated.
const BATCHES: usize = 64;
/// How often all batches run before the measurement, to fill the cache.
const WARMING: usize = 3;
/// Bytes that are copied to measure the bandwidth of the device's memory.
const COPIED: usize = 1 << 30;

/// How a layer looks up rows.
#[derive(Clone, Copy)]
pub enum Way {
    /// One query over all tables. Hits are copied while the host writes the missing rows.
    Flat,
    /// One query over all tables. Hits are copied only after the host has written the missing rows.
    Coupled,
    /// One cache for all tables, and one query per table. The queries are divided among threads.
    Apart { threads: usize },
    /// One cache and one query per table. The queries are divided among threads.
    PerTable { threads: usize },
}

/// A query: its cache, its context, and the columns of the batches that it looks up.
struct Query<D: Driver> {
    cache: Arc<GpuCache<D>>,
    context: LookupContext<D>,
    batches: Vec<Batch>,
    /// What to add to a table id of the cache to get the table's id in the store.
    first: u32,
}

/// A layer whose caches are warm.
pub struct Layer<D: Driver> {
    queries: Vec<Query<D>>,
    tables: Vec<Table>,
    threads: usize,
    ids: u64,
    next: usize,
}

impl<D: Driver> Layer<D> {
    /// A layer whose caches hold this share of the rows.
    pub fn new(driver: &Arc<D>, traffic: &Traffic, fraction: f64, way: Way) -> anyhow::Result<Self> {
        let options = CacheOptions::default();
        let cache = |tables: Vec<TableShape>| -> anyhow::Result<Arc<GpuCache<D>>> {
            let shape = CacheShape::for_options(fraction, tables, &options)?;
            Ok(Arc::new(GpuCache::new(&shape, &options, driver.clone())?))
        };
        let (lookups, batches) = (traffic.schema().lookups(), traffic.batches(BATCHES));
        let caches = match way {
            Way::PerTable { .. } => {
                traffic.shapes().into_iter().map(|table| cache(vec![table])).collect::<anyhow::Result<_>>()?
            }
            _ => vec![cache(traffic.shapes())?],
        };
        let one = |t: usize, cache: &Arc<GpuCache<D>>, table: u32| -> anyhow::Result<Query<D>> {
            let lookup = Lookup { feature: 0, table: TableId(table), column: 0, ..lookups[t] };
            let column = |batch: &Batch| Batch { features: vec![batch.features[t].clone()], ..batch.clone() };
            let context = cache.context(&shape(vec![lookup], traffic, usize::MAX))?;
            let cache = cache.clone();
            Ok(Query {
                cache,
                context,
                batches: batches.iter().map(column).collect(),
                first: t as u32 - table,
            })
        };
        let all = |copy_bytes| -> anyhow::Result<Vec<Query<D>>> {
            let cache = caches[0].clone();
            let context = cache.context(&shape(lookups.clone(), traffic, copy_bytes))?;
            Ok(vec![Query { cache, context, batches: batches.clone(), first: 0 }])
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
        let mut layer = Self { queries, tables: traffic.tables()?, threads, ids, next: 0 };
        for _ in 0..WARMING * BATCHES {
            layer.next();
        }
        Ok(layer)
    }

    /// Runs the next batch. Returns its number of ids.
    pub fn next(&mut self) -> u64 {
        let (b, tables) = (self.next % BATCHES, &self.tables);
        self.next += 1;
        let share = self.queries.len().div_ceil(self.threads);
        if self.threads == 1 || self.queries.len() == 1 {
            self.queries.iter_mut().for_each(|query| query.run(b, tables));
        } else {
            std::thread::scope(|scope| {
                for queries in self.queries.chunks_mut(share) {
                    scope.spawn(move || queries.iter_mut().for_each(|query| query.run(b, tables)));
                }
            });
        }
        self.ids
    }
}

impl<D: Driver> Query<D> {
    fn run(&mut self, batch: usize, tables: &[Table]) {
        let first = self.first;
        let row = |table: TableId, id| tables[(first + table.0) as usize].row(id).ok_or((table, id));
        let fetch = |missing: &mut MissingRows<'_>| {
            missing.fill(row).unwrap_or_else(|row| unreachable!("a row of the traffic: {row:?}"));
            Ok::<_, GpuCacheError>(())
        };
        match self.cache.embed(&mut self.context, &self.batches[batch], fetch) {
            Ok(out) => drop(std::hint::black_box(out)),
            Err(error) => unreachable!("a batch of the context's own traffic: {error}"),
        }
    }
}

/// A context for these lookups. It has room for `copy_bytes` of copied hits, at most those of one batch.
fn shape(lookups: Vec<Lookup>, traffic: &Traffic, copy_bytes: usize) -> ContextShape {
    let max_ids = lookups.len() * traffic.samples;
    ContextShape {
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

/// Bytes per second of a copy within the device's memory, reads plus writes: the best of several runs.
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
