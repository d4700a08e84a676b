//! Many threads use one cache: rows are whole, inserted once, and counted before they are found.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::cache::shared::Insertion;

/// Eight workers use far more rows than the cache can hold. Freed slots are poisoned, so a row that is read
/// after its slot was freed, or while the slot is written, does not match its table and id.
#[test]
fn under_eight_threads_and_constant_eviction_every_row_is_whole() {
    let tables = [table(40_000, 16), table(5_000, 1), table(20_000, 33), table(50, 7)];
    let cache = cache_of(200 << 10, &tables, &for_all());
    let batches = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for worker in 0..8u64 {
            let (cache, batches) = (&cache, &batches);
            scope.spawn(move || {
                let mut query = Query::default();
                let mut random = worker;
                let mut draw = |below: u64| {
                    random += 8;
                    let r = key::hash_key(crate::types::FlatKey(random));
                    // The cube makes small ids frequent.
                    let unit = (r >> 11) as f64 / (1u64 << 53) as f64;
                    (unit * unit * unit * below as f64) as u64
                };
                for _ in 0..1500 {
                    let column = |t: usize| (t as u32, (0..24).map(|_| draw(tables[t].rows)).collect());
                    let ids: Vec<_> = (0..4).map(column).collect();
                    run_batch(cache, &tables, &mut query, &ids);
                    batches.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    // The evictor may still be running, and counts are not read atomically.
    while cache.evict_step() != EvictStep::Idle {
        std::thread::yield_now();
    }
    let stats = cache.stats();
    let (hits, misses, evictions) = totals(&stats);
    assert_eq!(hits + misses, batches.load(Ordering::Relaxed) * 96);
    assert!(hits > 0 && evictions > 500, "{hits} hits, {evictions} evictions");
    assert_eq!(stats.entries, stats.inserted - evictions);
}

/// All threads insert and find the same rows at once.
#[test]
fn racing_inserts_of_the_same_rows_leave_one_of_each() {
    let tables = [table(300, 8)];
    let cache = cache_of(1 << 20, &tables, &for_all());
    let go = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !go.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                let mut query = Query::default();
                for start in 0..10u64 {
                    run_batch(&cache, &tables, &mut query, &[(0, (start * 30..start * 30 + 30).collect())]);
                }
            });
        }
        go.store(true, Ordering::Release);
    });
    assert_eq!(cache.stats().entries, 300);
    assert_eq!(cache.stats().inserted, 300);
}

#[test]
fn dropping_the_cache_ends_its_thread() {
    let cache = cache_of(1 << 16, &[table(10, 1)], &for_all());
    let shared = Arc::downgrade(&cache.shared);
    drop(cache);
    assert!(shared.upgrade().is_none(), "the thread no longer holds the cache");
}

/// If bytes were counted later, an eviction right after the insert would subtract bytes that are not yet
/// added, and the sum would wrap.
#[test]
fn the_bytes_of_a_row_are_counted_before_it_can_be_found() {
    const LEAST: u64 = 2_000;
    const MOST: u64 = 50_000;
    const END: u64 = u64::MAX;
    let limit = Instant::now() + Duration::from_secs(2);
    let tables = [table(64, 16)];
    let options = CacheOptions { watermarks: Watermarks { high: 1e-9, low: 1e-9 }, ..by_hand() };
    let cache = &cache_of(1 << 10, &tables, &options);
    let (begun, seen) = (&AtomicU64::new(0), &AtomicU64::new(0));
    let spin_until = |happened: &dyn Fn() -> bool| {
        for looks in 1u64.. {
            if happened() {
                return;
            }
            // The other thread may need this core.
            if looks.is_multiple_of(100) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    };
    let index = &cache.shared.index;
    let empty = || (0..index.buckets()).all(|b| index.ages(b, index::Stamp::of(0)).next().is_none());
    let (uncounted, rounds) = std::thread::scope(|scope| {
        let watcher = scope.spawn(move || {
            let mut uncounted = 0;
            for round in 1.. {
                spin_until(&|| begun.load(Ordering::Acquire) >= round);
                if begun.load(Ordering::Acquire) == END {
                    break;
                }
                spin_until(&|| !empty());
                std::sync::atomic::fence(Ordering::Acquire);
                uncounted += u64::from(cache.shared.counts.linked_bytes.load(Ordering::Relaxed) == 0);
                seen.store(round, Ordering::Release);
            }
            uncounted
        });
        let mut round = 0;
        while round < LEAST || round < MOST && Instant::now() < limit {
            round += 1;
            begun.store(round, Ordering::Release);
            let row = row_of(TableId(0), round % 64, 64);
            assert_eq!(cache.pin().insert(&miss(TableId(0), round % 64), &row).unwrap(), Insertion::Stored);
            spin_until(&|| seen.load(Ordering::Acquire) >= round);
            settle(cache);
            assert_eq!(cache.stats().pool_used_bytes, 0);
        }
        begun.store(END, Ordering::Release);
        (watcher.join().unwrap(), round)
    });
    assert_eq!(uncounted, 0, "rows of {rounds} were found before their bytes were counted");
}
