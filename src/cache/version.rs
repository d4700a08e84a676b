//! Switching versions: all changed rows switch together, between two batches.
//!
//! Flat keys have no version, so the caller of a switch passes the rows that changed. First, the switch stops
//! the admission of rows, and waits for the batches that may not have seen this: until the switch ends, rows
//! only leave the cache. Then the new bytes of the changed rows that are cached are copied into new slots,
//! and the new version becomes current together with an *overlay*: a map from these rows to the locations of
//! their new bytes, or to `None` if there was no room. A batch of the new version looks into the overlay
//! before the index. A batch of the old version looks only into the index, and finds the old rows there. When
//! the last of these batches has finished, no batch needs the old rows: the overlay is merged into the index
//! and removed.
//!
//! **Why no batch finds an old row of a changed id.** A batch takes its number, then reads the current
//! version. The switch makes the version current, then takes a tag. By the argument of [`super::epoch`], a
//! batch with a number above the tag sees the new version and so the overlay. The switch waits for all other
//! batches. So while the overlay exists, batches of the new version read changed rows through it and ignore
//! the index's entries for changed rows. When the overlay is merged, no batch of the old version is left, so
//! none inserts an old row after admission resumes.
//!
//! **Why a switch delays no request.** A batch takes locks only to insert rows, and inserts none while
//! admission is stopped. So a switch may run on threads of low priority that rest.
//!
//! **Why no slot is freed too early.** While the overlay exists, a batch may find a slot there that the index
//! has evicted. So [`super::epoch::RetireList`] frees nothing during that time, and all slots in it get a new
//! tag when the overlay is removed.
//!
//! An overlay takes up to 76 bytes per cached row that changed in addition to `cache.bytes`, and up to 80
//! while it is built (computed from the sizes of their entries).

use std::sync::Arc;

use super::error::CacheError;
use super::index::{BUCKETS_AHEAD, Entry, Location, PinnedLocation, Stamp, Unlinked};
use super::pool::Slot;
use super::shared::{Insertion, Shared};
use crate::mem::{PartedEntries, PartedMap};
use crate::pace;
use crate::sync::EvenPoisoned;
use crate::types::{FlatKey, RowId, TableId, Version};

/// The result of a version switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Switched {
    /// Cached rows that changed.
    pub changed: u64,
    /// Those whose new bytes are cached.
    pub carried: u64,
}

/// A row that differs between the current version and the next one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewRow<'r> {
    pub row: RowId,
    /// The bytes in the next version. `None`: if the row is cached, it is dropped.
    pub bytes: Option<&'r [u8]>,
}

#[cfg(test)]
impl<'r> NewRow<'r> {
    /// A row with these bytes in the next version.
    pub(crate) fn of((table, id, bytes): (TableId, u64, &'r [u8])) -> Self {
        Self { row: RowId::new(table, id), bytes: Some(bytes) }
    }
}

/// The rows of a cache during a switch: rows only leave it.
#[derive(Clone, Copy)]
pub(crate) struct Cached<'c>(&'c Shared);

impl Cached<'_> {
    /// All of them, the most recently used first.
    pub(crate) fn rows(self) -> Vec<RowId> {
        self.0.hot_rows()
    }

    /// Those of these rows whose index keys are linked: all that are cached, and rows that share a key with a
    /// cached row.
    pub(crate) fn linked(self, rows: &[RowId]) -> Vec<RowId> {
        pace::rest();
        let (keys, index) = (&self.0.keys, &self.0.index);
        let key = |row: &RowId| Some(keys.row(row.table(), keys.own(row.table(), row.row())?).1);
        let keys: Vec<_> = rows.iter().map(key).collect();
        let mut ahead = keys.iter().flatten();
        ahead.by_ref().take(BUCKETS_AHEAD).for_each(|&key| index.prefetch(key));
        // No key is linked during a switch, so one that is not linked now stays so. A row that just becomes a
        // pointer may look unlinked, too: batches read it from the store of their own version.
        let mut is_linked = |key: Option<FlatKey>| {
            ahead.next().into_iter().for_each(|&key| index.prefetch(key));
            key.is_some_and(|key| index.has(key))
        };
        rows.iter().zip(&keys).filter(|(_, key)| is_linked(**key)).map(|(row, _)| *row).collect()
    }
}

/// The version that new batches use.
#[derive(Debug)]
pub(crate) struct Current {
    pub version: Version,
    overlay: Option<Arc<VersionOverlay>>,
}

impl Current {
    pub(crate) fn new(version: Version) -> Self {
        Self { version, overlay: None }
    }

    /// The overlay that a batch of this version reads before the index, if there is one.
    #[inline]
    pub(crate) fn overlay(&self, version: Version) -> Option<&VersionOverlay> {
        self.overlay.as_deref().filter(|_| self.version == version)
    }
}

/// The locations of the cached rows that a version changes.
#[derive(Debug, Default)]
pub(crate) struct VersionOverlay {
    /// By the row's own key, which no other row has, unlike an index key ([`super::key`]).
    pub rows: ByKey<Changed>,
}

/// A hash map by flat key.
pub(crate) type ByKey<T> = PartedMap<FlatKey, T>;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Changed {
    pub table: TableId,
    /// `None` if its new bytes are not cached.
    pub location: Option<Location>,
}

impl VersionOverlay {
    /// `Some(location)` for a changed row, `None` for all other rows.
    #[inline]
    pub(crate) fn get(&self, own: FlatKey) -> Option<Option<Location>> {
        self.rows.get(&own).map(|changed| changed.location)
    }

