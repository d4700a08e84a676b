//! What a cache holds, so that another can begin with it; and the policies as the cache applies them.

use super::*;

#[test]
fn hot_rows_are_those_in_the_cache_the_last_used_first() {
    for bits in [64, 5] {
        let tables = [table(1000, 4), table(3, 1)];
        let options = CacheOptions { key_width: KeyWidth::new(bits).unwrap(), ..by_hand() };
        let cache = cache_of(1 << 20, &tables, &options);
        let mut query = Query::default();
        for batch in [vec![9, 4], vec![500], vec![4]] {
            run_batch(&cache, &tables, &mut query, &[(0, batch)]);
        }
        run_batch(&cache, &tables, &mut query, &[(1, vec![2])]);
        let hot = cache.hot_rows();
        let expected = [(TableId(1), 2), (TableId(0), 4), (TableId(0), 500), (TableId(0), 9)];
        assert_eq!(hot, expected, "{bits} bits");
    }
}

#[test]
fn once_the_cache_is_full_rows_are_let_in_at_their_second_miss() {
    let options = CacheOptions { admission: AdmissionOption::Frequency { misses: 2 }, ..by_hand() };
    let tables = [table(100_000, 4)];
    let cache = cache_of(64 << 10, &tables, &options);
    let offer = |id: u64| cache.pin().insert(TableId(0), id, &row_of(TableId(0), id, 16)).unwrap();
    let stored = (0..100_000).take_while(|&id| offer(id) == Insertion::Stored).count() as f64;
    let stats = cache.stats();
    let filled = (stored / stats.entry_capacity as f64).max(16.0 * stored / stats.pool_bytes as f64);
    assert!(filled > WATERMARKS.low - 0.01 && filled < WATERMARKS.high, "{filled} is full");
    let offers: Vec<_> = (50_000..50_100).map(|id| [offer(id), offer(id), offer(id)]).collect();
    let at_the_second = [Insertion::NotAdmitted, Insertion::Stored, Insertion::Present];
    let at_the_first = [Insertion::Stored, Insertion::Present, Insertion::Present];
    assert!(offers.iter().all(|o| *o == at_the_second || *o == at_the_first), "{offers:?}");
    // So small a sketch takes some of them for others that it has counted.
    let second = offers.iter().filter(|o| **o == at_the_second).count();
    assert!(second > 60, "{second} of 100 were let in at their second miss");
    assert!(cache.stats().total_bytes <= 64 << 10);
}

#[test]
fn rows_of_low_rank_leave_first() {
    let tables = [table(5000, 16)];
    let ranked: Vec<_> = (0..100).map(|id| (TableId(0), id)).collect();
    let options = CacheOptions { eviction: EvictionOption::Lfu(ranked), ..by_hand() };
    let cache = cache_of(100 << 10, &tables, &options);
    let mut query = Query::default();
    // The ranked rows once, then many times more of the others than there is room for.
    for start in (0..5000u64).step_by(50) {
        run_batch(&cache, &tables, &mut query, &[(0, (start..start + 50).collect())]);
        settle(&cache);
    }
    let held: HashSet<_> = cache.hot_rows().into_iter().map(|(_, id)| id).collect();
    assert!((0..100).all(|id| held.contains(&id)), "the ranked rows stay though unused");
    assert!(held.contains(&4999));
}

#[test]
fn options_out_of_range_are_refused_by_name() {
    let shape = CacheShape { bytes: 1 << 16, tables: vec![table(10, 2), table(10, 2)] };
    let refused = |options: CacheOptions| FlatCache::new(&shape, &options).unwrap_err().to_string();
    let misses = |misses| CacheOptions { admission: AdmissionOption::Frequency { misses }, ..by_hand() };
    assert!(refused(misses(0)).starts_with("cache.admission_misses: expected 1 to 15"));
    assert!(refused(misses(16)).contains("got 16"));
    let tight = CacheOptions { pointers: 1 << 20, ..by_hand() };
    assert!(refused(tight).starts_with("cache.bytes: 65536 cannot hold"));
    let bits = CacheOptions { key_width: KeyWidth::new(2).unwrap(), ..by_hand() };
    assert!(FlatCache::new(&shape, &bits).is_ok(), "two keys for two tables");
    let one_more = CacheShape { bytes: 1 << 16, tables: vec![table(10, 2); 3] };
    assert!(FlatCache::new(&one_more, &bits).unwrap_err().to_string().contains("3 bits are needed"));
}

