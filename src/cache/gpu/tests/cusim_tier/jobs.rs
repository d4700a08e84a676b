//! Jobs change the index as in some order, are rejected if kernels cannot execute them, and may only look.

use std::collections::{HashMap, HashSet};

use super::bench::{BASE, Bench, IDS, SLOTS, some_ids};
use crate::cache::gpu::args::{self, JobKind, LinkResult, MayReplace};
use crate::cache::gpu::table::{IndexJob, JobRow};
use crate::mem::mix64;

#[test]
fn concurrent_jobs_change_the_index_as_in_some_order() {
    for seed in 0..20 {
        let mut bench = Bench::new(1 + seed % 5, seed);
        let (mut jobs, mut draw) = (bench.jobs(), seed << 32);
        let mut linked: HashSet<(u64, u64)> = HashSet::new();
        for now in 0..20 {
            let before: HashMap<u64, u64> = linked.iter().copied().collect();
            let mut given = Vec::new();
            for id in some_ids(&mut draw) {
                let kind = [JobKind::Keep, JobKind::Keep, JobKind::Swap, JobKind::Withdraw]
                    [(mix64(draw + id) % 4) as usize];
                given.push((id, kind, bench.push(&mut jobs, id, kind)));
            }
            bench.launch(&mut jobs, now);
            let mut out = Vec::new();
            for (&(id, kind, location), outcome) in given.iter().zip(jobs.finish().unwrap()) {
                let key = BASE | id;
                match outcome.result().unwrap() {
                    LinkResult::New | LinkResult::Replaced => {
                        assert_ne!(kind, JobKind::Withdraw);
                        linked.insert((key, location));
                    }
                    LinkResult::Present => assert!(kind == JobKind::Keep && before.contains_key(&key)),
                    LinkResult::Swapped => {
                        assert!(kind == JobKind::Swap && outcome.key == key);
                        linked.insert((key, location));
                    }
                    LinkResult::Withdrawn => assert!(kind == JobKind::Withdraw && outcome.key == key),
                    LinkResult::Absent => assert_eq!(kind, JobKind::Withdraw),
                    LinkResult::Full => {}
                }
                if outcome.key != args::EMPTY_KEY {
                    out.push((outcome.key, outcome.location));
                }
            }
            for entry in out {
                assert!(linked.remove(&entry), "seed {seed}: {entry:?} left the index, but was not linked");
            }
            let keys: HashSet<u64> = linked.iter().map(|(key, _)| *key).collect();
            assert_eq!(keys.len(), linked.len(), "seed {seed}: a key is linked once");
            assert!(linked.len() as u64 <= 8 * bench.table.shape().buckets);
        }
        // The index has exactly the entries that the outcomes report as linked.
        for id in 0..IDS {
            bench.push(&mut jobs, id, JobKind::Withdraw);
        }
        bench.launch(&mut jobs, 99);
        let there: HashSet<(u64, u64)> = jobs
            .finish()
            .unwrap()
            .iter()
            .filter(|outcome| outcome.result() == Some(LinkResult::Withdrawn))
            .map(|outcome| (outcome.key, outcome.location))
            .collect();
        assert_eq!(there, linked, "seed {seed}");
    }
}

#[test]
fn jobs_that_kernels_cannot_execute_are_rejected() {
    let bench = Bench::new(2, 1);
    let mut jobs = bench.jobs();
    let (row, kind) = (JobRow::Staged(0), JobKind::Keep);
    let good = IndexJob { key: BASE, location: 0, row, tag: 0, words: 1, kind, older: 0 };
    assert!(!jobs.push(IndexJob { key: 1, ..good }, &bench.staging), "a reserved key");
    assert!(
        !jobs.push(IndexJob { location: (SLOTS as u64) << 1, ..good }, &bench.staging),
        "a location outside the pool"
    );
    let last = (SLOTS as u64 - 2) << 1;
    assert!(
        !jobs.push(IndexJob { location: last, tag: BASE, ..good }, &bench.staging),
        "a slot without room for the tag"
    );
    assert!(!jobs.push(IndexJob { location: 1, ..good }, &bench.staging), "a copy into a host row");
    assert!(
        !jobs.push(IndexJob { location: 1, row: JobRow::InPlace, ..good }, &bench.staging),
        "host memory that is not registered"
    );
    assert!(jobs.push(good, &bench.staging));
    assert!(!jobs.push(good, &bench.staging), "a key twice");
}

#[test]
fn a_look_returns_locations_and_changes_nothing() {
    let mut bench = Bench::new(3, 5);
    let mut jobs = bench.jobs();
    let linked: Vec<u64> = (0..8).map(|id| bench.push(&mut jobs, id, JobKind::Keep)).collect();
    bench.launch(&mut jobs, 1);
    jobs.finish().unwrap();
    for _ in 0..2 {
        for id in 0..16 {
            let (key, row, kind) = (BASE | id, JobRow::InPlace, JobKind::Look);
            let job = IndexJob { key, location: 0, row, tag: 0, words: 1, kind, older: 0 };
            assert!(jobs.push(job, &bench.staging));
        }
        jobs.launch(2, MayReplace::Nothing, None).unwrap();
        for (id, outcome) in jobs.finish().unwrap().iter().enumerate() {
            match linked.get(id) {
                Some(&at) => {
                    assert_eq!((outcome.result(), outcome.location), (Some(LinkResult::Present), at));
                }
                None => {
                    assert_eq!((outcome.result(), outcome.key), (Some(LinkResult::Absent), args::EMPTY_KEY))
                }
            }
        }
    }
}
