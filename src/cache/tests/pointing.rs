//! The unified index: cold rows give up their slots and are read from the store's memory.

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;

fn pointing(pointers: u64) -> CacheOptions {
    CacheOptions { pointers, ..by_hand() }
}

/// Runs batches over all rows of a table in order, so that each row becomes cold.
fn walk(cache: &FlatCache, tables: &[TableShape], query: &mut Query, rounds: u64) -> Seen {
    let mut all = Seen { hits: 0, pointed: 0, misses: 0 };
    for start in (0..rounds * tables[0].rows).step_by(20) {
        let ids = (start..start + 20).map(|id| id % tables[0].rows).collect();
        let seen = run_batch(cache, tables, query, &[(0, ids)]);
        all.hits += seen.hits;
        all.pointed += seen.pointed;
        all.misses += seen.misses;
        settle(cache);
    }
    all
}

#[test]
fn cold_rows_become_pointers_up_to_the_capacity_and_no_longer_miss() {
    let tables = [table(2000, 32)];
    let cache = cache_of(100 << 10, &tables, &pointing(2000));
    let _ram = cache.host_rows(TableId(0)).unwrap();
    let mut query = Query::default();
    walk(&cache, &tables, &mut query, 2);
    assert_eq!(cache.stats().pointers, 0, "no capacity was given yet");
    cache.set_pointers(500);
    walk(&cache, &tables, &mut query, 2);
    assert!((490..=500).contains(&cache.stats().pointers), "{}", cache.stats().pointers);
    cache.set_pointers(2000);
    walk(&cache, &tables, &mut query, 3);
    let seen = walk(&cache, &tables, &mut query, 1);
    assert!(seen.pointed > 1000 && seen.misses < 200, "{} pointed, {} missed", seen.pointed, seen.misses);
    let stats = cache.stats();
    assert!(stats.tables[0].pointed >= seen.pointed && stats.total_bytes <= 100 << 10);
}

#[test]
fn rows_that_are_not_held_in_memory_are_never_pointed_at() {
    let tables = [table(2000, 32)];
    let cache = cache_of(100 << 10, &tables, &pointing(2000));
    cache.set_pointers(2000);
    walk(&cache, &tables, &mut Query::default(), 3);
    assert_eq!(cache.stats().pointers, 0);
}

#[test]
fn dropping_host_rows_removes_its_pointers_and_waits_for_batches_that_found_them() {
    let tables = [table(2000, 32)];
    let cache = cache_of(100 << 10, &tables, &pointing(2000));
    let ram = cache.host_rows(TableId(0)).unwrap();
    cache.set_pointers(2000);
    let mut query = Query::default();
    walk(&cache, &tables, &mut query, 3);
    let pin = cache.pin();
    query.clear();
    query.push(TableId(0), 0..2000);
    let found = pin.lookup(&mut query).unwrap();
    assert!(!found.pointed().is_empty());
    std::thread::scope(|scope| {
        let dropping = scope.spawn(move || drop(ram));
        while cache.stats().pointers > 0 {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(20));
        assert!(!dropping.is_finished(), "a batch may still read the host memory");
        drop(pin);
        dropping.join().unwrap();
    });
    let seen = walk(&cache, &tables, &mut query, 1);
    assert_eq!((seen.pointed, cache.stats().pointers), (0, 0));
}

#[test]
fn a_pointer_is_valid_for_every_version() {
    let tables = [table(2000, 32)];
    let cache = cache_of(100 << 10, &tables, &pointing(2000));
    let _ram = cache.host_rows(TableId(0)).unwrap();
    cache.set_pointers(2000);
    let mut query = Query::default();
    walk(&cache, &tables, &mut query, 3);
    switch(&cache, &tables, Version(1));
    assert!(walk(&cache, &tables, &mut query, 1).pointed > 1000);
}

#[test]
fn the_tuner_sets_the_capacity_by_what_batches_report() {
    let tables = [table(2000, 32)];
    let cache = cache_of(100 << 10, &tables, &pointing(1600));
    for _ in 0..3 {
        // Throughput rises with the capacity, which therefore grows.
        let seconds = 1.0 / (1.0 + cache.shared.pointers.capacity() as f64);
        cache.observe(1 << 20, Duration::from_secs_f64(seconds));
    }
    assert_eq!(cache.shared.pointers.capacity(), 300);
}

/// Four workers and evictions, while a store repeatedly registers and withdraws its memory.
#[test]
fn under_threads_and_withdrawals_no_withdrawn_table_is_pointed_at() {
    let tables = [table(3000, 16), table(3000, 8)];
    let options = CacheOptions { pointers: 3000, ..for_all() };
    let cache = cache_of(100 << 10, &tables, &options);
    cache.set_pointers(3000);
    // Table 0 is in memory at times, table 1 never.
    let in_ram = AtomicU64::new(0);
    let working = AtomicU64::new(4);
    std::thread::scope(|scope| {
        for worker in 0..4u64 {
            let (cache, in_ram, working) = (&cache, &in_ram, &working);
            scope.spawn(move || {
                let mut query = Query::default();
                for batch in 0..100_000u64 {
                    if batch >= 800 && totals(&cache.stats()).2 > 500 {
                        break;
                    }
                    let pin = cache.pin();
                    query.clear();
                    for t in 0..2u64 {
                        let id = |i: u64| crate::mem::mix64(worker << 40 | batch << 20 | t << 10 | i) % 3000;
                        query.push(TableId(t as u32), (0..24).map(id));
                    }
                    let found = pin.lookup(&mut query).unwrap();
                    for pointed in found.pointed() {
                        assert_eq!(pointed.table, TableId(0));
                        assert_eq!(in_ram.load(Ordering::Acquire), 1, "the store still holds the row");
                    }
                    for miss in found.misses().iter().chain(found.pointed()) {
                        let row = row_of(miss.table, miss.id, tables[miss.table.index()].row_bytes);
                        pin.insert(miss, &row).unwrap();
                    }
                }
                working.fetch_sub(1, Ordering::Release);
            });
        }
        scope.spawn(|| {
            while working.load(Ordering::Acquire) > 0 {
                in_ram.store(1, Ordering::Release);
                let ram = cache.host_rows(TableId(0)).unwrap();
                std::thread::sleep(Duration::from_millis(5));
                drop(ram);
                in_ram.store(0, Ordering::Release);
            }
        });
    });
    let stats = cache.stats();
    assert!(totals(&stats).2 > 500 && stats.tables[0].pointed > 0, "{stats:?}");
}
