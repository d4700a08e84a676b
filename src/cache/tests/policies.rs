//! Tests of the policies in the whole cache.

use super::*;
use crate::cache::policy::rank::Ranks;
use crate::cache::shared::Insertion;

#[test]
fn a_full_cache_admits_a_row_at_its_second_use_while_missing() {
    let options = CacheOptions { admission: AdmissionOption::Frequency { misses: 2 }, ..by_hand() };
    let tables = [table(100_000, 4)];
    let cache = cache_of(64 << 10, &tables, &options);
    let offer_of = |occurrences, id| {
        let miss = Miss { occurrences, ..miss(TableId(0), id) };
        cache.pin().insert(&miss, &row_of(TableId(0), id, 16)).unwrap()
    };
    let offer = |id: u64| offer_of(1, id);
    let stored = (0..100_000).take_while(|&id| offer(id) == Insertion::Stored).count() as f64;
    let stats = cache.stats();
    let filled = (stored / stats.entry_capacity as f64).max(16.0 * stored / stats.pool_bytes as f64);
    assert!(filled > WATERMARKS.low - 0.01 && filled < WATERMARKS.high, "{filled} is full");
    let offers: Vec<_> = (50_000..50_100).map(|id| [offer(id), offer(id), offer(id)]).collect();
    let at_the_second = [Insertion::NotAdmitted, Insertion::Stored, Insertion::Present];
    assert!(offers.iter().all(|o| *o == at_the_second), "{offers:?}");
    assert!((60_000..60_010).all(|id| offer_of(2, id) == Insertion::Stored), "used twice by one batch");
    assert!(cache.stats().total_bytes <= 64 << 10);
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

#[test]
fn ranks_are_part_of_the_bytes_and_leave_room_for_rows() {
    let tables = vec![table(4000, 3), table(100_000, 16)];
    let ranked: Vec<_> = (0..100_000).map(|id| RowId::new(TableId(1), id)).collect();
    let options = CacheOptions { eviction: EvictionOption::Lfu(ranked), ..by_hand() };
    for admission in [AdmissionOption::ALL, AdmissionOption::DEFAULT] {
        let options = CacheOptions { admission, ..options.clone() };
        let shape = CacheShape::for_options(0.1, tables.clone(), &options).unwrap();
        let large = FlatCache::new(&shape, &options).unwrap();
        let small =
            FlatCache::new(&CacheShape { bytes: 64 << 10, tables: tables.clone() }, &options).unwrap();
        for (cache, bytes, rows) in [(&large, shape.bytes, 10_000), (&small, 64 << 10, 500)] {
            let (stats, ranks) = (cache.stats(), cache.shared.eviction.bytes());
            assert!(stats.total_bytes <= bytes as u64, "{stats:?} of {bytes}");
            assert!(ranks >= Ranks::bytes_of(rows) && ranks < bytes / 4, "{ranks} of {bytes}");
            assert!(stats.entry_capacity >= rows as u64, "{stats:?} has no room for {rows} rows");
        }
    }
}
