//! Tests of the whole cache: a hit is the row that was inserted for that table and id, whatever is evicted
//! meanwhile, and memory stays within `cache.bytes`.

pub(crate) mod contract;
#[cfg(target_os = "linux")]
mod memory;
mod narrow;
mod pointing;
mod policies;
mod switching;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::shared::Insertion;
use super::stats::TableStats;
use super::*;

fn table(rows: u64, dim: usize) -> TableShape {
    TableShape { rows, row_bytes: 4 * dim }
}

/// A row's bytes in version 0. Each word is a hash of table, id and position.
fn row_of(table: TableId, id: u64, bytes: usize) -> Vec<u8> {
    row_at(Version(0), table, id, bytes)
}

/// Whether a version changes a row.
fn changes(version: Version, id: u64) -> bool {
    version.0 > 0 && id % 5 == version.0 % 5
}

/// A row's bytes in `version`: the bytes of the last version, up to this one, that changed the row.
fn row_at(version: Version, table: TableId, id: u64, bytes: usize) -> Vec<u8> {
    let made = (1..=version.0).rev().take(5).find(|&v| changes(Version(v), id)).unwrap_or(0);
    let word = |i: usize| {
        let place = id << 20 | u64::from(table.0) << 10 | i as u64;
        (crate::mem::mix64(place ^ crate::mem::mix64(made)) >> 32) as u32
    };
    (0..bytes / 4).flat_map(|i| word(i).to_le_bytes()).collect()
}

/// Options that admit every row.
fn for_all() -> CacheOptions {
    CacheOptions { admission: AdmissionOption::ALL, ..CacheOptions::default() }
}

/// The same without the eviction thread: the test calls `evict_step`.
fn by_hand() -> CacheOptions {
    CacheOptions { background: false, ..for_all() }
}

fn cache_of(bytes: usize, tables: &[TableShape], options: &CacheOptions) -> FlatCache {
    FlatCache::new(&CacheShape { bytes, tables: tables.to_vec() }, options).unwrap()
}

/// All rows that a version changes, with their bytes in that version.
fn changed(version: Version, tables: &[TableShape]) -> Vec<(TableId, u64, Vec<u8>)> {
    let of_table = |(t, table): (usize, &TableShape)| {
        let (table_id, row_bytes) = (TableId(t as u32), table.row_bytes);
        let ids = (0..table.rows).filter(move |&id| changes(version, id));
        ids.map(move |id| (table_id, id, row_at(version, table_id, id, row_bytes))).collect::<Vec<_>>()
    };
    tables.iter().enumerate().flat_map(of_table).collect()
}

fn switch(cache: &FlatCache, tables: &[TableShape], version: Version) -> Switched {
    let rows = changed(version, tables);
    cache.switch(version, |_| rows.iter().map(|(t, id, row)| NewRow::of((*t, *id, &row[..])))).unwrap()
}

/// The counts of a batch.
struct Seen {
    hits: u64,
    pointed: u64,
    misses: u64,
}

/// Runs a batch as the engine does, and checks every row that it reads before and after its inserts.
fn run_batch(cache: &FlatCache, tables: &[TableShape], query: &mut Query, ids: &[(u32, Vec<u64>)]) -> Seen {
    let pin = cache.pin();
    query.clear();
    for (table, ids) in ids {
        query.push(TableId(*table), ids.iter().copied());
    }
    let found = pin.lookup(query).unwrap();
    let fetch = |t: TableId, id| row_at(pin.version(), t, id, tables[t.index()].row_bytes);
    let seen = |table, id, unique| {
        let occurrences = found.uniques().iter().filter(|&&u| u == unique).count() as u32;
        Miss { table, id, unique, occurrences }
    };
    for half in 0..2 {
        let occurrences = ids.iter().flat_map(|(t, ids)| ids.iter().map(|&id| (TableId(*t), id)));
        for ((t, id), &unique) in occurrences.zip(found.uniques()) {
            match found.source(unique) {
                Source::Row(row) => assert_eq!(row, fetch(t, id), "table {t:?} id {id}"),
                Source::Host(p) => assert_eq!(found.pointed()[p], seen(t, id, unique)),
                Source::Miss(m) => assert_eq!(found.misses()[m], seen(t, id, unique)),
            }
        }
        for miss in found.misses().iter().filter(|_| half == 0) {
            pin.insert(miss, &fetch(miss.table, miss.id)).unwrap();
        }
    }
    let missing: HashSet<_> = found.misses().iter().map(|m| m.unique).collect();
    assert_eq!(missing.len(), found.misses().len(), "each miss once");
    let misses = missing.len() as u64;
    let pointed: HashSet<_> = found.pointed().iter().map(|m| m.unique).collect();
    let pointed = found.uniques().iter().filter(|u| pointed.contains(u)).count() as u64;
    Seen { hits: found.uniques().len() as u64 - misses - pointed, pointed, misses }
}

