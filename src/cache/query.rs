//! A batch's lookup: encodes ids as keys, removes duplicates, and probes each distinct key once.
//!
//! All vectors are reused from batch to batch. Deduplication uses its own kind of hash table, which is empty
//! at the start of each batch without being cleared: each slot stores the generation in which it was written,
//! and a slot of an older generation counts as empty.

use std::ops::Range;

use super::epoch::Pin;
use super::error::CacheError;
use super::index::{BUCKETS_AHEAD, Location, PinnedLocation, Stamp};
use super::key::{RowKeys, hash_key};
use super::shared::Shared;
use super::version::VersionOverlay;
use crate::types::{FlatKey, RowId, TableId};

/// A batch's ids and the result of their lookup. Reuse it: then a batch allocates only if it is larger than
/// all batches before.
#[derive(Debug, Default)]
pub struct Query {
    ids: Vec<u64>,
    columns: Vec<Column>,
    /// By occurrence of an id: the number of its distinct row.
    uniques: Vec<u32>,
    rows: Vec<Unique>,
    misses: Vec<Miss>,
    pointed: Vec<Miss>,
    numbering: KeyNumbering,
    tallies: Vec<Tally>,
    /// The number of the batch that made the last probe.
    batch: u64,
}

#[derive(Clone, Debug)]
struct Column {
    table: TableId,
    ids: Range<usize>,
}

/// One distinct row of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unique {
    own: FlatKey,
    pub table: TableId,
    occurrences: u32,
    pub found: FoundAt,
}

/// Where a probe found a row.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FoundAt {
    Slot(Location),
    /// The row's index in `Query::pointed`.
    Pointer(u32),
    /// The row's index in `Query::misses`.
    Miss(u32),
}

/// A distinct row of a batch that is not in the cache's memory: it is missing, or the index points at it in
/// the store's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Miss {
    /// The row's table.
    pub table: TableId,
    /// The row's id.
    pub id: u64,
    /// The number of this distinct row: `uniques()[o] == unique` for each of its occurrences `o`.
    pub unique: u32,
    /// How often the batch uses the row, at least once.
    pub occurrences: u32,
}

impl Miss {
    /// The table and the row.
    #[must_use]
    pub fn row(&self) -> RowId {
        RowId::new(self.table, self.id)
    }
}

/// Accesses of one table in one lookup. `hits`, `pointed` and `misses` add up to the ids of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub hits: u64,
    pub pointed: u64,
    pub misses: u64,
    /// Ids not found because another row has their index key.
    pub collisions: u64,
}

impl Query {
    /// Removes all ids and keeps the memory.
    pub fn clear(&mut self) {
        self.ids.clear();
        self.columns.clear();
    }

    /// Adds ids of a table, each below its number of rows. Returns their positions in
    /// [`super::batch::Found::uniques`].
    pub fn push(&mut self, table: TableId, ids: impl IntoIterator<Item = u64>) -> Range<usize> {
        let start = self.ids.len();
        self.ids.extend(ids);
        let ids = start..self.ids.len();
        self.columns.push(Column { table, ids: ids.clone() });
        ids
    }

    pub(crate) fn uniques(&self) -> &[u32] {
        &self.uniques
    }

    pub(crate) fn rows(&self) -> &[Unique] {
        &self.rows
    }

    pub(crate) fn misses(&self) -> &[Miss] {
        &self.misses
    }

    pub(crate) fn pointed(&self) -> &[Miss] {
        &self.pointed
    }

    /// The number of the batch that made the last probe.
    pub(crate) fn batch(&self) -> u64 {
        self.batch
    }

    /// By table: accesses of the last probe.
    pub(crate) fn tallies(&self) -> &[Tally] {
        &self.tallies
    }

