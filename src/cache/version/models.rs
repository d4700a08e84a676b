//! Loom models of a switch of the real cache: its index, its pins, its retired slots and its overlay. Only
//! the bytes of its pool are not watched by loom, so each row that is read is compared with the one expected.

use super::super::{AdmissionOption, CacheOptions, CacheShape, FlatCache, Query, Source, TableShape};
use super::*;

const OLD: Version = Version(1);
const NEW: Version = Version(2);
const TABLE: TableId = TableId(0);

/// A row that the new version changes, and one that it does not.
const CHANGED: u64 = 3;
const SAME: u64 = 5;

/// The bytes of a row in a version.
fn row(id: u64, version: Version) -> [u8; 4] {
    match id {
        CHANGED => [version.0 as u8; 4],
        _ => [id as u8; 4],
    }
}

/// A small cache whose eviction no thread drives.
fn cache() -> FlatCache {
    let tables = vec![TableShape { rows: 8, row_bytes: 4 }];
    let options = CacheOptions {
        admission: AdmissionOption::ALL,
        version: OLD,
        background: false,
        ..CacheOptions::default()
    };
    FlatCache::new(&CacheShape { bytes: 1 << 10, tables }, &options).unwrap()
}

/// A batch: each row that it finds is of its version, and it offers those that it misses. Returns its
/// version.
fn batch(cache: &FlatCache, ids: &[u64]) -> Version {
    let (pin, mut query) = (cache.pin(), Query::default());
    query.push(TABLE, ids.iter().copied());
    let found = pin.lookup(&mut query).unwrap();
    for miss in found.misses() {
        pin.insert(miss, &row(miss.id, pin.version())).unwrap();
    }
    // The rows are read after the inserts, as late as a batch may read them.
    for (&id, &unique) in ids.iter().zip(found.uniques()) {
        if let Source::Row(bytes) = found.source(unique) {
            assert_eq!(bytes, row(id, pin.version()), "row {id} of {:?}", pin.version());
        }
    }
    pin.version()
}

/// Switches to the new version. The changed row is known, as for a delta.
fn switch(cache: &FlatCache) -> Switched {
    let new = row(CHANGED, NEW);
    let rows = |cached: Cached<'_>| {
        let linked = cached.linked(&[RowId::new(TABLE, CHANGED)]);
        linked.into_iter().map(|changed| NewRow { row: changed, bytes: Some(&new[..]) }).collect::<Vec<_>>()
    };
    cache.switch(NEW, rows).unwrap()
}

/// Runs batches in another thread while the cache switches. Rows of `before` are cached then.
fn model(before: &'static [u64], batches: &'static [&'static [u64]]) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(move || {
        let cache = std::sync::Arc::new(cache());
        if !before.is_empty() {
            batch(&cache, before);
        }
        let other = {
            let cache = cache.clone();
            loom::thread::spawn(move || {
                for ids in batches {
                    batch(&cache, ids);
                }
            })
        };
        let switched = switch(&cache);
        other.join().unwrap();
        assert!(switched.carried <= switched.changed);
        assert!(before.is_empty() || switched.carried == 1, "a cached row keeps its place");
        assert_eq!(batch(&cache, &[CHANGED, SAME]), NEW);
    });
}

#[test]
fn a_batch_finds_rows_of_its_version_while_a_cached_row_changes() {
    model(&[CHANGED], &[&[CHANGED], &[CHANGED]]);
}

#[test]
fn a_batch_of_the_new_version_finds_no_row_that_an_old_batch_inserted_during_the_switch() {
    model(&[], &[&[CHANGED], &[CHANGED]]);
}

#[test]
fn a_batch_finds_the_rows_of_one_version() {
    model(&[CHANGED], &[&[SAME, CHANGED]]);
}