/// A row that a batch uses once and does not find.
fn miss(table: TableId, id: u64) -> Miss {
    Miss { table, id, unique: 0, occurrences: 1 }
}

fn totals(stats: &CacheStats) -> (u64, u64, u64) {
    let sum = |of: fn(&TableStats) -> u64| stats.tables.iter().map(of).sum();
    (sum(|t| t.hits), sum(|t| t.misses), sum(|t| t.evictions))
}

fn settle(cache: &FlatCache) {
    for _ in 0..100_000 {
        if cache.evict_step() == EvictStep::Idle {
            return;
        }
    }
    panic!("eviction does not come to rest");
}

/// A random table and ids in it.
fn column() -> impl Strategy<Value = (prop::sample::Index, Vec<u64>)> {
    (any::<prop::sample::Index>(), prop::collection::vec(0u64..120, 0..40))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_hit_is_the_row_inserted_for_its_table_and_id(
        dims in prop::collection::vec(1usize..40, 1..6),
        room in 1usize..60,
        batches in prop::collection::vec((prop::collection::vec(column(), 1..8), 0u8..4), 1..40),
    ) {
        let tables: Vec<_> = dims.iter().map(|&dim| table(120, dim)).collect();
        let mut shape = CacheShape::from_fraction(0.0, tables.clone());
        shape.bytes += room * 100;
        let cache = FlatCache::new(&shape, &by_hand()).unwrap();
        let mut query = Query::default();
        let (mut hits, mut misses) = (0, 0);
        for (columns, steps) in batches {
            let of_table = |(t, ids): (prop::sample::Index, _)| (t.index(tables.len()) as u32, ids);
            let ids: Vec<_> = columns.into_iter().map(of_table).collect();
            let seen = run_batch(&cache, &tables, &mut query, &ids);
            hits += seen.hits;
            misses += seen.misses;
            for _ in 0..steps {
                cache.evict_step();
            }
        }
        settle(&cache);
        let stats = cache.stats();
        let (h, m, evictions) = totals(&stats);
        prop_assert_eq!((h, m), (hits, misses), "a missed row is one miss, its repeats are hits");
        prop_assert_eq!(stats.entries, stats.inserted - evictions);
        prop_assert!(stats.total_bytes <= shape.bytes as u64);
        prop_assert!(stats.pool_used_bytes <= stats.pool_bytes);
        prop_assert!(!cache.shared.crossed());
    }
}

#[test]
fn all_miss_all_hit_and_a_mixture() {
    let tables = [table(1000, 16), table(1000, 4)];
    let shape = CacheShape::from_fraction(1.0, tables.to_vec());
    let cache = FlatCache::new(&shape, &by_hand()).unwrap();
    let mut query = Query::default();
    let batch = |ids: std::ops::Range<u64>| vec![(0, ids.clone().collect()), (1, ids.collect())];
    let mut run = |ids| {
        let seen = run_batch(&cache, &tables, &mut query, &batch(ids));
        (seen.hits, seen.misses)
    };
    assert_eq!(run(0..500), (0, 1000));
    assert_eq!(run(0..500), (1000, 0));
    assert_eq!(run(250..750), (500, 500));
    assert_eq!(run(0..750), (1500, 0));
}

#[test]
fn the_rows_of_the_model_stay_in_a_cache_of_the_whole_fraction() {
    let tables = [table(30_000, 16), table(20_000, 1), table(7, 3)];
    let shape = CacheShape::from_fraction(1.0, tables.to_vec());
    let cache = FlatCache::new(&shape, &by_hand()).unwrap();
    let pin = cache.pin();
    for (t, shape) in tables.iter().enumerate() {
        for id in 0..shape.rows {
            let table = TableId(t as u32);
            assert_eq!(
                pin.insert(&miss(table, id), &row_of(table, id, shape.row_bytes)).unwrap(),
                Insertion::Stored
            );
        }
    }
    drop(pin);
    settle(&cache);
    // A row is evicted only to make room for a key with two full buckets.
    let evictions = totals(&cache.stats()).2;
    assert_eq!(cache.stats().entries, 50_007 - evictions);
    assert!(evictions < 50, "{evictions} of 50007 rows evicted");
}

