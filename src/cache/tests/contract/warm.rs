//! Warming a cache, listing its hot rows, and the order of eviction.

use std::collections::HashSet;

use crate::cache::index::FRESH;
use crate::cache::{AdmissionOption, EvictStep, EvictionOption, WarmRow, Warmed};
use crate::types::{RowId, TableId};

use super::{Subject, World, narrow, run, settle, totals};

/// Warms a subject with rows of table 0. Checks that it takes a row from the iterator only while it has room,
/// so at most one that does not fit.
fn warm(subject: &mut impl Subject, world: &World, ids: impl Iterator<Item = u64>) -> Warmed {
    let row = |id| (RowId::new(TableId(0), id), world.row(TableId(0), id, 0).unwrap());
    let rows: Vec<_> = ids.map(row).collect();
    let mut taken = 0;
    let rows = rows.iter().map(|(row, bytes)| WarmRow { row: *row, bytes });
    let mut rows = rows.inspect(|_| taken += 1);
    let warmed = subject.warm(&mut rows).unwrap();
    assert_eq!(taken, warmed.stored + warmed.passed_over + u64::from(warmed.full), "{warmed:?}");
    warmed
}

/// Runs a batch with rows of table 0 only. Returns hits and misses.
fn look_up(subject: &mut impl Subject, world: &World, ids: impl Iterator<Item = u64>) -> (u64, u64) {
    let mut columns = vec![ids.collect::<Vec<_>>()];
    columns.resize(world.features, vec![u64::MAX; columns[0].len()]);
    let seen = run(subject, world, &world.one_hot(&columns));
    subject.settle();
    seen
}

fn held(subject: &mut impl Subject) -> HashSet<u64> {
    subject.hot_rows().into_iter().map(RowId::row).collect()
}

pub(crate) fn rows_of_low_rank_leave_first<S: Subject>(new: impl Fn(&World) -> S) {
    let ranked: Vec<_> = (0..100).map(|id| RowId::new(TableId(0), id)).collect();
    let world = World::new(3000, &[16], 64 << 10);
    let world = world.with(|options| options.eviction = EvictionOption::Lfu(ranked));
    let mut subject = new(&world);
    // Uses the ranked rows once, and then many more rows than fit.
    for start in (0..3000u64).step_by(50) {
        look_up(&mut subject, &world, start..start + 50);
        settle(&subject);
    }
    let held = held(&mut subject);
    assert!((0..100).all(|id| held.contains(&id)), "the ranked rows stay although unused");
    assert!((2900..3000).filter(|id| held.contains(id)).count() > 97, "the newest of the others stay");
    assert!(totals(&subject.stats()).2 > 1000);
}

/// Some rows are used again `gap` batches after their insertion. Only if `gap` is above [`FRESH`], the use
/// renews their age, and other rows are evicted instead of them.
pub(crate) fn a_row_is_as_old_as_its_last_use_but_for_a_few_batches<S: Subject>(new: impl Fn(&World) -> S) {
    for (gap, renewed) in [(FRESH, false), (FRESH + 1, true)] {
        let world = World::new(100_000, &[16], 48 << 10);
        let mut subject = new(&world);
        look_up(&mut subject, &world, 0..60);
        let mut others = 60..;
        for _ in 1..gap {
            look_up(&mut subject, &world, others.by_ref().take(60));
        }
        look_up(&mut subject, &world, 0..60);
        while totals(&subject.stats()).2 == 0 {
            look_up(&mut subject, &world, others.by_ref().take(10));
            settle(&subject);
        }
        let (evicted, held) = (totals(&subject.stats()).2, held(&mut subject));
        assert!((20..60).contains(&evicted), "{evicted} rows evicted");
        let gone = (0..60).filter(|id| !held.contains(id)).count() as u64;
        assert_eq!(
            gone,
            if renewed { 0 } else { evicted },
            "rows gone, of {evicted} evicted, when used again {gap} batches later"
        );
    }
}

pub(crate) fn hot_rows_are_those_in_the_cache_the_last_used_first<S: Subject>(new: impl Fn(&World) -> S) {
    for bits in [64, 5] {
        let mut world = World::new(1000, &[4, 1], 64 << 10);
        world.tables[1].rows = 3;
        let world = narrow::keys(world, bits);
        let mut subject = new(&world);
        for (table, ids) in [(0, [9, 4]), (0, [500, 500]), (0, [4, 4]), (1, [2, 2])] {
            let mut columns = vec![vec![u64::MAX; 2]; 2];
            columns[table] = ids.to_vec();
            run(&mut subject, &world, &world.one_hot(&columns));
            subject.settle();
            // Batches without rows, so that the next batch's stamp differs enough to renew that of a used
            // row.
            for _ in 0..FRESH {
                look_up(&mut subject, &world, std::iter::once(u64::MAX));
            }
        }
        let expected = [(1, 2), (0, 4), (0, 500), (0, 9)].map(|(t, row)| RowId::new(TableId(t), row));
        assert_eq!(subject.hot_rows(), expected, "{bits} bits");
    }
}

