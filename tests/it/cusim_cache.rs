//! The cache on a CUDA device, its kernels executed by the simulator: the contract of `cache_contract`, and what is
//! a device's alone, which is how many operations a batch takes and what streams do to each other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use flechette::cache::device::{DeviceCache, DeviceCacheError, DeviceWorker, WorkerShape};
use flechette::cache::{CacheError, CacheOptions, CacheStats, EvictStep, EvictionOption, Warmed};
use flechette::device::cuda::{Driver, Work};
use flechette::device::cusim::SimDriver;
use flechette::types::{Batch, TableId, scatter};
use proptest::prelude::*;

use crate::cache_contract::{
    self as contract, MAX_IDS, MAX_SAMPLES, Rows, Seen, Subject, World, bits, narrow, warm,
};

const SEEDS: [u64; 4] = [0, 1, 2, 3];

struct DeviceSubject<D: Driver> {
    driver: Arc<D>,
    cache: Arc<DeviceCache<D>>,
    worker: DeviceWorker<D>,
}

impl<D: Driver> Subject for DeviceSubject<D> {
    fn embed(&mut self, world: &World, batch: &Batch, version: u64) -> Seen {
        embed(&mut self.worker, world, batch, version)
    }

    fn evict_step(&mut self) -> EvictStep {
        self.cache.evict_step().unwrap()
    }

    fn settle(&mut self) {
        self.cache.settle().unwrap();
    }

    fn stats(&self) -> CacheStats {
        self.cache.stats()
    }

    fn warm(&mut self, rows: &mut Rows) -> Result<Warmed, CacheError> {
        self.cache.warm(rows).map_err(|error| match error {
            DeviceCacheError::Cache(error) => error,
            other => panic!("{other}"),
        })
    }

    fn hot_rows(&mut self) -> Vec<(TableId, u64)> {
        self.cache.hot_rows().unwrap()
    }
}

fn embed<D: Driver>(worker: &mut DeviceWorker<D>, world: &World, batch: &Batch, version: u64) -> Seen {
    let mut fetched = Vec::new();
    let matrix = worker.embed(batch, |missing| {
        for m in 0..missing.len() {
            let (table, id) = missing.row(m);
            let row = world.row(table, id, version).unwrap();
            missing.bytes_mut(m).copy_from_slice(&row);
            fetched.push((table, id));
        }
        Ok::<_, DeviceCacheError>(())
    });
    Seen { matrix: matrix.unwrap().to_vec(), fetched }
}

