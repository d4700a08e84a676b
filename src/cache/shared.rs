//! The state that batches and the eviction thread share: how rows are inserted and retired.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::epoch::{Epochs, Replaceable, RetireList};
use super::error::CacheError;
use super::evictor::{Sweep, Wake};
use super::index::{self, Entry, Fate, Held, Index, Link, Stamp, Unlinked};
use super::key::RowKeys;
use super::pointers::Pointers;
use super::policy::{Admission, Eviction, Fill, Missed, Watermarks};
use super::query::Miss;
use super::shape::{TAG_BYTES, TableShape};
use super::slab::{Class, Pool, Slot};
use super::stats::{CacheStats, Counts, TableCounts};
use super::version::Current;
use crate::types::{FlatKey, TableId};

/// The most unlinked slots that wait for batches to finish: 1 MiB of records. At this limit eviction pauses.
pub(crate) const MAX_WAITING: usize = 1 << 16;
/// The most retired slots that are freed under one lock.
const FREED_AT_ONCE: usize = 64;

/// The result of offering a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Insertion {
    /// The row is cached.
    Stored,
    /// Another batch has inserted it already.
    Present,
    /// The admission policy rejected it.
    NotAdmitted,
    /// The cache has no room for it at present.
    Full,
    /// The row differs from the previous version, whose batches have not all finished.
    Switching,
}

/// The state of a cache.
#[derive(Debug)]
pub(crate) struct Shared {
    pub keys: RowKeys,
    pub tables: Vec<TableShape>,
    /// By table: the class of its slots, which include the tag.
    pub classes: Vec<Class>,
    pub index: Index,
    pub pool: Pool,
    pub epochs: Epochs,
    /// The version that new batches use.
    pub current: Replaceable<Current>,
    /// Held during a version switch.
    pub switching: Mutex<()>,
    pub admission: Admission,
    pub eviction: Eviction,
    pub watermarks: Watermarks,
    pub pointers: Pointers,
    pub retired: RetireList,
    pub sweep: Mutex<Sweep>,
    pub wake: Arc<Wake>,
    /// The class of a row that found no slot, plus one; 0 for no class. Eviction then empties some slabs, so
    /// that they can change their row size.
    pub starved: AtomicU64,
    pub counts: Counts,
}

impl Shared {
    pub(crate) fn insert(&self, batch: u64, miss: &Miss, row: &[u8]) -> Result<Insertion, CacheError> {
        let table = miss.table;
        let own = self.own_key(table, miss.id, row.len())?;
        let missed = Missed { key: own, batch, occurrences: miss.occurrences };
        if !self.admission.admits(missed, || self.is_roomy()) {
            self.counts.not_admitted.fetch_add(1, Ordering::Relaxed);
            return Ok(Insertion::NotAdmitted);
        }
        let class = self.classes[table.index()];
        let Some(mut slot) = self.take(class) else {
            self.counts.rejected_full.fetch_add(1, Ordering::Relaxed);
            self.starved.store(u64::from(class.0) + 1, Ordering::Relaxed);
            self.wake.now();
            return Ok(Insertion::Full);
        };
        self.fill(&mut slot, table, own, row);
        let coldness = |key, age| self.eviction.coldness(key, age);
        let replace = self.retired.waiting() < MAX_WAITING;
        let (_, key) = self.keys.row(table, own);
        let entry = Entry { key, location: slot.location(), now: Stamp::of(batch) };
        // If another row is linked under the same index key, the new row replaces it: the new row is the last
        // one used. If nothing may be replaced, the other row stays.
        let same = |held: Held<'_>| !held.location().is_host() && (!replace || self.is_row(table, own, held));
        let insertion = self.link(table, entry, replace.then_some(&coldness), same);
        if insertion != Insertion::Stored {
            self.pool.put_back(slot);
        }
        if insertion == Insertion::Full {
            self.count_rejected();
        }
        if self.crossed() {
            self.wake.now();
        }
        Ok(insertion)
    }

