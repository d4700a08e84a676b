//! An index with few keys: eight rows share each key, and tags distinguish them.

use std::collections::{HashMap, HashSet};

use super::bench::{BASE, Bench, IDS, batch_of, mark_misses, some_ids};
use crate::cache::gpu::args::{JobKind, LinkResult, MayReplace, NarrowColumn};
use crate::cache::gpu::context::LookupContext;
use crate::cache::gpu::lister::{Lister, Look};
use crate::cache::gpu::table::{IndexJob, JobRow, Jobs};
use crate::device::cusim::SimDriver;
use crate::mem::{fold, mix64};

/// The index has 2^BITS keys. BLOCK is the first.
const BITS: u32 = 3;
const BLOCK: u64 = 16;
/// Words per slot: two for the tag, and one for a row of one element.
const SLOT: usize = 3;

fn index_key(id: u64) -> u64 {
    BLOCK | fold(id, BITS)
}

fn context_of_tags(bench: &Bench) -> LookupContext<SimDriver> {
    bench.context_with(Some(NarrowColumn { base: BLOCK, bits: BITS, tagged: 1 }))
}

/// Adds a job for a row, with an unused slot. Returns the slot's location, or `None` if the job was refused.
fn push_tagged(bench: &mut Bench, jobs: &mut Jobs<SimDriver>, id: u64, kind: JobKind) -> Option<u64> {
    let slot = bench.rows.len();
    let location = ((slot * SLOT) as u64) << 1;
    let row = if kind == JobKind::Withdraw { JobRow::InPlace } else { JobRow::Staged(slot) };
    let job = IndexJob { key: index_key(id), location, row, tag: BASE | id, words: 1, kind, older: 0 };
    let pushed = jobs.push(job, &bench.staging);
    if pushed {
        bench.rows.push(id);
    }
    pushed.then_some(location)
}

/// The index has room for all keys, so the outcome of each job is known in advance.
#[test]
fn jobs_distinguish_rows_that_share_a_key() {
    for seed in 0..20 {
        let mut bench = Bench::new(3 + seed % 3, seed);
        let (mut jobs, mut draw) = (bench.jobs(), seed << 32);
        // For each key: the id and location of the cached row.
        let mut there: HashMap<u64, (u64, u64)> = HashMap::new();
        let mut links = HashMap::<LinkResult, u32>::new();
        for now in 0..30 {
            let may_replace =
                [MayReplace::Nothing, MayReplace::SameKey, MayReplace::Coldest][now as usize % 3];
            let mut expected = Vec::new();
            for id in some_ids(&mut draw) {
                let kind = [JobKind::Keep, JobKind::Swap, JobKind::Withdraw][(mix64(draw + id) % 3) as usize];
                let Some(location) = push_tagged(&mut bench, &mut jobs, id, kind) else { continue };
                let key = index_key(id);
                let own = there.get(&key).map(|(other, _)| *other == id);
                let link = match (kind, own) {
                    (JobKind::Withdraw, Some(true)) => LinkResult::Withdrawn,
                    (JobKind::Withdraw, _) => LinkResult::Absent,
                    (_, None) => LinkResult::New,
                    (JobKind::Swap, Some(true)) => LinkResult::Swapped,
                    (_, Some(false)) if may_replace != MayReplace::Nothing => LinkResult::Replaced,
                    _ => LinkResult::Present,
                };
                let left = match link {
                    LinkResult::Withdrawn => there.remove(&key),
                    LinkResult::New | LinkResult::Swapped | LinkResult::Replaced => {
                        there.insert(key, (id, location))
                    }
                    _ => None,
                };
                *links.entry(link).or_default() += 1;
                expected.push((link, left.map_or((0, 0), |(_, location)| (key, location))));
            }
            jobs.launch(now, may_replace, Some(&mut bench.staging)).unwrap();
            let outcomes = jobs.finish().unwrap().iter();
            let got: Vec<_> = outcomes.map(|out| (out.result().unwrap(), (out.key, out.location))).collect();
            assert_eq!(got, expected, "seed {seed}, launch {now}");
        }
        assert_eq!(links.len(), 6, "every result but Full: {links:?}");
    }
}

/// Rows with the same key replace each other while probes run. A probe must find the row itself, a
/// collision, or nothing.
#[test]
fn a_probe_during_replacement_finds_the_row_itself_or_nothing() {
    let (mut found, mut collided) = (0, 0);
    for seed in 1..100 {
        let mut bench = Bench::new(1 + seed % 2, seed);
        let (mut context, mut draw) = (context_of_tags(&bench), seed << 32);
        let mut under_way: Vec<Jobs<SimDriver>> = (0..4).map(|_| bench.jobs()).collect();
        for now in 0..12 {
            for jobs in &mut under_way {
                jobs.finish().unwrap();
                for id in some_ids(&mut draw).into_iter().rev().take(8) {
                    let kind =
                        [JobKind::Keep, JobKind::Swap, JobKind::Withdraw][(mix64(draw + id) % 3) as usize];
                    push_tagged(&mut bench, jobs, id, kind);
                }
            }
            for jobs in &mut under_way {
                bench.launch(jobs, now);
            }
            found += bench.probe_all(&mut context, now, |context, misses| {
                let (missed, others) = (context.missed()[0], context.collided()[0]);
                assert!(others <= missed && missed as usize >= misses, "{others} of {missed}");
                collided += others;
            });
        }
    }
    assert!(found > 1000 && collided > 10_000, "{found} hits, {collided} collisions");
}

