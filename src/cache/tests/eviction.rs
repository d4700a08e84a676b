//! What is evicted and admitted: the oldest rows go, between the watermarks, and rows that do not fit are
//! counted.

use super::*;
use crate::cache::shared::Insertion;

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