pub(crate) fn warm_rows_are_found_whatever_the_admission_and_keep_their_order<S: Subject>(
    new: impl Fn(&World) -> S,
) {
    for bits in [64, 15] {
        let world = World::new(100_000, &[5, 1], 64 << 10);
        let world = narrow::keys(world, bits)
            .with(|options| options.admission = AdmissionOption::Probability { p: 0.0, seed: 0 });
        let mut subject = new(&world);
        let warmed = warm(&mut subject, &world, (0..300).rev());
        assert!(warmed.stored > 290 && warmed.stored + warmed.passed_over == 300, "{warmed:?}");
        assert!(!warmed.full && (bits < 64 || warmed.passed_over == 0), "{bits} bits: {warmed:?}");
        let hot: Vec<u64> = subject.hot_rows().into_iter().map(RowId::row).collect();
        assert!(hot.is_sorted_by(|a, b| a > b), "{bits} bits: {hot:?}");
        assert_eq!(hot.len() as u64, warmed.stored);
        let mut hits = 0;
        for ids in hot.chunks(60) {
            let (found, missed) = look_up(&mut subject, &world, ids.iter().copied());
            assert_eq!(missed, 0, "{bits} bits");
            hits += found;
        }
        assert_eq!(hits, warmed.stored);
    }
}

pub(crate) fn warming_stops_at_the_high_watermark_and_keeps_the_hottest<S: Subject>(
    new: impl Fn(&World) -> S,
) {
    let world = World::new(3000, &[16], 64 << 10);
    let mut subject = new(&world);
    // Rows that are cached already take no more room.
    for _ in 0..12 {
        warm(&mut subject, &world, 0..200);
    }
    assert_eq!(subject.stats().entries, 200);
    let Warmed { stored, passed_over, full } = warm(&mut subject, &world, 0..3000);
    let warmed = Warmed { stored: stored + 200, passed_over: passed_over - 200, full };
    let stats = subject.stats();
    let fill = (stats.entries as f64 / stats.entry_capacity as f64)
        .max(stats.pool_used_bytes as f64 / stats.pool_bytes as f64);
    assert!(warmed.full && fill > 0.93, "{warmed:?} fill {fill}");
    assert_eq!((stats.entries, stats.inserted), (warmed.stored, warmed.stored));
    assert_eq!(subject.evict_step(), EvictStep::Idle, "there is nothing to evict");
    assert_eq!(totals(&subject.stats()).2, 0);
    let held = held(&mut subject);
    let first = (0..warmed.stored).filter(|id| held.contains(id)).count() as u64;
    assert!(first + warmed.passed_over >= warmed.stored, "{first} of the first {warmed:?}");
}

pub(crate) fn the_coldest_of_the_warm_rows_leave_first<S: Subject>(new: impl Fn(&World) -> S) {
    let world = World::new(3000, &[16], 64 << 10);
    let mut subject = new(&world);
    let warmed = warm(&mut subject, &world, 0..3000);
    for start in (2000..2250).step_by(50) {
        look_up(&mut subject, &world, start..start + 50);
        settle(&subject);
    }
    let held = held(&mut subject);
    let kept = |ids: std::ops::Range<u64>| ids.filter(|id| held.contains(id)).count();
    let (hot, cold) = (kept(0..100), kept(warmed.stored - 100..warmed.stored));
    assert!(hot > 90 && cold < 10, "{hot} of the hottest, {cold} of the coldest of {warmed:?}");
}

pub(crate) fn a_row_that_is_there_keeps_its_place_and_a_wrong_one_is_refused<S: Subject>(
    new: impl Fn(&World) -> S,
) {
    let world = World::new(1000, &[5], 64 << 10);
    let mut subject = new(&world);
    look_up(&mut subject, &world, [3].into_iter());
    let stored = |stored, passed_over| Warmed { stored, passed_over, full: false };
    assert_eq!(warm(&mut subject, &world, 3..5), stored(1, 1));
    assert_eq!(warm(&mut subject, &world, [7, 7, 8].into_iter()), stored(2, 1), "a row twice");
    let row = world.row(TableId(0), 9, 0).unwrap();
    let warm_row = |id, bytes| WarmRow { row: RowId::new(TableId(0), id), bytes };
    let mut wrong = |rows: &[WarmRow<'_>]| subject.warm(&mut rows.iter().copied()).unwrap_err().to_string();
    assert!(wrong(&[warm_row(9, &row), warm_row(1000, &row)]).contains("1000"));
    assert!(wrong(&[warm_row(10, &row[4..])]).contains("16"));
    assert_eq!(held(&mut subject), HashSet::from([3, 4, 7, 8, 9]), "rows before a wrong one are cached");
}
