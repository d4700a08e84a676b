//! Hits, misses and inserts: a hit is the row of its table and id, and wrong input is refused by name.

use proptest::prelude::*;

use super::*;
use crate::cache::shared::Insertion;

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