    /// Numbers the distinct rows, one table at a time. Rows of different tables have different keys, and a
    /// hash table for the ids of one table fits better in the processor's cache.
    pub(crate) fn deduplicate(&mut self, keys: &RowKeys) -> Result<(), CacheError> {
        self.uniques.clear();
        self.rows.clear();
        self.misses.clear();
        self.pointed.clear();
        if self.ids.len() > MAX_OCCURRENCES {
            return Err(CacheError::Occurrences { got: self.ids.len(), limit: MAX_OCCURRENCES });
        }
        self.uniques.resize(self.ids.len(), 0);
        self.columns.sort_by_key(|column| column.table.0);
        for columns in self.columns.chunk_by(|a, b| a.table == b.table) {
            let (table, ids) = (columns[0].table, columns.iter().map(|column| column.ids.len()).sum());
            let Some(code) = keys.own_keys().code(table) else {
                return Err(CacheError::Table { got: table.index(), tables: keys.own_keys().tables() });
            };
            self.numbering.begin(ids);
            for occurrence in columns.iter().flat_map(|column| column.ids.clone()) {
                let id = self.ids[occurrence];
                let Some(own) = code.key(id) else {
                    return Err(CacheError::Id { table: table.index(), got: id, rows: code.rows() });
                };
                let unique = self.numbering.number(own, self.rows.len() as u32);
                match self.rows.get_mut(unique as usize) {
                    Some(row) => row.occurrences += 1,
                    None => self.rows.push(Unique { own, table, occurrences: 1, found: FoundAt::Miss(0) }),
                }
                self.uniques[occurrence] = unique;
            }
        }
        Ok(())
    }

    /// Looks up every distinct row, first in the overlay of the batch's version.
    pub(crate) fn probe(&mut self, cache: &Shared, overlay: Option<&VersionOverlay>, pin: &Pin<'_>) {
        self.batch = pin.number();
        self.tallies.clear();
        self.tallies.resize(cache.tables.len(), Tally::default());
        let now = Stamp::of(pin.number());
        for unique in 0..self.rows.len() {
            if let Some(row) = self.rows.get(unique + BUCKETS_AHEAD) {
                cache.index.prefetch(cache.keys.row(row.table, row.own).1);
            }
            let row = &mut self.rows[unique];
            let (id, key) = cache.keys.row(row.table, row.own);
            let tally = &mut self.tallies[row.table.index()];
            let count = u64::from(row.occurrences);
            let found = match overlay.and_then(|overlay| overlay.get(row.own)) {
                Some(changed) => changed,
                None => cache.index.get(key, now, pin).and_then(|pinned: PinnedLocation<'_>| {
                    let is_row = cache.is_row(row.table, row.own, pinned);
                    tally.collisions += u64::from(!is_row) * count;
                    is_row.then(|| pinned.location())
                }),
            };
            let not_in_pool =
                Miss { table: row.table, id, unique: unique as u32, occurrences: row.occurrences };
            row.found = match found {
                Some(location) if location.is_pointer() => {
                    tally.pointed += count;
                    self.pointed.push(not_in_pool);
                    FoundAt::Pointer(self.pointed.len() as u32 - 1)
                }
                Some(location) => {
                    tally.hits += count;
                    FoundAt::Slot(location)
                }
                None => {
                    tally.misses += 1;
                    tally.hits += count - 1;
                    self.misses.push(not_in_pool);
                    FoundAt::Miss(self.misses.len() as u32 - 1)
                }
            };
        }
    }
}

/// Occurrences are numbered in 32 bits, and [`KeyNumbering`] has at least two slots for each.
const MAX_OCCURRENCES: usize = 1 << 30;

/// Numbers distinct keys in the order of their first occurrence.
#[derive(Debug, Default)]
struct KeyNumbering {
    slots: Vec<KeySlot>,
    mask: usize,
    generation: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct KeySlot {
    key: u64,
    /// 0 in a slot that was never written: generations start at 1.
    generation: u32,
    unique: u32,
}

impl KeyNumbering {
    /// Removes all keys and makes room for `keys` keys.
    fn begin(&mut self, keys: usize) {
        let slots = (2 * keys).next_power_of_two();
        self.mask = slots - 1;
        self.generation = self.generation.wrapping_add(1);
        if self.slots.len() < slots || self.generation == 0 {
            let slots = slots.max(self.slots.len());
            self.slots.clear();
            self.slots.resize(slots, KeySlot::default());
            self.generation = 1;
        }
    }

    /// The number of a key. A key that is new in this generation gets `next`.
    #[inline]
    fn number(&mut self, key: FlatKey, next: u32) -> u32 {
        let mut at = hash_key(key) as usize;
        loop {
            let slot = &mut self.slots[at & self.mask];
            if slot.generation != self.generation {
                *slot = KeySlot { key: key.0, generation: self.generation, unique: next };
                return next;
            }
            if slot.key == key.0 {
                return slot.unique;
            }
            at = at.wrapping_add(1);
        }
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