/// Rows of table 0, as [`FlatCache::warm`] takes them.
fn warm(cache: &FlatCache, tables: &[TableShape], ids: impl Iterator<Item = u64>) -> Warmed {
    let rows: Vec<_> = ids.map(|id| (id, row_of(TableId(0), id, tables[0].row_bytes))).collect();
    cache.warm(rows.iter().map(|(id, row)| (TableId(0), *id, row.as_slice()))).unwrap()
}

#[test]
fn warm_rows_are_found_whatever_the_admission_and_keep_their_order() {
    for bits in [64, 12] {
        let tables = [table(1000, 4), table(1000, 1)];
        let options = CacheOptions {
            admission: AdmissionOption::Probability { p: 0.0, seed: 0 },
            key_width: KeyWidth::new(bits).unwrap(),
            ..by_hand()
        };
        let cache = cache_of(1 << 20, &tables, &options);
        let warmed = warm(&cache, &tables, (0..300).rev());
        assert_eq!((warmed.stored, warmed.full), (300, false), "{bits} bits");
        let hot: Vec<u64> = cache.hot_rows().into_iter().map(|(_, id)| id).collect();
        assert!(hot.is_sorted_by(|a, b| a > b) && hot.len() == 300, "{bits} bits: {hot:?}");
        let seen = run_batch(&cache, &tables, &mut Query::default(), &[(0, (0..300).collect())]);
        assert_eq!((seen.hits, seen.misses), (300, 0));
    }
}

#[test]
fn warming_ends_below_the_high_watermark_with_the_hottest_in() {
    let tables = [table(5000, 16)];
    let cache = cache_of(100 << 10, &tables, &by_hand());
    let mut asked = 0;
    let rows: Vec<_> = (0..5000).map(|id| row_of(TableId(0), id, 64)).collect();
    let rows = rows.iter().enumerate().inspect(|_| asked += 1);
    let warmed = cache.warm(rows.map(|(id, row)| (TableId(0), id as u64, row.as_slice()))).unwrap();
    assert!(warmed.full && warmed.stored > 800, "{warmed:?}");
    assert!(asked <= warmed.stored + warmed.passed_over + 1, "{asked} asked for, {warmed:?}");
    assert_eq!(cache.evict_step(), EvictStep::Idle, "nothing is to be put out");
    assert_eq!(totals(&cache.stats()).2, 0);
    let held: HashSet<u64> = cache.hot_rows().into_iter().map(|(_, id)| id).collect();
    let first = (0..warmed.stored).filter(|id| held.contains(id)).count() as u64;
    assert!(first + warmed.passed_over >= warmed.stored, "{first} of the first {warmed:?}");
}

#[test]
fn the_coldest_of_the_warm_rows_leave_first() {
    let tables = [table(5000, 16)];
    let cache = cache_of(100 << 10, &tables, &by_hand());
    let warmed = warm(&cache, &tables, 0..5000);
    let mut query = Query::default();
    for start in (2000..2500).step_by(50) {
        run_batch(&cache, &tables, &mut query, &[(0, (start..start + 50).collect())]);
        settle(&cache);
    }
    let held: HashSet<u64> = cache.hot_rows().into_iter().map(|(_, id)| id).collect();
    let kept = |ids: std::ops::Range<u64>| ids.filter(|id| held.contains(id)).count();
    let (hot, cold) = (kept(0..100), kept(warmed.stored - 100..warmed.stored));
    assert!(hot > 90 && cold < 10, "{hot} of the hottest, {cold} of the coldest of {warmed:?}");
}

#[test]
fn a_row_that_is_there_keeps_its_place_and_a_wrong_one_is_refused() {
    let tables = [table(1000, 4)];
    let cache = cache_of(1 << 20, &tables, &by_hand());
    cache.pin().insert(TableId(0), 3, &[1; 16]).unwrap();
    assert_eq!(warm(&cache, &tables, 3..5), Warmed { stored: 1, passed_over: 1, full: false });
    assert!(cache.warm([(TableId(0), 1000, &[0; 16][..])]).is_err());
    assert!(cache.warm([(TableId(0), 7, &[0; 12][..])]).is_err());
    assert_eq!(cache.stats().entries, 2);
}
