//! Caches to test, batches whose rows encode their table, id and version, and what a batch has seen.

use std::collections::HashSet;

use super::*;
use crate::cache::stats::TableStats;

pub(super) fn table(rows: u64, dim: usize) -> TableShape {
    TableShape { rows, row_bytes: 4 * dim }
}

/// A row's bytes in version 0. Each word is a hash of table, id and position.
pub(super) fn row_of(table: TableId, id: u64, bytes: usize) -> Vec<u8> {
    row_at(Version(0), table, id, bytes)
}

/// Whether a version changes a row.
pub(super) fn changes(version: Version, id: u64) -> bool {
    version.0 > 0 && id % 5 == version.0 % 5
}

/// A row's bytes in `version`: the bytes of the last version, up to this one, that changed the row.
pub(super) fn row_at(version: Version, table: TableId, id: u64, bytes: usize) -> Vec<u8> {
    let made = (1..=version.0).rev().take(5).find(|&v| changes(Version(v), id)).unwrap_or(0);
    let word = |i: usize| {
        let place = id << 20 | u64::from(table.0) << 10 | i as u64;
        (crate::mem::mix64(place ^ crate::mem::mix64(made)) >> 32) as u32
    };
    (0..bytes / 4).flat_map(|i| word(i).to_le_bytes()).collect()
}

/// Options that admit every row.
pub(super) fn for_all() -> CacheOptions {
    CacheOptions { admission: AdmissionOption::ALL, ..CacheOptions::default() }
}

/// The same without the eviction thread: the test calls `evict_step`.
pub(super) fn by_hand() -> CacheOptions {
    CacheOptions { background: false, ..for_all() }
}

pub(super) fn cache_of(bytes: usize, tables: &[TableShape], options: &CacheOptions) -> FlatCache {
    FlatCache::new(&CacheShape { bytes, tables: tables.to_vec() }, options).unwrap()
}

/// All rows that a version changes, with their bytes in that version.
fn changed(version: Version, tables: &[TableShape]) -> Vec<(TableId, u64, Vec<u8>)> {
    let of_table = |(t, table): (usize, &TableShape)| {
        let (table_id, row_bytes) = (TableId(t as u32), table.row_bytes);
        let ids = (0..table.rows).filter(move |&id| changes(version, id));
        ids.map(move |id| (table_id, id, row_at(version, table_id, id, row_bytes))).collect::<Vec<_>>()
    };
    tables.iter().enumerate().flat_map(of_table).collect()
}

pub(super) fn switch(cache: &FlatCache, tables: &[TableShape], version: Version) -> Switched {
    let rows = changed(version, tables);
    cache.switch(version, |_| rows.iter().map(|(t, id, row)| NewRow::of((*t, *id, &row[..])))).unwrap()
}

/// The counts of a batch.
pub(super) struct Seen {
    pub(super) hits: u64,
    pub(super) pointed: u64,
    pub(super) misses: u64,
}

/// Runs a batch as the engine does, and checks every row that it reads before and after its inserts.
pub(super) fn run_batch(
    cache: &FlatCache,
    tables: &[TableShape],
    query: &mut Query,
    ids: &[(u32, Vec<u64>)],
) -> Seen {
    let pin = cache.pin();
    query.clear();
    for (table, ids) in ids {
        query.push(TableId(*table), ids.iter().copied());
    }
    let found = pin.lookup(query).unwrap();
    let fetch = |t: TableId, id| row_at(pin.version(), t, id, tables[t.index()].row_bytes);
    let seen = |table, id, unique| {
        let occurrences = found.uniques().iter().filter(|&&u| u == unique).count() as u32;
        Miss { table, id, unique, occurrences }
    };
    for half in 0..2 {
        let occurrences = ids.iter().flat_map(|(t, ids)| ids.iter().map(|&id| (TableId(*t), id)));
        for ((t, id), &unique) in occurrences.zip(found.uniques()) {
            match found.source(unique) {
                Source::Row(row) => assert_eq!(row, fetch(t, id), "table {t:?} id {id}"),
                Source::Pointer(p) => assert_eq!(found.pointed()[p], seen(t, id, unique)),
                Source::Miss(m) => assert_eq!(found.misses()[m], seen(t, id, unique)),
            }
        }
        for miss in found.misses().iter().filter(|_| half == 0) {
            pin.insert(miss, &fetch(miss.table, miss.id)).unwrap();
        }
    }
    let missing: HashSet<_> = found.misses().iter().map(|m| m.unique).collect();
    assert_eq!(missing.len(), found.misses().len(), "each miss once");
    let misses = missing.len() as u64;
    let pointed: HashSet<_> = found.pointed().iter().map(|m| m.unique).collect();
    let pointed = found.uniques().iter().filter(|u| pointed.contains(u)).count() as u64;
    Seen { hits: found.uniques().len() as u64 - misses - pointed, pointed, misses }
}

/// A row that a batch uses once and does not find.
pub(super) fn miss(table: TableId, id: u64) -> Miss {
    Miss { table, id, unique: 0, occurrences: 1 }
}

pub(super) fn totals(stats: &CacheStats) -> (u64, u64, u64) {
    let sum = |of: fn(&TableStats) -> u64| stats.tables.iter().map(of).sum();
    (sum(|t| t.hits), sum(|t| t.misses), sum(|t| t.evictions))
}

pub(super) fn settle(cache: &FlatCache) {
    for _ in 0..100_000 {
        if cache.evict_step() == EvictStep::Idle {
            return;
        }
    }
    panic!("eviction does not come to rest");
}