#[test]
fn ids_repeated_in_a_batch_are_one_row_and_tables_are_apart() {
    let tables = [table(10, 2), table(10, 2)];
    let cache = cache_of(1 << 16, &tables, &by_hand());
    let mut query = Query::default();
    let pin = cache.pin();
    assert_eq!(query.push(TableId(0), [5, 5, 3]), 0..3);
    assert_eq!(query.push(TableId(1), [5]), 3..4);
    assert_eq!(query.push(TableId(0), [3]), 4..5);
    let found = pin.lookup(&mut query).unwrap();
    assert_eq!(found.uniques(), [0, 0, 1, 2, 1]);
    let misses: Vec<_> = found.misses().iter().map(|m| (m.table.0, m.id, m.unique)).collect();
    assert_eq!(misses, [(0, 5, 0), (0, 3, 1), (1, 5, 2)]);
    let stats = cache.stats().tables;
    assert_eq!((stats[0].misses, stats[1].misses), (2, 1));
    assert_eq!((stats[0].hits, stats[1].hits), (2, 0), "the repeats of a missed row");
}

#[test]
fn the_first_of_two_inserts_stays() {
    let cache = cache_of(1 << 16, &[table(10, 1)], &by_hand());
    let pin = cache.pin();
    assert_eq!(pin.insert(&miss(TableId(0), 1), &[1; 4]).unwrap(), Insertion::Stored);
    assert_eq!(pin.insert(&miss(TableId(0), 1), &[2; 4]).unwrap(), Insertion::Present);
    let mut query = Query::default();
    query.push(TableId(0), [1]);
    assert_eq!(pin.lookup(&mut query).unwrap().source(0), Source::Row(&[1; 4]));
}

#[test]
fn an_evicted_row_stays_readable_under_its_pin() {
    let tables = [table(100_000, 4)];
    let cache = cache_of(8 << 10, &tables, &by_hand());
    let mut query = Query::default();
    run_batch(&cache, &tables, &mut query, &[(0, vec![0])]);
    let (pin, mut mine) = (cache.pin(), Query::default());
    mine.push(TableId(0), [0]);
    let found = pin.lookup(&mut mine).unwrap();
    assert!(matches!(found.source(0), Source::Row(_)));
    let mut id = 1;
    while totals(&cache.stats()).2 < 1000 && id < 99_000 {
        run_batch(&cache, &tables, &mut query, &[(0, (id..id + 10).collect())]);
        id += 10;
        cache.evict_step();
        assert_eq!(found.source(0), Source::Row(&row_of(TableId(0), 0, 16)));
    }
    drop(pin);
    settle(&cache);
    let pin = cache.pin();
    assert!(matches!(pin.lookup(&mut mine).unwrap().source(0), Source::Miss(0)), "evicted long ago");
}

#[test]
fn eviction_goes_from_the_high_to_the_low_watermark_and_takes_the_oldest() {
    let tables = [table(100_000, 16)];
    let cache = cache_of(1 << 20, &tables, &by_hand());
    let mut query = Query::default();
    let mut next = 0;
    while !cache.shared.crossed() {
        // The first 100 rows are used in every batch.
        let ids = (0..100).chain(next.max(100)..next + 200).collect();
        run_batch(&cache, &tables, &mut query, &[(0, ids)]);
        next += 200;
    }
    let before = cache.stats();
    settle(&cache);
    let after = cache.stats();
    let share = after.pool_used_bytes as f64 / after.pool_bytes as f64;
    let load = after.entries as f64 / after.entry_capacity as f64;
    assert!(share.max(load) <= WATERMARKS.low && share.max(load) > WATERMARKS.low - 0.01, "{share} {load}");
    let evicted = before.entries - after.entries;
    let mut present = |ids: std::ops::Range<u64>| {
        query.clear();
        let wanted = ids.end - ids.start;
        query.push(TableId(0), ids);
        wanted - cache.pin().lookup(&mut query).unwrap().misses().len() as u64
    };
    assert_eq!(present(0..100), 100, "the rows in use stay");
    let oldest = present(100..100 + evicted) as f64 / evicted as f64;
    assert!(oldest < 0.5, "{oldest} of the oldest rows are still there");
    assert!(present(next - 1000..next) > 990, "the newest rows stay");
}

