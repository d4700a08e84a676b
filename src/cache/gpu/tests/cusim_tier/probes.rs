//! Probes during replacements, of pointers to host rows, and of overlays find the row of their key or
//! nothing.

use std::collections::HashSet;
use std::sync::Arc;

use super::bench::{BASE, Bench, IDS, batch_of, host_rows, mark_misses, some_ids};
use crate::cache::gpu::args::{JobKind, LinkResult};
use crate::cache::gpu::overlay::{ChangedRow, OverlayTable};
use crate::cache::gpu::table::{IndexJob, JobRow, Jobs};
use crate::device::cusim::SimDriver;
use crate::mem::mix64;

/// Jobs replace keys while probes run. A probe must find a row of its key, or nothing.
#[test]
fn a_probe_during_replacement_finds_its_keys_row_or_nothing() {
    let mut found = 0;
    for seed in 1..150 {
        let mut bench = Bench::new(1 + seed % 2, seed);
        let (mut context, mut draw) = (bench.context(), seed << 32);
        let mut under_way: Vec<Jobs<SimDriver>> = (0..4).map(|_| bench.jobs()).collect();
        for now in 0..12 {
            for jobs in &mut under_way {
                jobs.finish().unwrap();
                for id in some_ids(&mut draw).into_iter().take(8) {
                    let kind =
                        [JobKind::Keep, JobKind::Swap, JobKind::Withdraw][(mix64(draw + id) % 3) as usize];
                    bench.push(jobs, id, kind);
                }
            }
            // All launches are queued before the first wait, so they can run concurrently.
            for jobs in &mut under_way {
                bench.launch(jobs, now);
            }
            found += bench.probe_all(&mut context, now, |_, _| ());
        }
    }
    assert!(found > 5000, "{found} hits");
}

/// Two keys alternate in one slot while probes read it, so a key may leave and return between two loads of a
/// probe.
#[test]
fn a_key_that_returns_to_its_slot_is_found_with_its_new_row() {
    let mut found = 0;
    for seed in 1..60 {
        let mut bench = Bench::new(1, seed);
        let mut under_way: Vec<Jobs<SimDriver>> = (0..6).map(|_| bench.jobs()).collect();
        let mut context = bench.context();
        for id in 2..9 {
            bench.push(&mut under_way[0], id, JobKind::Keep);
        }
        bench.launch(&mut under_way[0], 5);
        for _ in 0..10 {
            for (id, jobs) in (0..).zip(&mut under_way) {
                jobs.finish().unwrap();
                let slot = bench.rows.len();
                bench.rows.push(id % 2);
                // The stamp is older than those of the other entries, so the next job evicts this entry. It
                // is recent enough that probes do not renew it.
                let (key, location, older) = (BASE | (id % 2), (slot as u64) << 1, 2);
                let (row, kind) = (JobRow::Staged(slot), JobKind::Keep);
                assert!(
                    jobs.push(IndexJob { key, location, row, tag: 0, words: 1, kind, older }, &bench.staging)
                );
                bench.launch(jobs, 5);
            }
            let ids: Vec<u64> = (0..256).map(|i| i % 2).collect();
            context.probe(5, None, &batch_of(&ids)).unwrap();
            mark_misses(&mut context);
            context.pool().unwrap();
            context.settle().unwrap();
            for (&id, &value) in ids.iter().zip(context.out()) {
                let own = bench.rows.get(value as usize) == Some(&id);
                assert!(value == -1.0 || own, "seed {seed}: id {id} got {value}");
                found += u64::from(value >= 0.0);
            }
        }
    }
    assert!(found > 5000, "{found} hits");
}