fn worker_shape(world: &World) -> WorkerShape {
    WorkerShape {
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

fn subject(world: &World, seed: u64) -> DeviceSubject<SimDriver> {
    let driver = Arc::new(SimDriver::new(seed, 1 << 30).unwrap());
    let cache = Arc::new(DeviceCache::new(&world.shape(), &world.options, driver.clone()).unwrap());
    let worker = cache.worker(&worker_shape(world)).unwrap();
    DeviceSubject { driver, cache, worker }
}

// ---- The contract. ----

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_hit_is_the_row_inserted_under_any_schedule(
        dims in prop::collection::vec(1usize..40, 1..6),
        room in 0usize..6000,
        draw in any::<u64>(),
        seed in 0u64..1000,
    ) {
        let world = World::new(120, &dims, room).with_a_shared_feature();
        contract::a_hit_is_the_row_inserted(|world| subject(world, seed), &world, 16, draw);
    }

    #[test]
    fn a_hit_is_the_row_inserted_under_any_schedule_however_narrow_the_keys_are(
        key_bits in 4u32..12,
        dims in prop::collection::vec(1usize..40, 1..6),
        room in 0usize..6000,
        draw in any::<u64>(),
        seed in 0u64..1000,
    ) {
        let world = narrow::keys(World::new(120, &dims, room).with_a_shared_feature(), key_bits);
        contract::a_hit_is_the_row_inserted(|world| subject(world, seed), &world, 16, draw);
    }

    #[test]
    fn a_key_has_the_row_last_asked_for(key_bits in 3u32..9, draw in any::<u64>(), seed in 0u64..1000) {
        narrow::a_key_has_the_row_last_asked_for(|world| subject(world, seed), key_bits, draw);
    }
}

#[test]
fn all_miss_all_hit_and_a_mixture() {
    for seed in SEEDS {
        contract::all_miss_all_hit_and_a_mixture(|world| subject(world, seed));
    }
}

#[test]
fn eviction_goes_to_the_low_watermark_and_takes_the_oldest() {
    for seed in SEEDS {
        for eviction in [EvictionOption::Lru, EvictionOption::Lfu(vec![])] {
            contract::eviction_goes_to_the_low_watermark_and_takes_the_oldest(
                |world| subject(world, seed),
                eviction,
            );
        }
    }
}

#[test]
fn rows_of_one_key_in_one_batch_are_rows_of_their_own() {
    for seed in SEEDS {
        narrow::rows_of_one_key_in_one_batch_are_rows_of_their_own(|world| subject(world, seed));
    }
}

#[test]
fn rows_of_low_rank_leave_first() {
    for seed in SEEDS {
        warm::rows_of_low_rank_leave_first(|world| subject(world, seed));
    }
}

#[test]
fn a_row_is_as_old_as_its_last_use_but_for_a_few_batches() {
    for seed in SEEDS {
        warm::a_row_is_as_old_as_its_last_use_but_for_a_few_batches(|world| subject(world, seed));
    }
}

#[test]
fn hot_rows_are_those_in_the_cache_the_last_used_first() {
    for seed in SEEDS {
        warm::hot_rows_are_those_in_the_cache_the_last_used_first(|world| subject(world, seed));
    }
}

#[test]
fn warm_rows_are_found_whatever_the_admission_and_keep_their_order() {
    for seed in SEEDS {
        warm::warm_rows_are_found_whatever_the_admission_and_keep_their_order(|world| subject(world, seed));
    }
}

#[test]
fn warming_ends_below_the_high_watermark_with_the_hottest_in() {
    for seed in SEEDS {
        warm::warming_ends_below_the_high_watermark_with_the_hottest_in(|world| subject(world, seed));
    }
}

#[test]
fn the_coldest_of_the_warm_rows_leave_first() {
    warm::the_coldest_of_the_warm_rows_leave_first(|world| subject(world, 1));
}

#[test]
fn a_row_that_is_there_keeps_its_place_and_a_wrong_one_is_refused() {
    warm::a_row_that_is_there_keeps_its_place_and_a_wrong_one_is_refused(|world| subject(world, 1));
}

#[test]
fn memory_passes_from_one_row_size_to_another() {
    contract::memory_passes_from_one_row_size_to_another(|world| subject(world, 1));
}

// ---- How many operations a batch takes. ----

#[test]
fn a_batch_of_hits_takes_two_operations_whatever_the_table_count() {
    for tables in [1, 26, 60, 200] {
        let dims: Vec<usize> = (0..tables).map(|t| 1 + t % 3).collect();
        let world = World::new(50, &dims, 64 << 10);
        let mut subject = subject(&world, 0);
        let batch = world.bags(3, 50, &mut 7);
        let mut took = || {
            let before = subject.driver.work();
            let (_, misses) = contract::run(&mut subject, &world, &batch);
            let after = subject.driver.work();
            subject.settle();
            let work = Work {
                launches: after.launches - before.launches,
                copies: after.copies - before.copies,
                memsets: after.memsets - before.memsets,
                graph_nodes: after.graph_nodes - before.graph_nodes,
            };
            (misses > 0, work)
        };
        let (missed, first) = took();
        assert!(missed);
        // Probe, a gather in vain, the copy of hits, the gather, and the replacement's two.
        assert_eq!((first.total(), first.launches), (6, 6), "{tables} tables: {first:?}");
        // The same shape again: captured once, it is a graph of two nodes from then on.
        for _ in 0..3 {
            let (missed, work) = took();
            assert!(!missed, "{tables} tables");
            assert_eq!(work, Work { graph_nodes: 2, ..Work::default() }, "{tables} tables");
        }
        // Another shape: two launches.
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
            assert_eq!(subject.driver.work().total() - before.total(), 2, "{tables} tables");
        }
    }
}

#[test]
fn no_batch_takes_a_copy_or_a_memset() {
    let world = World::new(500, &[8, 3], 4 << 10);
    let mut subject = subject(&world, 5);
    let mut draw = 1;
    for _ in 0..30 {
        let batch = world.bags(16, 500, &mut draw);
        contract::run(&mut subject, &world, &batch);
        subject.evict_step();
    }
    let work = subject.driver.work();
    assert_eq!((work.copies, work.memsets), (0, 0));
    assert!(work.graph_nodes > 0 && work.launches > 0);
}

// ---- What streams do to each other. ----