    /// Links a row that is already in its slot, as [`Index::insert`] does. Updates the counts for the row and
    /// for the entry that it replaced. The row's bytes are counted before it can be evicted, so the sum never
    /// falls below zero.
    pub(crate) fn link(
        &self,
        table: TableId,
        entry: Entry,
        coldness: Option<&dyn Fn(FlatKey, u32) -> u64>,
        same: impl FnOnce(Held<'_>) -> bool,
    ) -> Insertion {
        let bytes = self.footprint(table);
        self.counts.linked_bytes.fetch_add(bytes, Ordering::Relaxed);
        let refused = match self.index.insert(entry, coldness, same) {
            Link::Present => Insertion::Present,
            Link::Full => Insertion::Full,
            link => {
                self.counts.inserted.fetch_add(1, Ordering::Relaxed);
                if let Link::Replaced(unlinked) = link {
                    self.retire(unlinked);
                    self.wake.now();
                }
                return Insertion::Stored;
            }
        };
        self.counts.linked_bytes.fetch_sub(bytes, Ordering::Relaxed);
        refused
    }

    /// Counts a row that found no room, and wakes the eviction thread.
    pub(crate) fn count_rejected(&self) {
        self.counts.rejected_full.fetch_add(1, Ordering::Relaxed);
        self.wake.now();
    }

    /// As [`RowKeys::own_key`].
    pub(crate) fn own_key(&self, table: TableId, id: u64, bytes: usize) -> Result<FlatKey, CacheError> {
        self.keys.own_key(&self.tables, (table, id), bytes)
    }

    /// Writes a row into a slot. If other rows may share its index key, its own key is written before it, as
    /// a tag.
    pub(crate) fn fill(&self, slot: &mut Slot, table: TableId, own: FlatKey, row: &[u8]) {
        let tag = own.0.to_ne_bytes();
        self.pool.fill(slot, if self.keys.tagged(table) { &tag } else { &[] }, row);
    }

    /// Whether the entry found under a row's index key is that row.
    #[inline]
    pub(crate) fn is_row(&self, table: TableId, own: FlatKey, held: Held<'_>) -> bool {
        !self.keys.tagged(table) || self.pool.tag(held) == own.0
    }

    /// The bytes of a row in the pool.
    #[inline]
    pub(crate) fn row<'a>(&'a self, table: TableId, held: Held<'a>) -> &'a [u8] {
        let tag = if self.keys.tagged(table) { TAG_BYTES } else { 0 };
        self.pool.row(held, tag, self.tables[table.index()].row_bytes)
    }

    /// A free slot. If there is none, some retired slots are reclaimed first.
    pub(crate) fn take(&self, class: Class) -> Option<Slot> {
        self.pool.take(class).or_else(|| {
            self.reclaim_some();
            self.pool.take(class)
        })
    }

    /// Updates the counts for an unlinked entry, and retires its slot if it has one.
    pub(crate) fn retire(&self, unlinked: Unlinked) {
        if unlinked.location().is_host() {
            self.pointers.removed();
            return;
        }
        if let Some(table) = self.keys.index_keys().table_of(unlinked.key) {
            self.counts.linked_bytes.fetch_sub(self.footprint(table), Ordering::Relaxed);
            self.counts.tables[table.index()].evictions.fetch_add(1, Ordering::Relaxed);
        }
        self.retired.put(unlinked, &self.epochs);
    }

    /// Frees the retired slots whose batches have all finished, a few at a time so that other threads do not
    /// wait long for the lock. Returns how many still wait.
    pub(crate) fn reclaim(&self) -> usize {
        loop {
            let Reclaimed { freed, waiting } = self.reclaim_some();
            if freed < FREED_AT_ONCE {
                return waiting;
            }
        }
    }

    /// Frees a few retired slots.
    fn reclaim_some(&self) -> Reclaimed {
        let mut freed = 0;
        let free = |slot| {
            self.pool.free(slot);
            freed += 1;
        };
        let waiting = self.retired.reclaim_some(&self.epochs, FREED_AT_ONCE, free);
        Reclaimed { freed, waiting }
    }

    /// Whether the cache is below its low watermark, so that a row is stored without an eviction.
    fn is_roomy(&self) -> bool {
        self.fill_level().excess(&self.watermarks) == 0.0
    }

    pub(crate) fn crossed(&self) -> bool {
        self.fill_level().crosses(&self.watermarks)
    }

    pub(crate) fn fill_level(&self) -> Fill {
        let bytes = self.counts.linked_bytes.load(Ordering::Relaxed);
        Fill {
            entries: (self.index.entries(), self.index.capacity()),
            bytes: (bytes, self.pool.shape().data_bytes() as u64),
        }
    }

    /// The cached rows, the most recently used first.
    pub(crate) fn hot_rows(&self) -> Vec<(TableId, u64)> {
        let now = Stamp::of(self.epochs.tag());
        // Reserved for a full index, so that the vector does not grow under a bucket's lock. A row takes 16
        // bytes. The result reuses the memory.
        let mut rows = Vec::with_capacity(self.index.capacity() as usize);
        for bucket in 0..self.index.buckets() {
            let row = |key, held: Held<'_>, age| {
                let table = self.keys.index_keys().table_of(key)?;
                let own = match self.keys.tagged(table) {
                    true if held.location().is_host() => return None,
                    true => self.keys.own_keys().decode(FlatKey(self.pool.tag(held)))?.1,
                    false => self.keys.index_keys().decode(key)?.1,
                };
                Some((age, table, own))
            };
            let collect = |key, held: Held<'_>, age| {
                rows.extend(row(key, held, age));
                Fate::Stay
            };
            self.index.evict(bucket, now, collect, |_| {});
        }
        rows.sort_unstable_by_key(|&(age, table, id)| (age, table.0, id));
        rows.into_iter().map(|(_, table, id)| (table, id)).collect()
    }

    fn footprint(&self, table: TableId) -> u64 {
        self.pool.shape().footprint(self.classes[table.index()]) as u64
    }

    pub(crate) fn stats(&self) -> CacheStats {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Fill { entries: (entries, entry_capacity), bytes: (pool_used_bytes, pool_bytes) } =
            self.fill_level();
        let index_bytes = self.index.buckets() * index::BUCKET_BYTES;
        let policies = self.admission.bytes() + self.eviction.bytes();
        CacheStats {
            tables: self.counts.tables.iter().map(TableCounts::read).collect(),
            entries,
            entry_capacity,
            pointers: self.pointers.count(),
            pool_used_bytes,
            pool_bytes,
            total_bytes: (self.pool.shape().bytes() + index_bytes + policies) as u64,
            inserted: load(&self.counts.inserted),
            not_admitted: load(&self.counts.not_admitted),
            rejected_full: load(&self.counts.rejected_full),
        }
    }
}

/// The result of freeing some retired slots.
struct Reclaimed {
    freed: usize,
    /// Slots that still wait for batches.
    waiting: usize,
}
