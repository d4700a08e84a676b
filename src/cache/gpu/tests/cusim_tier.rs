//! Tests the kernels of the index on a device: how jobs and sweeps change the index, and what concurrent
//! probes find. Each seed gives another schedule. The module `tags` tests rows that share keys, and the list
//! of entries.

mod tags;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::cache::gpu::args;
use crate::cache::gpu::args::{JobKind, LinkResult, MayReplace, NarrowColumn, Pointable};
use crate::cache::gpu::context::{ContextShape, LookupContext, LookupKeys};
use crate::cache::gpu::overlay::{ChangedRow, OverlayTable};
use crate::cache::gpu::sweeper::{Stretch, Sweeper, Victims};
use crate::cache::gpu::table::{GpuTable, GpuTableShape, IndexJob, JobRow, Jobs};
use crate::device::cuda::memory::{MemoryPlan, PinnedMemory, Staging};
use crate::device::cusim::SimDriver;
use crate::mem::mix64;
use crate::schema::{Lookup, Pooling};
use crate::types::{Batch, Element, Jagged, TableId};

/// The first key of the only table; its ids are below `IDS`.
const BASE: u64 = 64;
const IDS: u64 = 64;
const SLOTS: usize = 1 << 14;

/// An index with few buckets. Each job has its own row of one element, whose value is the job's number.
struct Bench {
    seed: u64,
    table: Arc<GpuTable<SimDriver>>,
    staging: Staging<SimDriver>,
    /// For each job number: the id of its row.
    rows: Vec<u64>,
}

impl Bench {
    fn new(buckets: u64, seed: u64) -> Self {
        let driver = Arc::new(SimDriver::new(seed, 1 << 30).unwrap());
        let shape = GpuTableShape { buckets, slab_bytes: 4 * SLOTS, slabs: 1 };
        let table = Arc::new(GpuTable::new(driver.clone(), shape).unwrap());
        let mut staging = Staging::new(&driver, SLOTS).unwrap();
        // Word `i` of the staging buffer is copied to slot `i`, once.
        for (i, word) in staging.words_mut().unwrap().iter_mut().enumerate() {
            *word = (i as f32).to_bits();
        }
        Self { seed, table, staging, rows: Vec::new() }
    }

    fn jobs(&self) -> Jobs<SimDriver> {
        Jobs::new(&self.table, 64).unwrap()
    }

    /// Adds a job for an id, with an unused slot. Returns the slot's location.
    fn push(&mut self, jobs: &mut Jobs<SimDriver>, id: u64, kind: JobKind) -> u64 {
        let slot = self.rows.len();
        assert!(slot < SLOTS);
        self.rows.push(id);
        let location = (slot as u64) << 1;
        let row = if kind == JobKind::Withdraw { JobRow::InPlace } else { JobRow::Staged(slot) };
        assert!(jobs.push(
            IndexJob { key: BASE | id, location, row, tag: 0, words: 1, kind, older: 0 },
            &self.staging
        ));
        location
    }

    fn launch(&mut self, jobs: &mut Jobs<SimDriver>, now: u64) {
        jobs.launch(now, MayReplace::Coldest, Some(&mut self.staging)).unwrap();
    }

    fn context(&self) -> LookupContext<SimDriver> {
        self.context_with(None)
    }

    fn context_with(&self, narrow: Option<NarrowColumn>) -> LookupContext<SimDriver> {
        let (table, element, pooling) = (TableId(0), Element::F32, Pooling::Sum);
        let shape = ContextShape {
            features: 1,
            lookups: vec![Lookup { feature: 0, table, dim: 1, element, pooling, column: 0 }],
            dense_width: 0,
            stride: 1,
            max_samples: 256,
            max_ids: 256,
            staging_bytes: Some(4 * 256),
            copy_bytes: 4 * 64,
        };
        LookupContext::new(&self.table, &shape, &[LookupKeys { base: BASE, rows: IDS, narrow }]).unwrap()
    }