/// If an entry is a pointer, its row is read in pinned host memory. A row in the pool replaces the pointer,
/// also if the job copies it from the memory that the pointer points to.
#[test]
fn an_entry_may_point_at_a_host_row_until_the_row_is_in_the_pool() {
    let mut bench = Bench::new(2, 3);
    let first = bench.table.register(host_rows(&bench, 0.5)).unwrap();
    let mut jobs = bench.jobs();
    for id in 0..4 {
        let location = first + (id << 1);
        let (key, row, kind) = (BASE | id, JobRow::InPlace, JobKind::Keep);
        let job = IndexJob { key, location, row, tag: 0, words: 1, kind, older: 0 };
        assert!(jobs.push(job, &bench.staging));
    }
    bench.launch(&mut jobs, 1);
    jobs.finish().unwrap();
    let mut context = bench.context();
    assert_eq!(context.probe(2, None, &batch_of(&[3, 0, 2, 2])).unwrap(), 0);
    assert_eq!(context.out(), [3.5, 0.5, 2.5, 2.5]);
    let mut pointed: Vec<_> = context.pointed_rows().map(|row| (row.lookup, row.id)).collect();
    pointed.sort_unstable();
    assert_eq!(
        (pointed, context.pointed()),
        (vec![(0, 0), (0, 2), (0, 3)], &[4][..]),
        "each row is reported once, and all occurrences are counted"
    );

    let slot = bench.push(&mut jobs, 0, JobKind::Keep);
    let job = IndexJob {
        key: BASE | 1,
        location: 100 << 1,
        row: JobRow::Host(first + 2),
        tag: 0,
        words: 1,
        kind: JobKind::Keep,
        older: 0,
    };
    assert!(jobs.push(job, &bench.staging));
    bench.launch(&mut jobs, 3);
    let outcomes: Vec<_> =
        jobs.finish().unwrap().iter().map(|o| (o.result().unwrap(), o.key, o.location)).collect();
    assert_eq!(
        outcomes,
        [(LinkResult::Swapped, BASE, first), (LinkResult::Swapped, BASE | 1, first + 2)],
        "the pointers are replaced"
    );
    assert_eq!(context.probe(4, None, &batch_of(&[0, 1, 2])).unwrap(), 0);
    assert_eq!(context.out(), [(slot >> 1) as f32, 1.5, 2.5]);
    assert_eq!(context.pointed(), [1]);
}

/// A batch's header has the address of its overlay, so the same graph is used for batches with different
/// overlays and for batches without.
#[test]
fn a_batch_searches_its_own_overlay_before_the_index() {
    for seed in 0..8 {
        let mut bench = Bench::new(4, seed);
        let mut jobs = bench.jobs();
        let old: Vec<u64> = (0..20).map(|id| bench.push(&mut jobs, id, JobKind::Keep)).collect();
        bench.launch(&mut jobs, 1);
        jobs.finish().unwrap();
        // Every third id has a new row, which is only in the overlay. Every fifth of the other ids has
        // changed, and its new row is not cached.
        let location = |id: u64| (1000 + id) << 1;
        let changed = |id: u64| id.is_multiple_of(3) || id.is_multiple_of(5);
        for id in (0..IDS).filter(|id| id.is_multiple_of(3)) {
            let row = JobRow::Staged(1000 + id as usize);
            let (key, location, kind) = (BASE | id, location(id), JobKind::Keep);
            let job = IndexJob { key, location, row, tag: 0, words: 1, kind, older: 0 };
            assert!(jobs.push(job, &bench.staging));
        }
        jobs.copy(Some(&mut bench.staging)).unwrap();
        let rows: Vec<_> = (0..IDS)
            .filter(|&id| changed(id))
            .map(|id| ChangedRow {
                key: BASE | id,
                location: id.is_multiple_of(3).then_some(location(id)),
                words: 1,
            })
            .collect();
        let overlay = Arc::new(OverlayTable::new(&bench.table, &rows).unwrap());
        let mut context = bench.context();
        let ids: Vec<u64> = (0..40).collect();
        for round in 0..6 {
            let asks = round % 2 == 1;
            let misses = context.probe(2 + round, asks.then_some(&overlay), &batch_of(&ids)).unwrap();
            let missing: HashSet<u64> = context.misses().iter().map(|miss| miss.id).collect();
            assert_eq!(missing.len(), misses);
            mark_misses(&mut context);
            context.pool().unwrap();
            context.settle().unwrap();
            for (&id, &value) in ids.iter().zip(context.out()) {
                let expected = match old.get(id as usize) {
                    _ if asks && id.is_multiple_of(3) => 1000.0 + id as f32,
                    Some(&at) if !(asks && changed(id)) => (at >> 1) as f32,
                    _ => -1.0,
                };
                assert_eq!(value, expected, "seed {seed} round {round} id {id}");
            }
        }
    }
}
