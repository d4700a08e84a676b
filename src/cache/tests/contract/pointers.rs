//! The unified index: when a row is evicted, a pointer to it in host memory may stay in the index.

use std::time::Duration;

use crate::cache::EvictionOption;
use crate::types::{Batch, RowId, TableId};

use super::{Subject, World, assert_adds_up, pointed, settle};

/// Two tables. About a third of the first fits in the cache, so batches that go through all of its rows make
/// each row cold in turn.
fn pointed_world() -> World {
    World::new(600, &[16, 4], 16 << 10).with_pointers(1000)
}

/// A batch with rows of both tables.
fn of_both(world: &World, first: impl Iterator<Item = u64>, second: &[u64]) -> Batch {
    let first: Vec<u64> = first.collect();
    let mut other = vec![u64::MAX; first.len()];
    other[..second.len()].copy_from_slice(second);
    world.one_hot(&[first, other])
}

/// Runs a batch, some of whose rows may be behind pointers.
fn read(subject: &mut impl Subject, world: &World, batch: &Batch) {
    let seen = subject.embed(world, batch, || ());
    world.assert_is(&seen.matrix, batch, seen.version);
}

/// Batches over all rows of the first table, `rounds` times. Returns hits, pointed occurrences, and misses.
fn walk(subject: &mut impl Subject, world: &World, rounds: u64) -> (u64, u64, u64) {
    let before = subject.stats();
    // Ten rows per batch: not more than eviction has made room for.
    for start in (0..rounds * 600).step_by(10) {
        read(subject, world, &of_both(world, (start..start + 10).map(|id| id % 600), &[]));
        settle(subject);
    }
    let (before, after) = (&before.tables[0], &subject.stats().tables[0]);
    (after.hits - before.hits, after.pointed - before.pointed, after.misses - before.misses)
}

pub(crate) fn cold_rows_become_pointers_up_to_the_capacity_and_no_longer_miss<S: Subject>(
    new: impl Fn(&World) -> S,
) {
    // The only ranked row belongs to the other table, so LFU evicts rows of the first by age.
    for eviction in [EvictionOption::Lru, EvictionOption::Lfu(vec![RowId::new(TableId(1), 0)])] {
        let world = pointed_world().with(|options| options.eviction = eviction);
        let mut subject = new(&world);
        subject.set_pointers(600);
        walk(&mut subject, &world, 1);
        assert_eq!(subject.stats().pointers, 0, "no rows are in host memory");
        let _ram = subject.host_rows(&world, TableId(0));
        subject.set_pointers(100);
        walk(&mut subject, &world, 1);
        let few = subject.stats().pointers;
        assert!((80..=100).contains(&few), "{few}");
        subject.set_pointers(600);
        walk(&mut subject, &world, 2);
        let (_, pointed, missed) = walk(&mut subject, &world, 1);
        assert!(pointed > 350 && missed < 60, "{pointed} pointed at, {missed} missed");
        assert_adds_up(&subject.stats());
        assert!(subject.stats().total_bytes <= world.bytes as u64);
    }
}

pub(crate) fn a_row_behind_a_pointer_is_admitted_again<S: Subject>(new: impl Fn(&World) -> S) {
    let world = pointed_world();
    let mut subject = new(&world);
    let _ram = subject.host_rows(&world, TableId(0));
    subject.set_pointers(600);
    walk(&mut subject, &world, 2);
    let cold = of_both(&world, 0..10, &[]);
    let before = pointed(&subject.stats());
    read(&mut subject, &world, &cold);
    subject.settle();
    let once = pointed(&subject.stats());
    assert!(once > before, "cold rows are read through pointers");
    read(&mut subject, &world, &cold);
    assert_eq!(pointed(&subject.stats()), once, "the rows were admitted");
    settle(&subject);
    assert_adds_up(&subject.stats());
}

pub(crate) fn host_memory_is_released_after_the_batches_that_point_into_it<S: Subject>(
    new: impl Fn(&World) -> S,
) {
    let world = pointed_world();
    let mut subject = new(&world);
    let ram = subject.host_rows(&world, TableId(0));
    subject.set_pointers(600);
    walk(&mut subject, &world, 2);
    let other = subject.another(&world);
    let before = other.stats().tables[0].pointed;
    // Ten cold rows of the first table, and a missing row of the second.
    let batch = of_both(&world, 0..10, &[7]);
    std::thread::scope(|scope| {
        let mut dropping = None;
        let seen = subject.embed(&world, &batch, || {
            assert!(other.stats().tables[0].pointed > before);
            let started = scope.spawn(move || drop(ram));
            while other.stats().pointers > 0 {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(20));
            assert!(!started.is_finished(), "a batch may still read the host memory");
            dropping = Some(started);
        });
        world.assert_is(&seen.matrix, &batch, 0);
        dropping.unwrap().join().unwrap();
    });
    assert_eq!((walk(&mut subject, &world, 1).1, subject.stats().pointers), (0, 0));
    assert_adds_up(&subject.stats());
}

pub(crate) fn pointers_to_rows_that_changed_end_with_their_version<S: Subject>(new: impl Fn(&World) -> S) {
    let world = pointed_world();
    let mut subject = new(&world);
    let mut ram = subject.host_rows(&world, TableId(0));
    subject.set_pointers(600);
    walk(&mut subject, &world, 2);
    for version in 1..4 {
        let before = subject.stats().pointers;
        assert!(before > 300, "{before}");
        world.switch(&subject, version);
        let after = subject.stats().pointers;
        assert!(after < before && after > before / 2, "{after} of {before}: pointers to unchanged rows stay");
        // `walk` compares the rows with the version of their batch.
        walk(&mut subject, &world, 1);
        drop(ram);
        walk(&mut subject, &world, 1);
        ram = subject.host_rows(&world, TableId(0));
        walk(&mut subject, &world, 2);
    }
    assert_adds_up(&subject.stats());
}

pub(crate) fn the_tuner_sets_how_many_pointers_there_are_by_what_batches_report<S: Subject>(
    new: impl Fn(&World) -> S,
) {
    let world = pointed_world();
    let mut subject = new(&world);
    let _ram = subject.host_rows(&world, TableId(0));
    let observe = |subject: &S, times: u32, per_second: &dyn Fn(u32) -> f64| {
        (0..times).for_each(|i| subject.observe(1 << 20, Duration::from_secs_f64(1.0 / per_second(i))));
    };
    // If every batch is faster than the last, the tuner raises the number of pointers to its limit.
    observe(&subject, 40, &|i| 1.0 + f64::from(i));
    walk(&mut subject, &world, 2);
    assert!(subject.stats().pointers > 300, "{}", subject.stats().pointers);
    // If throughput falls sharply, the tuner starts again from 0, because the traffic has changed.
    observe(&subject, 4, &|_| 1.0);
    subject.evict_step();
    assert_eq!(subject.stats().pointers, 0);
    settle(&subject);
    assert_adds_up(&subject.stats());
}