    /// Looks up all ids, some of them twice, and fetches the missing rows. Asserts that each id gets its own
    /// row, from the index or fetched. `probed` checks the context after the probe, with the number of
    /// missing rows. Returns how many values came from the index.
    fn probe_all(
        &self,
        context: &mut LookupContext<SimDriver>,
        now: u64,
        probed: impl FnOnce(&LookupContext<SimDriver>, usize),
    ) -> u64 {
        let ids: Vec<u64> = (0..IDS).chain(0..IDS / 2).collect();
        let misses = context.probe(now, None, &batch_of(&ids)).unwrap();
        let missing: HashSet<u64> = context.misses().iter().map(|miss| miss.id).collect();
        assert_eq!(missing.len(), misses, "each missing row is reported once");
        probed(context, misses);
        let (misses, words) = context.staged_mut().unwrap();
        for miss in misses {
            words[miss.word] = (-1.0_f32 - miss.id as f32).to_bits();
        }
        if now.is_multiple_of(2) {
            context.copy_hits().unwrap();
        }
        context.pool().unwrap();
        context.settle().unwrap();
        let mut found = 0;
        for (&id, &value) in ids.iter().zip(context.out()) {
            let fetched = value == -1.0 - id as f32 && missing.contains(&id);
            found += u64::from(!fetched);
            let own = fetched || self.rows.get(value as usize) == Some(&id);
            assert!(own, "seed {}: id {id} got {value}", self.seed);
        }
        found
    }
}

fn batch_of(ids: &[u64]) -> Batch {
    let offsets = (0..=ids.len() as u32).collect();
    Batch { samples: ids.len(), features: vec![Jagged { offsets, ids: ids.to_vec() }], ..Batch::default() }
}

/// A random third of the ids.
fn some_ids(draw: &mut u64) -> Vec<u64> {
    *draw += 1;
    (0..IDS).filter(|id| mix64(*draw << 8 | id).is_multiple_of(3)).collect()
}

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
            let (misses, words) = context.staged_mut().unwrap();
            misses.iter().for_each(|miss| words[miss.word] = (-1.0_f32).to_bits());
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

