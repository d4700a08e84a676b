//! Versions: a batch reads the rows of its own version, whatever is switched, evicted and inserted meanwhile.

use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;

use super::*;
use crate::cache::shared::Insertion;

#[test]
fn cached_changed_rows_are_carried_over_and_others_are_not_inserted() {
    let tables = [table(100, 4)];
    let cache = cache_of(64 << 10, &tables, &by_hand());
    let mut query = Query::default();
    run_batch(&cache, &tables, &mut query, &[(0, (0..50).collect())]);
    let switched = switch(&cache, &tables, Version(1));
    assert_eq!(switched, Switched { changed: 10, carried: 10 });
    // `run_batch` compares the rows with version 1.
    let seen = run_batch(&cache, &tables, &mut query, &[(0, (0..100).collect())]);
    assert_eq!((seen.hits, seen.misses), (50, 50));
    settle(&cache);
    assert_eq!(cache.shared.retired.waiting(), 0, "the old rows' slots are free");
    assert_eq!(cache.stats().entries, 100);
}

/// Switches to version 1, which changes rows 1, 6, 11 and so on, while batches run that began before it. The
/// switch begins when the rows 0 to 49 are cached.
fn switch_under_batches(
    cache: &FlatCache,
    switch: impl FnOnce() -> Switched + Send,
    check: impl FnOnce(&Switched),
) {
    let tables = [table(100, 4)];
    let row = |id| row_of(TableId(0), id, 16);
    let mut query = Query::default();
    run_batch(cache, &tables, &mut query, &[(0, (0..50).collect())]);
    let first = cache.pin();
    std::thread::scope(|scope| {
        let switching = scope.spawn(switch);
        // A batch that began before may insert rows until it sees that their admission has stopped. These
        // rows do not change, so they are not counted.
        let admitted = (92..96).cycle().take(30_000).take_while(|&id| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            first.insert(&miss(TableId(0), id), &row(id)).unwrap() != Insertion::NotAdmitted
        });
        assert!(admitted.count() < 30_000, "the admission of rows stops");
        let old = cache.pin();
        assert_eq!(old.version(), Version(0), "a batch that may insert rows still runs");
        drop(first);
        while cache.version() != Version(1) {
            std::thread::yield_now();
        }
        // A batch of each version runs at once. None inserts rows.
        let mut mine = Query::default();
        for _ in 0..2 {
            let new = run_batch(cache, &tables, &mut mine, &[(0, (0..60).collect())]);
            assert!(new.misses >= 10, "{} misses", new.misses);
        }
        query.clear();
        query.push(TableId(0), 0..60);
        let found = old.lookup(&mut query).unwrap();
        (0..50).for_each(|id| assert_eq!(found.source(id), Source::Row(&row(id.into()))));
        assert_eq!(found.misses().len(), 10);
        for miss in found.misses() {
            assert_eq!(old.insert(miss, &row(miss.id)).unwrap(), Insertion::NotAdmitted);
        }
        assert!(!switching.is_finished(), "the old batch has not finished");
        drop(old);
        check(&switching.join().unwrap());
    });
    let mut misses = || run_batch(cache, &tables, &mut query, &[(0, (0..60).collect())]).misses;
    assert!(misses() >= 10);
    assert_eq!(misses(), 0, "rows are admitted again");
}

#[test]
fn a_batch_of_the_old_version_finds_old_rows_until_it_ends() {
    let cache = cache_of(64 << 10, &[table(100, 4)], &by_hand());
    switch_under_batches(
        &cache,
        || switch(&cache, &[table(100, 4)], Version(1)),
        |switched| assert_eq!((switched.carried, switched.changed), (10, 10)),
    );
}

#[test]
fn a_switch_whose_changes_are_found_in_the_list_of_cached_rows_may_drop_them() {
    let cache = cache_of(64 << 10, &[table(100, 4)], &by_hand());
    let bytes: Vec<_> = (0..100).map(|id| row_at(Version(1), TableId(0), id, 16)).collect();
    let listed = || {
        cache.switch(Version(1), |cached| {
            let changed = cached.rows().into_iter().filter(|row| changes(Version(1), row.row()));
            let bytes = |id: u64| (id % 2 == 1).then_some(&bytes[id as usize][..]);
            changed.map(move |row| NewRow { row, bytes: bytes(row.row()) })
        })
    };
    switch_under_batches(
        &cache,
        || listed().unwrap(),
        |switched| assert_eq!((switched.carried, switched.changed), (5, 10)),
    );
}

#[test]
fn the_current_version_and_a_wrong_row_change_nothing() {
    let tables = [table(10, 1)];
    let options = CacheOptions { version: Version(7), ..by_hand() };
    let cache = cache_of(16 << 10, &tables, &options);
    let mut query = Query::default();
    run_batch(&cache, &tables, &mut query, &[(0, vec![2])]);
    let used = cache.stats();
    let error = |version, rows: &[(TableId, u64, &[u8])]| {
        cache.switch(Version(version), |_| rows.iter().copied().map(NewRow::of)).unwrap_err().to_string()
    };
    assert_eq!(error(7, &[]), "version 7: expected another one than the current version");
    assert!(error(8, &[(TableId(0), 2, &[0; 4]), (TableId(0), 10, &[0; 4])]).contains("id 10"));
    assert!(error(8, &[(TableId(0), 2, &[0; 4]), (TableId(1), 0, &[0; 4])]).contains("table 1"));
    assert!(error(8, &[(TableId(0), 2, &[0; 3])]).contains("got 3"));
    assert_eq!((cache.version(), cache.stats()), (Version(7), used));
    let seen = run_batch(&cache, &tables, &mut query, &[(0, vec![2])]);
    assert_eq!(seen.hits, 1);
}