/// While probes run, slots are reused by other rows with the same keys. A probe that finds the new entry must
/// not read the slot's old tag.
#[test]
fn a_reused_slot_is_not_found_by_its_old_tag() {
    let (mut found, mut collided) = (0, 0);
    for seed in 1..100 {
        let mut bench = Bench::new(1 + seed % 2, seed);
        let (mut jobs, mut context) = (bench.jobs(), context_of_tags(&bench));
        for now in 0..16 {
            let mut linked = Vec::new();
            for key in BLOCK..BLOCK + (1 << BITS) {
                let ids: Vec<u64> = (0..IDS).filter(|&id| index_key(id) == key).collect();
                let id = ids[(now as usize / 2) % ids.len()];
                let slot = bench.rows.len();
                bench.rows.push(id);
                let location = ((key - BLOCK) * SLOT as u64) << 1;
                // One launch links the entries, and the next withdraws them.
                let (row, kind) = match now % 2 {
                    0 => (JobRow::Staged(slot), JobKind::Keep),
                    _ => (JobRow::InPlace, JobKind::Withdraw),
                };
                let job = IndexJob { key, location, row, tag: BASE | id, words: 1, kind, older: 0 };
                assert!(jobs.push(job, &bench.staging));
                linked.push(id);
            }
            bench.launch(&mut jobs, now);
            let ids: Vec<u64> = (0..256).map(|i| i % IDS).collect();
            context.probe(now, None, &batch_of(&ids)).unwrap();
            collided += context.collided()[0];
            mark_misses(&mut context);
            context.pool().unwrap();
            context.settle().unwrap();
            for (&id, &value) in ids.iter().zip(context.out()) {
                let own = bench.rows.get(value as usize) == Some(&id);
                assert!(value == -1.0 || own && linked.contains(&id), "seed {seed}: id {id} got {value}");
                found += u64::from(own && value >= 0.0);
            }
            jobs.finish().unwrap();
        }
    }
    assert!(found > 1000 && collided > 10_000, "{found} hits, {collided} collisions");
}

#[test]
fn the_list_has_each_entry_once_with_tag_and_age() {
    for (seed, buckets) in [(0, 5), (1, 5), (2, 64), (3, 64)] {
        let mut bench = Bench::new(buckets, seed);
        let mut jobs = bench.jobs();
        let mut linked = HashSet::new();
        for id in 0..IDS {
            let slot = bench.rows.len();
            let (location, older) = (((slot * SLOT) as u64) << 1, (id % 5) as u32);
            let (row, kind) = (JobRow::Staged(slot), JobKind::Keep);
            let job = IndexJob { key: index_key(id), location, row, tag: BASE | id, words: 1, kind, older };
            if jobs.push(job, &bench.staging) {
                bench.rows.push(id);
                linked.insert((job.key, location, job.tag, older + 10));
            }
        }
        bench.launch(&mut jobs, 20);
        jobs.finish().unwrap();
        let seen = |look: Look, room: usize, tags: bool| -> Vec<_> {
            let mut lister = Lister::new(&bench.table, room, tags).unwrap();
            lister.look(30, look).unwrap().map(|e| (e.key, e.location, e.tag, e.age)).collect()
        };
        let all = [seen(Look::From { bucket: 0, count: buckets }, 64, true), seen(Look::Drawn(7), 64, true)];
        for listed in all {
            assert_eq!(
                (listed.len(), HashSet::from_iter(listed)),
                (linked.len(), linked.clone()),
                "seed {seed}"
            );
        }
        // Lists the index in parts; the last part is shorter. Then lists a part that wraps around the end.
        let parts = (0..buckets)
            .step_by(2)
            .flat_map(|at| seen(Look::From { bucket: at, count: buckets - at }, 2, true));
        assert_eq!(parts.collect::<HashSet<_>>(), linked, "seed {seed}");
        let round = seen(Look::From { bucket: buckets - 1, count: 2 }, 2, true).len();
        let halves = [
            seen(Look::From { bucket: buckets - 1, count: 1 }, 2, true),
            seen(Look::From { bucket: 0, count: 1 }, 2, true),
        ];
        assert_eq!(round, halves.concat().len());
        assert!(seen(Look::Drawn(1), 2, true).iter().all(|entry| linked.contains(entry)));
        assert!(
            seen(Look::From { bucket: 0, count: buckets }, 64, false).iter().all(|entry| entry.2 == 0),
            "tags are not read"
        );
    }
}

#[test]
fn a_full_pair_of_buckets_is_unchanged_unless_its_coldest_entry_may_be_evicted() {
    let mut bench = Bench::new(1, 3);
    let mut jobs = bench.jobs();
    for id in 0..9 {
        bench.push(&mut jobs, id, JobKind::Keep);
        // One launch per job, so that the first eight are linked.
        jobs.launch(id, MayReplace::SameKey, Some(&mut bench.staging)).unwrap();
        let link = jobs.finish().unwrap()[0].result().unwrap();
        assert_eq!(link, if id < 8 { LinkResult::New } else { LinkResult::Full });
    }
    bench.push(&mut jobs, 8, JobKind::Keep);
    jobs.launch(9, MayReplace::Coldest, Some(&mut bench.staging)).unwrap();
    let outcome = jobs.finish().unwrap()[0];
    assert_eq!((outcome.result(), outcome.key), (Some(LinkResult::Replaced), BASE));
}
