//! The cache in a device's memory as a subject of the contract, for any driver, and a property of devices
//! alone: how many operations a batch takes.

use std::sync::Arc;
use std::time::Duration;

use crate::cache::gpu::{ContextShape, GpuCache, GpuCacheError, GpuHostRows, LookupContext, MissingRows};
use crate::cache::{CacheError, CacheStats, EvictStep, NewRow, Switched, Warmed};
use crate::device::cuda::Driver;
use crate::device::cuda::driver::OperationCounts;
use crate::device::cuda::memory::{MemoryPlan, PinnedMemory};
use crate::types::{Batch, RowId, TableId, Version};

use crate::cache::tests::contract::{self, MAX_IDS, MAX_SAMPLES, Rows, Seen, Subject, World};

/// A cache for a world on this device.
pub(crate) fn on<D: Driver>(driver: &Arc<D>, world: &World) -> GpuSubject<D> {
    let driver = driver.clone();
    let cache = Arc::new(GpuCache::new(&world.shape(), &world.options, driver.clone()).unwrap());
    let context = cache.context(&context_shape(world)).unwrap();
    GpuSubject { driver, cache, context }
}

/// A cache in a device's memory, and a lookup context of this cache.
pub(crate) struct GpuSubject<D: Driver> {
    pub driver: Arc<D>,
    pub cache: Arc<GpuCache<D>>,
    pub context: LookupContext<D>,
}

impl<D: Driver> Subject for GpuSubject<D> {
    fn embed(&mut self, world: &World, batch: &Batch, meanwhile: impl FnOnce()) -> Seen {
        let mut fetched = Vec::new();
        let matrix = self.cache.embed(&mut self.context, batch, |missing| {
            meanwhile();
            fetched = fetch(world, missing);
            Ok::<_, GpuCacheError>(())
        });
        let matrix = matrix.unwrap().to_vec();
        Seen { matrix, fetched, version: self.context.version().0 }
    }

    fn another(&self, world: &World) -> Self {
        // The other worker has little room to copy hits. It reads the other hits in the pool, as late as
        // possible.
        let shape = ContextShape { copy_bytes: 64, ..context_shape(world) };
        let context = self.cache.context(&shape).unwrap();
        Self { driver: self.driver.clone(), cache: self.cache.clone(), context }
    }

    fn version(&self) -> u64 {
        self.cache.version().0
    }

    fn switch(&self, version: u64, changed: &[(TableId, u64, &[u8])]) -> Result<Switched, String> {
        let changed = changed.iter().copied().map(NewRow::of);
        self.cache.switch(Version(version), |_| Ok(changed)).map_err(|error| error.to_string())
    }

    fn host_rows(&self, world: &World, table: TableId) -> Box<dyn Send> {
        Box::new(host_rows(&self.driver, &self.cache, world, table))
    }

    fn set_pointers(&self, capacity: u64) {
        self.cache.set_pointers(capacity);
    }

    fn observe(&self, ids: u64, elapsed: Duration) {
        self.cache.observe(ids, elapsed);
    }

    fn evict_step(&self) -> EvictStep {
        self.cache.evict_step().unwrap()
    }

    fn settle(&self) {
        self.cache.settle().unwrap();
    }

    fn stats(&self) -> CacheStats {
        self.cache.stats()
    }

    fn warm(&mut self, rows: &mut Rows) -> Result<Warmed, CacheError> {
        self.cache.warm(rows).map_err(|error| match error {
            GpuCacheError::Cache(error) => error,
            other => panic!("{other}"),
        })
    }

    fn hot_rows(&mut self) -> Vec<RowId> {
        self.cache.hot_rows().unwrap()
    }
}

/// Writes the missing rows of a batch, in the batch's version. Returns which rows they were.
pub(crate) fn fetch(world: &World, missing: &mut MissingRows) -> Vec<RowId> {
    let (version, count) = (missing.version().0, missing.len());
    let write = |m| {
        let row = missing.row(m);
        missing.bytes_mut(m).copy_from_slice(&world.row(row.table(), row.row(), version).unwrap());
        row
    };
    (0..count).map(write).collect()
}

