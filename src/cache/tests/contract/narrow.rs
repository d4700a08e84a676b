//! Keys that are too narrow for their tables: tags distinguish the rows that share a key.

use std::collections::HashMap;

use crate::cache::key::{FlatKeys, KeyWidth};
use crate::mem::mix64;
use crate::types::{FlatKey, RowId, TableId};

use super::{Subject, World, run, totals};

/// The same world with index keys of `bits` bits.
pub(crate) fn keys(world: World, bits: u32) -> World {
    world.with(|options| options.key_width = KeyWidth::new(bits).unwrap())
}

fn index_keys(world: &World) -> FlatKeys {
    let rows: Vec<u64> = world.tables.iter().map(|t| t.rows).collect();
    FlatKeys::new(&rows, world.options.key_width).unwrap()
}

/// Batches use one row each, and the cache has room for all keys. A map from key to row gives the expected
/// result of each access.
pub(crate) fn a_key_has_the_row_last_used<S: Subject>(new: impl Fn(&World) -> S, bits: u32, mut draw: u64) {
    // Two tables whose rows share keys, and one small enough for exact keys.
    let mut world = World::new(200, &[4, 7, 1], 64 << 10);
    world.tables[2].rows = 2;
    let world = keys(world, bits);
    let codes = index_keys(&world);
    let mut subject = new(&world);
    let mut has: HashMap<FlatKey, u64> = HashMap::new();
    let mut expected = vec![(0, 0, 0); 3];
    for _ in 0..120 {
        draw = draw.wrapping_add(1);
        let (t, copies) = ((mix64(draw) % 3) as usize, 1 + mix64(draw) / 3 % 3);
        let table = TableId(t as u32);
        let id = (mix64(draw) >> 32) % world.tables[t].rows.min(24);
        // The other features have only absent ids.
        let mut ids = vec![vec![u64::MAX; copies as usize]; 3];
        ids[t].fill(id);
        run(&mut subject, &world, &world.one_hot(&ids));
        subject.settle();
        let (hits, misses, collisions) = &mut expected[t];
        match has.insert(codes.encode(table, id).unwrap(), id) {
            Some(there) if there == id => *hits += copies,
            other => {
                *misses += 1;
                *hits += copies - 1;
                *collisions += if other.is_some() { copies } else { 0 };
            }
        }
    }
    let stats = subject.stats();
    let seen: Vec<_> = stats.tables.iter().map(|t| (t.hits, t.misses, t.collisions)).collect();
    assert_eq!(seen, expected, "{bits} bits: hits, misses and collisions by table");
    assert_eq!(stats.entries, has.len() as u64);
    assert_eq!(stats.entries, stats.inserted - totals(&stats).2);
}

pub(crate) fn rows_that_share_a_key_in_a_batch_stay_separate<S: Subject>(new: impl Fn(&World) -> S) {
    let world = keys(World::new(1000, &[2], 64 << 10), 4);
    let mut subject = new(&world);
    for start in (0..240).step_by(60) {
        let ids: Vec<u64> = (start..start + 60).collect();
        let (hits, misses) = run(&mut subject, &world, &world.one_hot(&[ids]));
        assert_eq!((hits, misses), (0, 60));
        subject.settle();
        let entries = subject.stats().entries;
        assert!((1..=14).contains(&entries), "{entries} entries of at most 14 keys");
    }
    let stats = subject.stats();
    assert_eq!(stats.entries, stats.inserted - totals(&stats).2);
    // A batch of the cached rows has no misses.
    let hot = subject.hot_rows();
    assert_eq!(hot.len() as u64, stats.entries);
    let ids: Vec<u64> = hot.into_iter().map(RowId::row).collect();
    let hits = ids.len() as u64;
    assert_eq!(run(&mut subject, &world, &world.one_hot(&[ids])), (hits, 0));
}