    /// The result of the switch that made this overlay.
    pub(crate) fn switched(&self) -> Switched {
        let carried = pace::rested(self.rows.iter()).filter(|(_, row)| row.location.is_some()).count() as u64;
        Switched { changed: self.rows.len() as u64, carried }
    }
}

/// Cached rows that change, by their own keys, with the slots of their new bytes.
type CarriedRows = PartedEntries<FlatKey, (TableId, Option<Slot>)>;

/// A cached row that changes.
struct FoundRow<'r> {
    own: FlatKey,
    table: TableId,
    /// The bytes to copy into the pool.
    bytes: Option<&'r [u8]>,
}

/// Rows that are copied between two uses of locks. A lock waits for the memory that was written before it.
/// Without locks in between, the writes of many rows wait for it at the same time.
const COPIED_AT_ONCE: usize = 64;

impl Shared {
    /// As [`FlatCache::switch`](super::FlatCache::switch).
    pub(crate) fn switch<'c, 'r, C>(
        &'c self,
        version: Version,
        changed: impl FnOnce(Cached<'c>) -> C,
    ) -> Result<Switched, CacheError>
    where
        C: IntoIterator<Item = NewRow<'r>>,
    {
        let _one_at_a_time = self.switching.lock().even_poisoned();
        if version == self.current.read().version {
            return Err(CacheError::Version(version));
        }
        let _paused = self.pause_admission();
        if !self.epochs.earlier_end_within(self.switch_wait) {
            return Err(CacheError::Unfinished(self.switch_wait));
        }
        let overlay = Arc::new(self.overlay(changed(Cached(self)))?);
        self.retired.hold();
        self.current.replace(Current { version, overlay: Some(overlay.clone()) });
        self.epochs.wait_for_earlier();
        let unplaced = self.merge(&overlay);
        self.current.replace(Current { version, overlay: None });
        unplaced.into_iter().for_each(|slot| self.retired.put(slot, &self.epochs));
        self.retired.release(&self.epochs);
        self.wake.now();
        Ok(overlay.switched())
    }

    /// Copies the new bytes of cached rows into new slots, as far as there is room.
    fn overlay<'r>(
        &self,
        changed: impl IntoIterator<Item = NewRow<'r>>,
    ) -> Result<VersionOverlay, CacheError> {
        let (mut carried, mut found) = (CarriedRows::default(), Vec::with_capacity(COPIED_AT_ONCE));
        let done = changed.into_iter().try_for_each(|changed| {
            let own = self.changed_key(changed)?;
            let table = changed.row.table();
            let Some(location) = self.find(table, own) else { return Ok(()) };
            found.push(FoundRow { own, table, bytes: changed.bytes.filter(|_| !location.is_pointer()) });
            if found.len() == COPIED_AT_ONCE {
                self.carry(&mut found, &mut carried);
            }
            Ok(())
        });
        self.carry(&mut found, &mut carried);
        let put_back =
            |(_, slot): (_, Option<Slot>)| slot.into_iter().for_each(|slot| self.pool.put_back(slot));
        if let Err(error) = done {
            carried.into_values().for_each(put_back);
            return Err(error);
        }
        let changed = |(table, slot): (_, Option<Slot>)| {
            let location = slot.map(|slot| slot.location());
            Changed { table, location }
        };
        Ok(VersionOverlay { rows: carried.into_map(changed, put_back, pace::rest) })
    }

    /// Copies some rows into new slots.
    fn carry(&self, found: &mut Vec<FoundRow<'_>>, carried: &mut CarriedRows) {
        let copied = found.iter().filter(|row| row.bytes.is_some());
        let mut slots = self.take_each(copied.map(|row| self.classes[row.table.index()])).into_iter();
        for FoundRow { own, table, bytes } in found.drain(..) {
            let slot = bytes.and_then(|bytes| {
                let mut slot = slots.next()??;
                self.fill(&mut slot, table, own, bytes);
                Some(slot)
            });
            carried.push(own, (table, slot));
        }
    }

    /// Where a row is; `None` if it is not cached.
    fn find(&self, table: TableId, own: FlatKey) -> Option<Location> {
        let (_, key) = self.keys.row(table, own);
        let is_row =
            |pinned: PinnedLocation<'_>| pinned.location().is_pointer() || self.is_row(table, own, pinned);
        self.index.look(key, |pinned| is_row(pinned).then(|| pinned.location()))?
    }

    /// Merges the overlay into the index. Returns the slots of rows that found no room in the index.
    fn merge(&self, overlay: &VersionOverlay) -> Vec<Unlinked> {
        let now = Stamp::of(self.epochs.tag());
        let mut unplaced = Vec::new();
        let key_of = |(&own, changed): (&FlatKey, &Changed)| self.keys.row(changed.table, own).1;
        let mut ahead = overlay.rows.iter().skip(BUCKETS_AHEAD).map(key_of);
        for (&own, &Changed { table, location }) in pace::rested(overlay.rows.iter()) {
            ahead.next().into_iter().for_each(|key| self.index.prefetch(key));
            let (_, key) = self.keys.row(table, own);
            let Some(location) = location else {
                if let Some(stale) = self.index.remove(key, |pinned| self.is_row(table, own, pinned)) {
                    self.retire(stale);
                }
                continue;
            };
            if self.link(table, Entry { key, location, now }, None, |_| false) != Insertion::Stored {
                self.count_rejected();
                unplaced.push(Unlinked::withdrawn(key, location));
            }
        }
        unplaced
    }
}

#[cfg(test)]
#[cfg(flechette_loom)]
mod models;