#[test]
fn a_switch_gives_up_if_an_earlier_batch_does_not_end_and_works_when_it_has() {
    let tables = [table(100, 4)];
    let options = CacheOptions { switch_wait: Duration::from_millis(50), ..by_hand() };
    let cache = cache_of(64 << 10, &tables, &options);
    let stuck = cache.pin();
    let error = cache.switch(Version(1), |_| [] as [NewRow<'_>; 0]).unwrap_err();
    assert_eq!(error.to_string(), "batches that began before the switch have not ended for 0.05 s");
    let row = row_at(Version(0), TableId(0), 1, 16);
    assert_eq!(
        cache.pin().insert(&miss(TableId(0), 1), &row).unwrap(),
        Insertion::Stored,
        "rows are admitted"
    );
    drop(stuck);
    assert_eq!(switch(&cache, &tables, Version(1)).changed, 1);
    assert_eq!(cache.version(), Version(1));
}

#[test]
fn a_row_given_twice_has_its_last_bytes() {
    let cache = cache_of(16 << 10, &[table(10, 1)], &by_hand());
    cache.pin().insert(&miss(TableId(0), 3), &[1; 4]).unwrap();
    let rows: [(_, _, &[u8]); 2] = [(TableId(0), 3, &[2; 4]), (TableId(0), 3, &[3; 4])];
    assert_eq!(
        cache.switch(Version(1), |_| rows.map(NewRow::of)).unwrap(),
        Switched { changed: 1, carried: 1 }
    );
    let mut query = Query::default();
    query.push(TableId(0), [3]);
    let pin = cache.pin();
    assert_eq!(pin.lookup(&mut query).unwrap().source(0), Source::Row(&[3; 4]));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn after_a_switch_no_row_of_an_old_version_is_found(
        room in 1usize..80,
        bits in prop_oneof![Just(64u32), 6u32..12],
        steps in prop::collection::vec(
            (prop::collection::vec(0u64..120, 1..30), any::<bool>(), 0u8..3),
            1..30,
        ),
    ) {
        let tables = [table(120, 3), table(120, 7)];
        let mut shape = CacheShape::from_fraction(0.0, tables.to_vec());
        shape.bytes += room * 100;
        let options = CacheOptions { key_width: KeyWidth::new(bits).unwrap(), ..by_hand() };
        let Ok(cache) = FlatCache::new(&shape, &options) else { return Ok(()) };
        let mut query = Query::default();
        let mut version = 0;
        for (ids, switches, evictions) in steps {
            run_batch(&cache, &tables, &mut query, &[(0, ids.clone()), (1, ids)]);
            if switches {
                version += 1;
                switch(&cache, &tables, Version(version));
                prop_assert_eq!(cache.version(), Version(version));
            }
            for _ in 0..evictions {
                cache.evict_step();
            }
        }
        settle(&cache);
        prop_assert!(cache.stats().pool_used_bytes <= cache.stats().pool_bytes);
    }
}

/// Eight workers use far more rows than the cache can hold, while a writer repeatedly changes a fifth of all
/// rows. Freed slots are poisoned. Every returned row must have the bytes of its batch's version.
#[test]
fn under_eight_threads_eviction_and_a_writer_every_row_is_its_versions() {
    let tables = [table(4_000, 16), table(500, 1), table(2_000, 33), table(50, 7)];
    for key_width in [KeyWidth::W64, KeyWidth::new(11).unwrap()] {
        let options = CacheOptions { key_width, ..for_all() };
        let cache = cache_of(60 << 10, &tables, &options);
        let working = AtomicU64::new(8);
        std::thread::scope(|scope| {
            for worker in 0..8u64 {
                let (cache, working) = (&cache, &working);
                scope.spawn(move || {
                    let mut query = Query::default();
                    for batch in 0..100_000u64 {
                        if batch >= 600 && totals(&cache.stats()).2 > 500 && cache.version() > Version(3) {
                            break;
                        }
                        let draw = |t: usize, i: u64| {
                            let random = crate::mem::mix64(worker << 40 | batch << 20 | (t as u64) << 8 | i);
                            let unit = (random >> 11) as f64 / (1u64 << 53) as f64;
                            (unit * unit * unit * tables[t].rows as f64) as u64
                        };
                        let column = |t: usize| (t as u32, (0..24).map(|i| draw(t, i)).collect());
                        let ids: Vec<_> = (0..4).map(column).collect();
                        run_batch(cache, &tables, &mut query, &ids);
                    }
                    working.fetch_sub(1, Ordering::Release);
                });
            }
            scope.spawn(|| {
                let mut version = 0;
                while working.load(Ordering::Acquire) > 0 {
                    version += 1;
                    switch(&cache, &tables, Version(version));
                }
                assert!(version > 3, "the writer wrote only {version} times");
            });
        });
        let (hits, _, evictions) = totals(&cache.stats());
        assert!(hits > 0 && evictions > 500, "{hits} hits, {evictions} evictions");
        while cache.evict_step() != EvictStep::Idle {
            std::thread::yield_now();
        }
        let stats = cache.stats();
        assert_eq!(stats.entries, stats.inserted - totals(&stats).2);
    }
}
