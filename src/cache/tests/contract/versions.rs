//! Versions: a batch reads the rows of its version, also during switches, evictions and insertions.

use std::ops::Range;
use std::sync::mpsc;
use std::time::Duration;

use crate::cache::Switched;
use crate::types::{Batch, TableId};

use super::{Subject, World, assert_adds_up, changes, run, settle};

/// A batch of these ids in each of the two tables.
fn of_both_tables(world: &World, ids: Range<u64>) -> Batch {
    let ids: Vec<u64> = ids.collect();
    world.one_hot(&[ids.clone(), ids])
}

pub(crate) fn a_switch_carries_over_what_was_cached_and_keeps_the_rest_out<S: Subject>(
    new: impl Fn(&World) -> S,
) {
    let world = World::new(100, &[16, 4], 64 << 10);
    let mut subject = new(&world);
    let batch = |ids| of_both_tables(&world, ids);
    run(&mut subject, &world, &batch(0..50));
    subject.settle();
    assert_eq!(world.switch(&subject, 1), Switched { changed: 20, carried: 20 });
    assert_eq!(subject.version(), 1);
    assert_eq!(run(&mut subject, &world, &batch(0..64)), (100, 28));
    settle(&subject);
    assert_adds_up(&subject.stats());
    assert_eq!(subject.stats().entries, 128);
}

pub(crate) fn a_batch_of_the_old_version_reads_old_rows_beside_one_of_the_new<S: Subject>(
    new: impl Fn(&World) -> S,
) {
    let world = World::new(5000, &[16, 4], 256 << 10);
    let mut subject = new(&world);
    let batch = |ids| of_both_tables(&world, ids);
    run(&mut subject, &world, &batch(0..40));
    subject.settle();
    let (switcher, mut newer, mut older) =
        (subject.another(&world), subject.another(&world), subject.another(&world));
    let both = batch(0..50);
    // Rows that do not change, each used once, so that each is offered to the cache.
    let mut others = (50..5000).filter(|&id| !changes(1, id));
    let (began, begins) = mpsc::channel();
    let (end, ended) = mpsc::channel();
    std::thread::scope(|scope| {
        let (mut switching, mut old) = (None, None);
        // The first batch holds the switch back until no more rows are admitted and the second one has begun.
        subject.embed(&world, &both, || {
            switching = Some(scope.spawn(|| world.switch(&switcher, 1)));
            let before = newer.stats().not_admitted;
            while newer.stats().not_admitted == before {
                let id = others.next().unwrap();
                newer.embed(&world, &batch(id..id + 1), || ());
                newer.settle();
                std::thread::sleep(Duration::from_millis(1));
            }
            let (older, world, both) = (&mut older, &world, &both);
            old = Some(scope.spawn(move || {
                older.embed(world, both, || {
                    began.send(()).unwrap();
                    ended.recv().unwrap();
                })
            }));
            begins.recv().unwrap();
        });
        let (switching, old) = (switching.unwrap(), old.unwrap());
        while newer.version() == 0 {
            std::thread::yield_now();
        }
        // For each table, both batches hit 40 rows, 8 of which change, and miss ten.
        for _ in 0..3 {
            newer.evict_step();
            let seen = newer.embed(&world, &both, || ());
            world.assert_is(&seen.matrix, &both, 1);
            assert_eq!((seen.version, seen.fetched.len()), (1, 20), "no row is inserted");
            newer.settle();
        }
        assert!(!switching.is_finished(), "the old batch has not finished");
        end.send(()).unwrap();
        let seen = old.join().unwrap();
        assert_eq!((seen.version, seen.fetched.len()), (0, 20));
        world.assert_is(&seen.matrix, &both, 0);
        assert_eq!(switching.join().unwrap(), Switched { changed: 16, carried: 16 });
    });
    assert_eq!(run(&mut subject, &world, &both), (80, 20));
    subject.settle();
    assert_eq!(run(&mut subject, &world, &both), (100, 0), "rows are inserted again");
    settle(&subject);
    assert_adds_up(&subject.stats());
}

pub(crate) fn the_current_version_and_a_wrong_row_change_nothing<S: Subject>(new: impl Fn(&World) -> S) {
    let world = World::new(10, &[4], 16 << 10);
    let mut subject = new(&world);
    world.switch(&subject, 7);
    let batch = world.one_hot(&[vec![2]]);
    run(&mut subject, &world, &batch);
    settle(&subject);
    let before = subject.stats();
    let row = world.row(TableId(0), 2, 7).unwrap();
    let error = |version, wrong| subject.switch(version, &[(TableId(0), 2, &row[..]), wrong]).unwrap_err();
    let good = (TableId(0), 3, &row[..]);
    assert_eq!(error(7, good), "version 7: expected another one than the current version");
    assert!(error(8, (TableId(0), 10, &row[..])).contains("id 10"));
    assert!(error(8, (TableId(1), 0, &row[..])).contains("table 1"));
    assert!(error(8, (TableId(0), 2, &row[1..])).contains(&format!("got {}", row.len() - 1)));
    assert_eq!((subject.version(), subject.stats()), (7, before));
    assert_eq!(run(&mut subject, &world, &batch), (1, 0));
}

pub(crate) fn a_row_that_comes_twice_has_its_last_bytes<S: Subject>(new: impl Fn(&World) -> S) {
    let world = World::new(10, &[4], 16 << 10);
    let mut subject = new(&world);
    let batch = world.one_hot(&[vec![1, 2]]);
    run(&mut subject, &world, &batch);
    subject.settle();
    let row = |id, version| world.row(TableId(0), id, version).unwrap();
    let (first, last, other) = (row(1, 0), row(1, 1), row(2, 0));
    let rows: [(_, _, &[u8]); 3] = [(TableId(0), 1, &first), (TableId(0), 2, &other), (TableId(0), 1, &last)];
    assert_eq!(subject.switch(1, &rows).unwrap(), Switched { changed: 2, carried: 2 });
    assert_eq!(run(&mut subject, &world, &batch), (2, 0));
}

/// Batches, evictions and switches run in any order, and host memory is added and removed. Every batch must
/// get the rows of its version.
pub(crate) fn whatever_happens_a_row_is_its_batchs_versions<S: Subject>(
    new: impl Fn(&World) -> S,
    world: &World,
    steps: &[u8],
    draw: u64,
) {
    let (mut subject, mut draw, mut version) = (new(world), draw, 0);
    let mut in_ram: Vec<Box<dyn Send>> = Vec::new();
    for &step in steps {
        match step {
            0 => {
                version += 1;
                world.switch(&subject, version);
                assert_eq!(subject.version(), version);
            }
            1 => in_ram.push(subject.host_rows(world, TableId(draw as u32 % world.tables.len() as u32))),
            2 => drop((!in_ram.is_empty()).then(|| in_ram.remove(0))),
            3 => subject.set_pointers(draw % (world.options.pointers + 1)),
            4..8 => drop(subject.evict_step()),
            _ => drop(run(&mut subject, world, &world.bags(16, 120, &mut draw))),
        }
    }
    settle(&subject);
    assert_adds_up(&subject.stats());
    drop(in_ram);
    subject.settle();
    assert_eq!(subject.stats().pointers, 0);
    assert_adds_up(&subject.stats());
}
