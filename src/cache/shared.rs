//! The state that batches and the eviction thread share: how rows are inserted and retired.

use std::ops::Deref;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use super::common::Common;
use super::epoch::Replaceable;
use super::error::CacheError;
use super::evictor::Sweep;
use super::index::{Entry, EntryDecision, Index, LinkOutcome, PinnedLocation, Stamp};
use super::policy::{Fill, Missed};
use super::pool::{Class, Pool, Slot};
use super::query::Miss;
use super::shape::tag_bytes;
use super::version::Current;
use crate::types::{FlatKey, RowId, TableId};

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
    /// The admission policy rejected it, or a version switch has stopped the admission of rows.
    NotAdmitted,
    /// The cache has no room for it at present.
    Full,
}

/// The state of a cache.
#[derive(Debug)]
pub(crate) struct Shared {
    pub common: Common,
    pub index: Index,
    pub pool: Pool,
    /// The version that new batches use.
    pub current: Replaceable<Current>,
    /// Held during a version switch.
    pub switching: Mutex<()>,
    pub sweep: Mutex<Sweep>,
}

impl Deref for Shared {
    type Target = Common;

    fn deref(&self) -> &Common {
        &self.common
    }
}

impl Shared {
    pub(crate) fn insert(&self, batch: u64, miss: &Miss, row: &[u8]) -> Result<Insertion, CacheError> {
        let table = miss.table;
        let own = self.own_key(miss.row(), row.len())?;
        let missed = Missed { key: own, batch, occurrences: miss.occurrences };
        if !self.admits(missed, || self.fill_level()) {
            return Ok(Insertion::NotAdmitted);
        }
        let class = self.classes[table.index()];
        let Some(mut slot) = self.take(class) else {
            self.starve(class);
            return Ok(Insertion::Full);
        };
        self.fill(&mut slot, table, own, row);
        let coldness = |key, age| self.eviction.coldness(key, age);
        let replace = self.retired.waiting() < MAX_WAITING;
        let (_, key) = self.keys.row(table, own);
        let entry = Entry { key, location: slot.location(), now: Stamp::of(batch) };
        // If another row is linked under the same index key, the new row replaces it: the new row is the last
        // one used. If nothing may be replaced, the other row stays.
        let same = |pinned: PinnedLocation<'_>| {
            !pinned.location().is_pointer() && (!replace || self.is_row(table, own, pinned))
        };
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
        same: impl FnOnce(PinnedLocation<'_>) -> bool,
    ) -> Insertion {
        let bytes = self.footprint(table);
        self.counts.linked_bytes.fetch_add(bytes, Ordering::Relaxed);
        let refused = match self.index.insert(entry, coldness, same) {
            LinkOutcome::Present => Insertion::Present,
            LinkOutcome::Full => Insertion::Full,
            link => {
                self.counts.inserted.fetch_add(1, Ordering::Relaxed);
                if let LinkOutcome::Replaced(unlinked) = link {
                    self.retire(unlinked);
                    self.wake.now();
                }
                return Insertion::Stored;
            }
        };
        self.counts.linked_bytes.fetch_sub(bytes, Ordering::Relaxed);
        refused
    }

    /// Writes a row into a slot. If other rows may share its index key, its own key is written before it, as
    /// a tag.
    pub(crate) fn fill(&self, slot: &mut Slot, table: TableId, own: FlatKey, row: &[u8]) {
        let tag = own.0.to_ne_bytes();
        self.pool.fill(slot, if self.keys.tagged(table) { &tag } else { &[] }, row);
    }

    /// Whether the entry found under a row's index key is that row.
    #[inline]
    pub(crate) fn is_row(&self, table: TableId, own: FlatKey, pinned: PinnedLocation<'_>) -> bool {
        !self.keys.tagged(table) || self.pool.tag(pinned) == own.0
    }

    /// The bytes of a row in the pool.
    #[inline]
    pub(crate) fn row<'a>(&'a self, table: TableId, pinned: PinnedLocation<'a>) -> &'a [u8] {
        self.pool.row(pinned, tag_bytes(&self.keys, table), self.tables[table.index()].row_bytes)
    }

    /// A free slot. If there is none, some retired slots are reclaimed first.
    pub(crate) fn take(&self, class: Class) -> Option<Slot> {
        self.pool.take(class).or_else(|| {
            self.reclaim_some();
            self.pool.take(class)
        })
    }

    /// As [`Self::take`] for each of these classes. Uses the allocator's lock once if there is room.
    pub(crate) fn take_each(&self, classes: impl Iterator<Item = Class> + Clone) -> Vec<Option<Slot>> {
        let mut slots = self.pool.take_each(classes.clone());
        for (slot, class) in slots.iter_mut().zip(classes) {
            *slot = slot.take().or_else(|| self.take(class));
        }
        slots
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

    pub(crate) fn crossed(&self) -> bool {
        self.fill_level().crosses()
    }

    pub(crate) fn fill_level(&self) -> Fill {
        self.fill_with(self.index.entries())
    }

    /// The cached rows, the most recently used first.
    pub(crate) fn hot_rows(&self) -> Vec<RowId> {
        let now = Stamp::of(self.epochs.tag());
        // Reserved for a full index, so that the vector does not grow under a bucket's lock. A row takes 16
        // bytes. The result reuses the memory.
        let mut rows = Vec::with_capacity(self.entry_capacity() as usize);
        for bucket in 0..self.index.buckets() {
            let row = |key, pinned: PinnedLocation<'_>, age| {
                let in_pool = !pinned.location().is_pointer();
                Some((age, self.row_of(key, || in_pool.then(|| self.pool.tag(pinned)))?))
            };
            let collect = |key, pinned: PinnedLocation<'_>, age| {
                rows.extend(row(key, pinned, age));
                EntryDecision::Keep
            };
            self.index.visit_bucket(bucket, now, collect, |_| {});
        }
        rows.sort_unstable();
        rows.into_iter().map(|(_, row)| row).collect()
    }
}

/// The result of freeing some retired slots.
struct Reclaimed {
    freed: usize,
    /// Slots that still wait for batches.
    waiting: usize,
}