/// A world of single-id bags, so that the matrix is made of rows, and which version each row is of.
fn versions_of(world: &World, ids: &[Vec<u64>], matrix: &[f32], newest: u64) -> Vec<u64> {
    let mut versions = Vec::new();
    for lookup in &world.lookups {
        for (s, &id) in ids[lookup.feature].iter().enumerate() {
            let got = &matrix[s * world.stride + lookup.column..][..lookup.dim];
            let is = |v: &u64| bits(got) == bits(&world.values(lookup, id, *v));
            let version = (0..=newest).find(is);
            versions
                .push(version.unwrap_or_else(|| panic!("{lookup:?} id {id}: {got:?} is no version's row")));
        }
    }
    versions
}

/// One host thread, so that a seed is a schedule: updates and replacements of earlier batches are under way while
/// a batch probes.
#[test]
fn a_row_that_changes_is_read_whole_and_the_new_one_once_it_is_there() {
    for (seed, key_bits) in (1..12).zip([64, 6].into_iter().cycle()) {
        let world = narrow::keys(World::new(60, &[7, 4], 3 << 10), key_bits);
        let mut subject = subject(&world, seed);
        let mut writer = subject.cache.writer(8 << 10).unwrap();
        let mut draw = seed * 1000;
        for newest in 0..30 {
            let mut ids = || -> Vec<u64> {
                (0..24)
                    .map(|_| {
                        draw += 1;
                        scatter(draw) % 60
                    })
                    .collect()
            };
            let batch_ids = [ids(), ids()];
            let batch = world.one_hot(&batch_ids);
            let seen = subject.embed(&world, &batch, newest);
            versions_of(&world, &batch_ids, &seen.matrix, newest);
            subject.evict_step();
            // Every row that may be cached gets its next version.
            let rows: Vec<_> = (0..2)
                .flat_map(|t| (0..60).map(move |id| (TableId(t), id)))
                .map(|(t, id)| (t, id, world.row(t, id, newest + 1).unwrap()))
                .collect();
            let rows: Vec<_> = rows.iter().map(|(t, id, row)| (*t, *id, &row[..])).collect();
            writer.update(&rows).unwrap();
            if newest % 5 == 4 {
                subject.settle();
                let seen = subject.embed(&world, &batch, newest + 1);
                let versions = versions_of(&world, &batch_ids, &seen.matrix, newest + 1);
                // What found no room to be updated is what it was; what is there is new.
                assert!(
                    versions.iter().filter(|v| **v == newest + 1).count() * 2 > versions.len(),
                    "{versions:?}"
                );
            }
        }
    }
}

/// Workers, a writer and the evicting thread, all at once, far under the working set, with freed slots
/// poisoned: every row is one that some version held, whole.
#[test]
fn every_row_is_some_versions_under_workers_a_writer_and_eviction() {
    for (seed, key_bits) in [(1, 64), (2, 64), (3, 64), (4, 7), (5, 7)] {
        let world = World::new(200, &[9, 3], 3 << 10).with(|options| options.background = true);
        let world = narrow::keys(world, key_bits);
        let driver = Arc::new(SimDriver::new(seed, 1 << 30).unwrap());
        let cache = DeviceCache::new(&world.shape(), &world.options, driver).unwrap();
        const VERSIONS: u64 = 60;
        let (stop, world, cache) = (AtomicBool::new(false), &world, &cache);
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..3)
                .map(|w| {
                    scope.spawn(move || {
                        let mut worker = cache.worker(&worker_shape(world)).unwrap();
                        let mut draw = seed << 32 | w << 16;
                        for _ in 0..60 {
                            let mut ids = || -> Vec<u64> {
                                (0..32)
                                    .map(|_| {
                                        draw += 1;
                                        scatter(draw) % 200 * (scatter(draw) >> 60) / 15
                                    })
                                    .collect()
                            };
                            let ids = [ids(), ids()];
                            let seen = embed(&mut worker, world, &world.one_hot(&ids), 0);
                            versions_of(world, &ids, &seen.matrix, VERSIONS);
                        }
                    })
                })
                .collect();
            let stop = &stop;
            scope.spawn(move || {
                let mut writer = cache.writer(4 << 10).unwrap();
                for version in (1..=VERSIONS).cycle().take_while(|_| !stop.load(Ordering::Relaxed)) {
                    let rows: Vec<_> = (0..40)
                        .map(|i| scatter(version << 20 | i) % 200)
                        .collect::<std::collections::HashSet<_>>()
                        .into_iter()
                        .map(|id| (TableId(0), id, world.row(TableId(0), id, version).unwrap()))
                        .collect();
                    let rows: Vec<_> = rows.iter().map(|(t, id, row)| (*t, *id, &row[..])).collect();
                    writer.update(&rows).unwrap();
                }
            });
            let ended: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
            stop.store(true, Ordering::Relaxed);
            assert!(ended.into_iter().all(|end| end.is_ok()));
        });
        let stats = cache.stats();
        assert!(contract::totals(&stats).2 > 0, "rows were put out");
    }
}