#[test]
fn memory_moves_from_one_row_size_to_another() {
    let tables = [table(100_000, 16), table(100_000, 5)];
    let cache = cache_of(256 << 10, &tables, &by_hand());
    let mut query = Query::default();
    let held = |cache: &FlatCache, t: usize| {
        let stats = cache.stats();
        stats.tables[t].hits
    };
    for (t, other) in [(0, 1), (1, 0), (0, 1)] {
        for start in 0..1500u64 {
            let ids = (start * 20 % 99_000..start * 20 % 99_000 + 20).collect();
            run_batch(&cache, &tables, &mut query, &[(t, ids)]);
            cache.evict_step();
        }
        for _ in 0..200 {
            run_batch(&cache, &tables, &mut query, &[(t, (0..600).collect())]);
            settle(&cache);
        }
        let before = held(&cache, t as usize);
        run_batch(&cache, &tables, &mut query, &[(t, (0..600).collect())]);
        let hits = held(&cache, t as usize) - before;
        assert_eq!(hits, 600, "table {t} has taken the room of table {other}");
    }
}

#[test]
fn a_full_cache_rejects_rows_and_counts_them() {
    let tables = [table(10_000, 8)];
    let cache = cache_of(4 << 10, &tables, &by_hand());
    let pin = cache.pin();
    let outcomes: Vec<_> = (0..1000).map(|id| pin.insert(&miss(TableId(0), id), &[0; 32]).unwrap()).collect();
    let full = outcomes.iter().filter(|o| **o == Insertion::Full).count() as u64;
    assert!(full > 0);
    assert_eq!(cache.stats().rejected_full, full);
}

#[test]
fn rows_that_are_not_admitted_are_counted() {
    let options = CacheOptions { admission: AdmissionOption::Probability { p: 0.25, seed: 0 }, ..by_hand() };
    let cache = cache_of(1 << 20, &[table(10_000, 1)], &options);
    for id in 0..4000 {
        cache.pin().insert(&miss(TableId(0), id), &[0; 4]).unwrap();
    }
    let stats = cache.stats();
    assert_eq!(stats.inserted + stats.not_admitted, 4000);
    assert!((800..1200).contains(&stats.inserted), "{} admitted", stats.inserted);
}

#[test]
fn bad_input_is_refused_by_name() {
    let tables = vec![table(10, 2)];
    let make = |bytes, options: &CacheOptions| {
        FlatCache::new(&CacheShape { bytes, tables: tables.clone() }, options)
    };
    let message = |e: CacheError| e.to_string();
    let small = message(make(100, &by_hand()).unwrap_err());
    assert!(small.starts_with("cache.bytes: 100 cannot hold") && small.contains("minimum"), "{small}");
    let options =
        CacheOptions { admission: AdmissionOption::Probability { p: f64::NAN, seed: 0 }, ..by_hand() };
    assert!(message(make(1 << 16, &options).unwrap_err()).starts_with("cache.admission_probability"));
    let options = CacheOptions { watermarks: Watermarks { high: 0.5, low: 0.6 }, ..by_hand() };
    assert!(message(make(1 << 16, &options).unwrap_err()).starts_with("cache.low_watermark"));
    for row_bytes in [0, 6] {
        let odd = CacheShape { bytes: 1 << 16, tables: vec![TableShape { rows: 1, row_bytes }] };
        let odd = message(FlatCache::new(&odd, &by_hand()).unwrap_err());
        assert_eq!(odd, format!("table 0: row bytes: expected a multiple of 4 above 0, got {row_bytes}"));
    }

    let cache = make(1 << 16, &by_hand()).unwrap();
    let pin = cache.pin();
    assert!(matches!(
        pin.insert(&miss(TableId(1), 0), &[0; 8]),
        Err(CacheError::Table { got: 1, tables: 1 })
    ));
    assert!(matches!(
        pin.insert(&miss(TableId(0), 10), &[0; 8]),
        Err(CacheError::Id { got: 10, rows: 10, .. })
    ));
    let short = pin.insert(&miss(TableId(0), 0), &[0; 4]);
    assert!(matches!(short, Err(CacheError::RowBytes { got: 4, expected: 8, .. })));
    let mut query = Query::default();
    query.push(TableId(0), [3, 10]);
    assert!(matches!(pin.lookup(&mut query), Err(CacheError::Id { got: 10, .. })));
    query.clear();
    query.push(TableId(9), [0]);
    assert!(matches!(pin.lookup(&mut query), Err(CacheError::Table { got: 9, .. })));
}

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