/// Allows pointers to a table's rows in the cache's version. `None` if rows share keys, because such rows
/// get no pointers. Dropping the result frees the memory; the simulator then overwrites it.
pub(crate) fn host_rows<D: Driver>(
    driver: &Arc<D>,
    cache: &GpuCache<D>,
    world: &World,
    table: TableId,
) -> Option<GpuHostRows<D>> {
    let version = cache.version();
    let rows = world.all_rows(table, version.0);
    let mut plan = MemoryPlan::default();
    let array = plan.array::<u8>(rows.len());
    let mut memory = PinnedMemory::new(driver, plan.bytes()).unwrap();
    memory.get_mut(array).copy_from_slice(&rows);
    match cache.host_rows(version, table, Arc::new(memory)) {
        Err(GpuCacheError::SharedKeys { .. }) => None,
        rows => Some(rows.unwrap()),
    }
}

pub(crate) fn context_shape(world: &World) -> ContextShape {
    ContextShape {
        features: world.features,
        lookups: world.lookups.clone(),
        dense_width: world.dense_width,
        stride: world.stride,
        max_samples: MAX_SAMPLES,
        max_ids: MAX_IDS,
        staging_bytes: None,
        copy_bytes: 16 << 10,
    }
}

/// The whole embedding layer takes three operations. Launches, copies and graph nodes are counted.
pub(crate) fn a_batch_of_hits_takes_three_operations_whatever_the_table_count<D: Driver>(
    new: impl Fn(&World) -> GpuSubject<D>,
) {
    for tables in [1, 26, 60, 200] {
        let dims: Vec<usize> = (0..tables).map(|t| 1 + t % 3).collect();
        let world = World::new(50, &dims, 64 << 10);
        let mut subject = new(&world);
        let batch = world.bags(3, 50, &mut 7);
        let mut operations = || {
            let before = subject.driver.work();
            let (_, misses) = contract::run(&mut subject, &world, &batch);
            let after = subject.driver.work();
            subject.settle();
            let work = OperationCounts {
                launches: after.launches - before.launches,
                copies: after.copies - before.copies,
                graph_nodes: after.graph_nodes - before.graph_nodes,
            };
            (misses > 0, work)
        };
        let (missed, first) = operations();
        assert!(missed);
        // The copy of the layout, the probe, a gather that does nothing because rows are missing, the copy of
        // hits, the gather, and two launches for the replacement.
        assert_eq!((first.copies, first.launches, first.total()), (1, 6, 7), "{tables} tables: {first:?}");
        // When a shape comes again, its launches are captured, and from then on run as a graph of two nodes.
        for _ in 0..3 {
            let (missed, work) = operations();
            assert!(!missed, "{tables} tables");
            assert_eq!(
                work,
                OperationCounts { copies: 1, graph_nodes: 2, ..OperationCounts::default() },
                "{tables} tables"
            );
        }
        // A batch of another shape is not a graph yet, and takes two launches in its place.
        let before = subject.driver.work();
        let large = world.one_hot(&vec![
            batch
                .features
                .iter()
                .flat_map(|f| &f.ids)
                .copied()
                .filter(|&id| id < 50)
                .take(16)
                .collect();
            tables
        ]);
        if contract::run(&mut subject, &world, &large).1 == 0 {
            assert_eq!(subject.driver.work().total() - before.total(), 3, "{tables} tables");
        }
    }
}

pub(crate) fn a_batch_takes_one_copy<D: Driver>(new: impl Fn(&World) -> GpuSubject<D>) {
    let world = World::new(500, &[8, 3], 4 << 10);
    let mut subject = new(&world);
    let mut draw = 1;
    const BATCHES: u64 = 30;
    for _ in 0..BATCHES {
        let batch = world.bags(16, 500, &mut draw);
        contract::run(&mut subject, &world, &batch);
        subject.evict_step();
    }
    let work = subject.driver.work();
    assert_eq!(work.copies, BATCHES);
    assert!(work.graph_nodes > 0 && work.launches > 0);
}
