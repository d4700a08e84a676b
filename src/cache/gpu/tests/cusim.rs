//! The cache on a CUDA device in the simulator: the contract of a cache, and the properties of
//! devices alone, which are the number of operations per batch and the safety of concurrent streams.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::cache::gpu::{ContextShape, GpuCache, GpuCacheError, MissingRows};
use crate::cache::{CacheOptions, EvictionOption};
use crate::device::cusim::SimDriver;
use crate::mem::mix64;
use crate::types::{Batch, TableId, Version};
use proptest::prelude::*;

use super::subject::{self as device, GpuSubject, context_shape, fetch, host_rows};
use crate::cache::tests::contract::{self, Subject, World, narrow, warm};

const SEEDS: [u64; 4] = [0, 1, 2, 3];

fn subject(world: &World, seed: u64) -> GpuSubject<SimDriver> {
    device::on(&Arc::new(SimDriver::new(seed, 1 << 30).unwrap()), world)
}

/// As [`subject`], with a worker that has little room to copy hits, and so reads most of them in the pool, as
/// late as possible.
fn late_reader(world: &World, seed: u64) -> GpuSubject<SimDriver> {
    subject(world, seed).another(world)
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
    fn a_key_has_the_row_last_used(key_bits in 3u32..9, draw in any::<u64>(), seed in 0u64..1000) {
        narrow::a_key_has_the_row_last_used(|world| subject(world, seed), key_bits, draw);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn whatever_happens_a_row_is_its_batchs_versions_under_any_schedule(
        world in contract::any_world(),
        steps in contract::any_steps(),
        draw in any::<u64>(),
        seed in 0u64..1000,
    ) {
        let new = |world: &World| late_reader(world, seed);
        contract::whatever_happens_a_row_is_its_batchs_versions(new, &world, &steps, draw);
    }
}

macro_rules! on_a_device {
    ($($property:ident;)*) => {
        $(#[test]
        fn $property() {
            for seed in [1, 2] {
                contract::$property(|world| late_reader(world, seed));
            }
        })*
    };
}

on_a_device! {
    a_switch_carries_over_what_was_cached_and_keeps_the_rest_out;
    a_batch_of_the_old_version_reads_old_rows_beside_one_of_the_new;
    the_current_version_and_a_wrong_row_change_nothing;
    a_row_that_comes_twice_has_its_last_bytes;
    cold_rows_become_pointers_up_to_the_capacity_and_no_longer_miss;
    a_row_behind_a_pointer_is_admitted_again;
    host_memory_is_released_after_the_batches_that_point_into_it;
    pointers_to_rows_that_changed_end_with_their_version;
    the_tuner_sets_how_many_pointers_there_are_by_what_batches_report;
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
fn rows_that_share_a_key_in_a_batch_stay_separate() {
    for seed in SEEDS {
        narrow::rows_that_share_a_key_in_a_batch_stay_separate(|world| subject(world, seed));
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
fn warming_stops_at_the_high_watermark_and_keeps_the_hottest() {
    for seed in SEEDS {
        warm::warming_stops_at_the_high_watermark_and_keeps_the_hottest(|world| subject(world, seed));
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

// ---- Operations per batch. ----

#[test]
fn a_batch_of_hits_takes_three_operations_whatever_the_table_count() {
    device::a_batch_of_hits_takes_three_operations_whatever_the_table_count(|world| subject(world, 0));
}

#[test]
fn a_batch_takes_one_copy() {
    device::a_batch_takes_one_copy(|world| subject(world, 5));
}

// ---- Concurrent streams. ----

/// Workers run concurrently with the eviction thread and with a thread that switches versions and replaces
/// host rows. The cache is much smaller than the working set. Freed slots are poisoned, and withdrawn host
/// memory is overwritten. Every row must be complete and from its batch's version.
#[test]
fn rows_are_of_their_batchs_version_during_evictions_and_switches() {
    for (seed, key_bits) in [(1, 64), (2, 64), (3, 64), (4, 7), (5, 7)] {
        let world = World::new(200, &[9, 3], 3 << 10).with_pointers(60);
        let world = &narrow::keys(world, key_bits).with(|options| options.background = true);
        let driver = &Arc::new(SimDriver::new(seed, 1 << 30).unwrap());
        let cache = &Arc::new(GpuCache::new(&world.shape(), &world.options, driver.clone()).unwrap());
        cache.set_pointers(60);
        let working = &AtomicU64::new(3);
        std::thread::scope(|scope| {
            for w in 0..3 {
                scope.spawn(move || {
                    let shape = ContextShape { copy_bytes: 256, ..context_shape(world) };
                    let mut context = cache.context(&shape).unwrap();
                    let mut draw = seed << 32 | w << 16;
                    let mut id = || {
                        draw += 1;
                        mix64(draw) % 200 * (mix64(draw) >> 60) / 15
                    };
                    for batch in 0..400 {
                        if batch >= 60 && cache.version() > Version(5) {
                            break;
                        }
                        let ids: [Vec<u64>; 2] = std::array::from_fn(|_| (0..32).map(|_| id()).collect());
                        let batch = world.one_hot(&ids);
                        let fetch = |missing: &mut MissingRows| {
                            fetch(world, missing);
                            Ok::<_, GpuCacheError>(())
                        };
                        let matrix = cache.embed(&mut context, &batch, fetch).unwrap().to_vec();
                        world.assert_is(&matrix, &batch, context.version().0);
                    }
                    working.fetch_sub(1, Ordering::Release);
                });
            }
            scope.spawn(move || {
                let context = cache.context(&context_shape(world)).unwrap();
                let subject = GpuSubject { driver: driver.clone(), cache: cache.clone(), context };
                let mut in_ram = Vec::new();
                for version in 1.. {
                    if working.load(Ordering::Acquire) == 0 {
                        break;
                    }
                    in_ram.push(host_rows(driver, cache, world, TableId(version as u32 % 2)));
                    std::thread::sleep(Duration::from_millis(5));
                    world.switch(&subject, version);
                    // Frees the host rows of all versions except the last two.
                    in_ram.drain(..in_ram.len().saturating_sub(2));
                }
            });
        });
        let stats = cache.stats();
        let pointed: u64 = stats.tables.iter().map(|table| table.pointed).sum();
        assert!(contract::totals(&stats).2 > 0 && cache.version() > Version(3), "{stats:?}");
        assert_eq!(pointed > 0, key_bits == 64, "rows that share keys are not pointed at: {stats:?}");
    }
}

// ---- Errors and memory. ----

#[test]
fn a_batch_beyond_a_workers_limits_is_rejected_and_the_next_one_runs() {
    let world = World::new(1000, &[4], 8 << 10);
    let driver = Arc::new(SimDriver::new(1, 1 << 30).unwrap());
    let cache = GpuCache::new(&world.shape(), &CacheOptions::default(), driver).unwrap();
    let shape = ContextShape { staging_bytes: Some(10 * 16), max_ids: 100, ..context_shape(&world) };
    let mut context = cache.context(&shape).unwrap();
    let mut error_of = |batch: &Batch| {
        cache.embed(&mut context, batch, |_| Ok::<_, GpuCacheError>(())).unwrap_err().to_string()
    };
    let good = world.one_hot(&[vec![1, 2, 3]]);
    assert_eq!(error_of(&world.one_hot(&[(0..60).collect()])), "cache.staging_bytes: limit 160, got 960");
    assert_eq!(error_of(&Batch { dense: vec![], ..good.clone() }), "batch: dense values: expected 6, got 0");
    assert_eq!(error_of(&Batch { features: vec![], ..good.clone() }), "batch: features: expected 1, got 0");
    assert_eq!(error_of(&Batch::empty(2)), "batch: features: expected 1, got 2");
    let mut torn = good.clone();
    torn.features[0].offsets = vec![0, 2, 1, 3];
    assert!(error_of(&torn).contains("(ascending): expected 2, got 1"));
    let many = world.bags(64, 1000, &mut 3);
    assert!(error_of(&many).contains("batch: ids: limit 100"));

    let failing = cache.embed(&mut context, &good, |_| Err(GpuCacheError::SwitchFailed)).unwrap_err();
    assert!(matches!(failing, GpuCacheError::SwitchFailed));
    let mut fetched = Vec::new();
    let matrix = cache.embed(&mut context, &good, |missing| {
        fetched = fetch(&world, missing);
        Ok::<_, GpuCacheError>(())
    });
    world.assert_is(matrix.unwrap(), &good, 0);
    assert_eq!(fetched.len(), 3);
}

#[test]
fn a_device_without_enough_memory_is_an_error() {
    let world = World::new(1000, &[4], 64 << 10);
    let driver = Arc::new(SimDriver::new(1, 32 << 10).unwrap());
    let Err(error) = GpuCache::new(&world.shape(), &CacheOptions::default(), driver) else {
        panic!("the cache was created")
    };
    assert!(error.to_string().starts_with("device memory: "), "{error}");
}

#[test]
fn the_cache_and_its_workers_free_all_their_memory() {
    let world = World::new(1000, &[4], 64 << 10);
    let mut subject = subject(&world, 3);
    contract::run(&mut subject, &world, &world.one_hot(&[(0..50).collect()]));
    let GpuSubject { driver, cache, context } = subject;
    assert!(driver.used_bytes() > 64 << 10);
    drop((cache, context));
    assert_eq!(driver.used_bytes(), 0);
}