/// A job a key and launch: rows of one key go one launch after the other.
#[test]
fn a_row_that_was_withdrawn_is_found_no_more_whoever_shares_its_key() {
    for key_bits in [64, 5] {
        let world = narrow::keys(World::new(60, &[7, 4], 64 << 10), key_bits);
        let mut subject = subject(&world, 7);
        let mut writer = subject.cache.writer(8 << 10).unwrap();
        let batch = world.one_hot(&[(0..60).collect(), (0..60).collect()]);
        contract::run(&mut subject, &world, &batch);
        subject.settle();
        let kept = subject.stats().entries;
        assert!(kept >= 20);
        let all: Vec<_> = (0..2).flat_map(|t| (0..60).map(move |id| (TableId(t), id))).collect();
        writer.withdraw(&all[..60]).unwrap();
        subject.settle();
        assert!(subject.hot_rows().iter().all(|(table, _)| *table == TableId(1)), "{key_bits} bits");
        writer.withdraw(&all).unwrap();
        subject.settle();
        assert_eq!((subject.hot_rows(), subject.stats().entries), (vec![], 0), "{key_bits} bits");
        assert_eq!(contract::run(&mut subject, &world, &batch).0, 0);
    }
}

// ---- What goes wrong. ----

#[test]
fn a_batch_that_a_worker_was_not_made_for_is_refused_and_the_next_one_runs() {
    let world = World::new(1000, &[4], 8 << 10);
    let driver = Arc::new(SimDriver::new(1, 1 << 30).unwrap());
    let cache = DeviceCache::new(&world.shape(), &CacheOptions::default(), driver).unwrap();
    let shape = WorkerShape { staging_bytes: Some(10 * 16), max_ids: 100, ..worker_shape(&world) };
    let mut worker = cache.worker(&shape).unwrap();
    let mut said =
        |batch: &Batch| worker.embed(batch, |_| Ok::<_, DeviceCacheError>(())).unwrap_err().to_string();
    let good = world.one_hot(&[vec![1, 2, 3]]);
    assert_eq!(said(&world.one_hot(&[(0..60).collect()])), "cache.staging_bytes: limit 160, got 960");
    assert_eq!(said(&Batch { dense: vec![], ..good.clone() }), "batch: dense values: expected 6, got 0");
    assert_eq!(said(&Batch { features: vec![], ..good.clone() }), "batch: features: expected 1, got 0");
    assert_eq!(said(&Batch::empty(2)), "batch: features: expected 1, got 2");
    let mut torn = good.clone();
    torn.features[0].offsets = vec![0, 2, 1, 3];
    assert!(said(&torn).contains("never falls: expected 2, got 1"));
    let many = world.bags(64, 1000, &mut 3);
    assert!(said(&many).contains("batch: ids: limit 100"));

    let failing = worker.embed(&good, |_| Err(DeviceCacheError::Unsupported)).unwrap_err();
    assert!(matches!(failing, DeviceCacheError::Unsupported));
    let seen = embed(&mut worker, &world, &good, 0);
    world.assert_is(&seen.matrix, &good, 0);
    assert_eq!(seen.fetched.len(), 3);
}

#[test]
fn a_device_without_the_memory_says_so() {
    let world = World::new(1000, &[4], 64 << 10);
    let driver = Arc::new(SimDriver::new(1, 32 << 10).unwrap());
    let Err(error) = DeviceCache::new(&world.shape(), &CacheOptions::default(), driver) else {
        panic!("it was made")
    };
    assert!(error.to_string().starts_with("device memory: "), "{error}");
}

#[test]
fn memory_goes_back_with_the_cache_and_its_workers() {
    let world = World::new(1000, &[4], 64 << 10);
    let mut subject = subject(&world, 3);
    contract::run(&mut subject, &world, &world.one_hot(&[(0..50).collect()]));
    let DeviceSubject { driver, cache, worker } = subject;
    assert!(driver.used_bytes() > 64 << 10);
    drop((cache, worker));
    assert_eq!(driver.used_bytes(), 0);
}
