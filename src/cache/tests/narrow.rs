//! Keys too narrow for their tables: rows that meet under one key are told apart by their tags.

use super::*;

fn narrow(bits: u32) -> CacheOptions {
    CacheOptions { key_width: KeyWidth::new(bits).unwrap(), ..by_hand() }
}

proptest! {
    #[test]
    fn a_hit_is_the_row_inserted_however_narrow_the_keys_are(
        bits in 4u32..12,
        batches in prop::collection::vec(prop::collection::vec((0u32..3, 0u64..400), 1..40), 1..40),
    ) {
        let tables = [table(400, 3), table(400, 8), table(5, 1)];
        let cache = cache_of(16 << 10, &tables, &narrow(bits));
        let mut query = Query::default();
        let (mut hits, mut misses) = (0, 0);
        for batch in batches {
            let ids: Vec<_> = batch.into_iter().map(|(t, id)| (t, vec![id % tables[t as usize].rows])).collect();
            // Checks every row that is found against the row that it should be.
            let seen = run_batch(&cache, &tables, &mut query, &ids);
            hits += seen.hits;
            misses += seen.misses;
            cache.evict_step();
        }
        let stats = cache.stats();
        prop_assert_eq!((totals(&stats).0, totals(&stats).1), (hits, misses));
        let exact = |t: &u32| cache.shared.keys.index_keys().code(TableId(*t)).unwrap().is_exact();
        prop_assert!((0..3).filter(exact).all(|t| stats.tables[t as usize].collisions == 0));
        prop_assert!(stats.tables.iter().all(|t| t.collisions <= t.misses));
    }
}

#[test]
fn rows_of_one_key_take_its_place_in_turn_and_each_miss_of_theirs_is_counted() {
    let tables = [table(1000, 2)];
    let cache = cache_of(64 << 10, &tables, &narrow(4));
    let code = cache.shared.keys.index_keys().code(TableId(0)).unwrap();
    let rival = (1..1000).find(|&id| code.key(id) == code.key(0)).unwrap();
    let mut query = Query::default();
    let mut miss = |id| run_batch(&cache, &tables, &mut query, &[(0, vec![id])]).misses;
    assert_eq!([miss(0), miss(0), miss(rival), miss(rival), miss(0)], [1, 0, 1, 0, 1]);
    assert_eq!(cache.stats().tables[0].collisions, 2, "the first miss met nobody");
    assert_eq!(cache.stats().entries, 1);
}

#[test]
fn two_rows_of_one_key_in_one_batch_are_two_rows() {
    let tables = [table(1000, 2)];
    let cache = cache_of(64 << 10, &tables, &narrow(4));
    let mut query = Query::default();
    let seen = run_batch(&cache, &tables, &mut query, &[(0, (0..1000).collect())]);
    assert_eq!(seen.misses, 1000);
    assert!(cache.stats().entries <= 16);
}

#[test]
fn a_tagged_cache_of_a_fraction_has_room_for_it_and_its_tags() {
    for options in [narrow(10), CacheOptions { pointers: 5000, ..narrow(32) }] {
        let tables = vec![table(4000, 3), table(100, 16)];
        let shape = CacheShape::for_options(0.1, tables.clone(), &options).unwrap();
        let cache = FlatCache::new(&shape, &options).unwrap();
        let stats = cache.stats();
        assert!(stats.total_bytes <= shape.bytes as u64, "{stats:?}");
        assert!(stats.pool_bytes >= 400 * 12 + 10 * 64);
    }
}