#[test]
fn a_sweep_evicts_each_victim_once_and_at_most_the_given_number() {
    for seed in 0..12 {
        let mut bench = Bench::new(9, seed);
        let mut jobs = bench.jobs();
        let mut linked: HashMap<u64, u64> = HashMap::new();
        for id in 0..40 {
            linked.insert(BASE | id, bench.push(&mut jobs, id, JobKind::Keep));
        }
        bench.launch(&mut jobs, 10);
        jobs.finish().unwrap();
        // A later batch uses the first half of the rows, which renews their stamps.
        let mut context = bench.context();
        assert_eq!(context.probe(15, None, &batch_of(&(0..20).collect::<Vec<_>>())).unwrap(), 0);

        let mut sweeper = Sweeper::new(&bench.table, 16, 64, 0).unwrap();
        let mut ages: Vec<u32> =
            sweeper.sample(20, 3, true).unwrap().iter().copied().filter(|a| *a != u32::MAX).collect();
        ages.sort_unstable();
        assert_eq!(ages, [vec![5; 20], vec![10; 20]].concat(), "seed {seed}");

        let aged = Stretch { hand: 4, buckets: 9, most: 7, victims: Victims::Aged(6) };
        let mut gone = HashSet::new();
        for expected in [7, 7, 6, 0] {
            let evicted = sweeper.sweep(20, aged.clone()).unwrap();
            assert_eq!(evicted.len(), expected, "seed {seed}");
            for entry in evicted {
                assert!(entry.key >= BASE + 20, "only old entries are evicted");
                assert_eq!(linked[&entry.key], entry.location);
                assert!(gone.insert(entry.key));
            }
        }
        let misses = context.probe(21, None, &batch_of(&(0..40).collect::<Vec<_>>())).unwrap();
        assert_eq!(misses, 20);
        // Evicts all entries of the only slab.
        let all = Stretch { hand: 0, buckets: 9, most: 64, victims: Victims::In(&[1]) };
        assert_eq!(sweeper.sweep(22, all).unwrap().len(), 20);
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

/// Rows of all ids in pinned host memory. Each has one element, `first + id`.
fn host_rows(bench: &Bench, first: f32) -> Arc<PinnedMemory<SimDriver>> {
    let mut plan = MemoryPlan::default();
    let rows = plan.array::<f32>(IDS as usize);
    let mut memory = PinnedMemory::new(bench.table.driver(), plan.bytes()).unwrap();
    memory.get_mut(rows).iter_mut().enumerate().for_each(|(i, row)| *row = first + i as f32);
    Arc::new(memory)
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
            let (misses, words) = context.staged_mut().unwrap();
            misses.iter().for_each(|miss| words[miss.word] = (-1.0_f32).to_bits());
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

/// A sweep replaces cold rows with pointers to host memory, up to a limit, while probes run. A probe must
/// find the row of its key, in the pool or in host memory.
#[test]
fn a_sweep_makes_pointers_up_to_the_limit_during_probes() {
    for seed in 0..10 {
        let mut bench = Bench::new(9, seed);
        let first = bench.table.register(host_rows(&bench, 20_000.0)).unwrap();
        let mut jobs = bench.jobs();
        for id in 0..40 {
            bench.push(&mut jobs, id, JobKind::Keep);
        }
        bench.launch(&mut jobs, 10);
        jobs.finish().unwrap();
        let mut sweeper = Sweeper::new(&bench.table, 16, 64, 2).unwrap();
        // Only ids below 30 may become pointers. A table whose memory is not registered gets no pointers.
        let table = Pointable { base: BASE, rows: 30, first, words: 1 };
        let nowhere = Pointable { base: 0, first: first + (1 << 30), ..table };
        sweeper.point_at([table, nowhere].into_iter());
        let all = |victims| Stretch { hand: 0, buckets: 9, most: 64, victims };
        let ids: Vec<u64> = (0..40).collect();
        let batch = batch_of(&ids);
        let moved = std::thread::scope(|scope| {
            let mut context = bench.context();
            let rows = &bench.rows;
            let probing = scope.spawn(move || {
                for now in 10..16 {
                    context.probe(now, None, &batch_of(&ids)).unwrap();
                    let missing: HashSet<u64> = context.misses().iter().map(|miss| miss.id).collect();
                    let (misses, words) = context.staged_mut().unwrap();
                    misses.iter().for_each(|miss| words[miss.word] = (-1.0_f32).to_bits());
                    context.pool().unwrap();
                    context.settle().unwrap();
                    for (&id, &value) in ids.iter().zip(context.out()) {
                        let here = rows.get(value as usize) == Some(&id) && value >= 0.0;
                        let there = value == 20_000.0 + id as f32 && id < 30;
                        assert!(here || there || missing.contains(&id), "seed {seed}: id {id} got {value}");
                    }
                }
            });
            let mut moved = 0;
            for now in 30..33 {
                let aged = all(Victims::AgedRows { age: 0, pointers: 11 });
                moved =
                    sweeper.sweep(now, aged.clone()).unwrap().iter().filter(|entry| entry.moved == 1).count();
                if moved > 0 {
                    break;
                }
            }
            probing.join().unwrap();
            moved
        });
        assert_eq!(moved, 11, "seed {seed}");
        let mut context = bench.context();
        assert_eq!(context.probe(40, None, &batch).unwrap(), 29, "the others are evicted");
        assert_eq!(context.pointed(), [11]);
        assert!(sweeper.sweep(41, all(Victims::AgedRows { age: 0, pointers: 11 })).unwrap().is_empty());
        let pointers = sweeper.sample(41, 0, true).unwrap().iter().filter(|age| **age != u32::MAX).count();
        let rows = sweeper.sample(41, 0, false).unwrap().iter().filter(|age| **age != u32::MAX).count();
        assert_eq!((pointers, rows), (11, 0));
        // Withdraws the pointers of the first 20 ids, and then the rest.
        let half = sweeper.sweep(42, all(Victims::Pointers(first..first + 40))).unwrap();
        let keys: Vec<u64> = half.iter().map(|entry| entry.key).collect();
        assert!(
            half.iter()
                .all(|entry| entry.key < BASE + 20 && entry.location == first + ((entry.key - BASE) << 1))
        );
        let rest = sweeper.sweep(43, all(Victims::Pointers(0..u64::MAX))).unwrap();
        assert_eq!(keys.len() + rest.len(), 11, "seed {seed}");
    }
}
