//! Sweeps evict their victims once, up to a number, or replace them with pointers to host rows.

use std::collections::{HashMap, HashSet};

use super::bench::{BASE, Bench, batch_of, host_rows, mark_misses};
use crate::cache::gpu::args::{JobKind, Pointable};
use crate::cache::gpu::sweeper::{Stretch, Sweeper, Victims};

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
                    mark_misses(&mut context);
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
