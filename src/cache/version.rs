//! Switching versions: all changed rows switch together, between two batches.
//!
//! Flat keys have no version, so the caller of a switch passes the rows that changed. First, the new bytes of
//! cached rows are copied into new slots. Then the new version becomes current together with an *overlay*: a
//! map from every changed row to the location of its new bytes, or to `None` if the row is not cached. A
//! batch of the new version looks into the overlay before the index. A batch of an old version looks only
//! into the index, finds the old rows there, and may still insert old rows. When the last of these batches
//! has finished, no batch needs the old rows: the overlay is merged into the index and removed.
//!
//! **Why no batch finds an old row of a changed id.** A batch takes its number, then reads the current
//! version. The switch makes the version current, then takes a tag. By the argument of [`super::epoch`], a
//! batch with a number above the tag sees the new version and so the overlay. The switch waits for all other
//! batches. So while the overlay exists, batches of the new version read changed rows through it and ignore
//! the index's entries for changed rows. When the overlay is merged, no batch is left that could insert an
//! old row.
//!
//! **Why no slot is freed too early.** While the overlay exists, a batch may find a slot there that the index
//! has evicted. So [`super::epoch::RetireList`] frees nothing during that time, and all slots in it get a new
//! tag when the overlay is removed.
//!
//! **If the changed rows are not known** ([`Shared::switch_unlisted`]), the cached rows are listed and
//! compared. A row that is inserted after the listing would be missing there, and later batches would find
//! old bytes. So the switch first stops the admission of rows, and then waits for the batches that may not
//! have seen this. From then on rows only leave the cache. Admission resumes when no batch of the old version
//! is left.
//!
//! An overlay takes up to 76 bytes per changed row in addition to `cache.bytes`, and up to 57 more per cached
//! changed row while it is built (`tests/it/cache_memory.rs`).

use std::collections::hash_map;
use std::sync::{Arc, PoisonError};

use super::error::CacheError;
use super::index::{Entry, Held, Location, Stamp, Unlinked};
use super::shared::{Insertion, Shared};
use super::slab::Slot;
use crate::mem::NumberMap;
use crate::types::{FlatKey, TableId, Version};

/// The result of a version switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Switched {
    /// Rows that changed.
    pub changed: u64,
    /// Changed rows that were cached and whose new bytes are cached.
    pub carried: u64,
}

/// A row that differs between the current version and the next one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewRow<'r> {
    pub table: TableId,
    pub id: u64,
    /// The bytes in the next version. `None`: if the row is cached, it is dropped.
    pub row: Option<&'r [u8]>,
}

impl<'r> From<(TableId, u64, &'r [u8])> for NewRow<'r> {
    fn from((table, id, row): (TableId, u64, &'r [u8])) -> Self {
        Self { table, id, row: Some(row) }
    }
}

/// The version that new batches use.
#[derive(Debug)]
pub(crate) struct Current {
    pub version: Version,
    overlay: Option<Arc<Overlay>>,
}

impl Current {
    pub(crate) fn new(version: Version) -> Self {
        Self { version, overlay: None }
    }

    /// The overlay that a batch of this version reads before the index, if there is one.
    #[inline]
    pub(crate) fn overlay(&self, version: Version) -> Option<&Overlay> {
        self.overlay.as_deref().filter(|_| self.version == version)
    }
}

/// The locations of the changed rows of a version.
#[derive(Debug, Default)]
pub(crate) struct Overlay {
    /// Every changed row by its own key, which no other row has, unlike an index key ([`super::key`]).
    pub rows: ByKey<Changed>,
}

/// A hash map by flat key.
pub(crate) type ByKey<T> = NumberMap<FlatKey, T>;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Changed {
    pub table: TableId,
    /// `None` if the row is not cached.
    pub location: Option<Location>,
}

impl Overlay {
    /// `Some(Some(location))` for a changed row that is cached, `Some(None)` for a changed row that is not
    /// cached, `None` for all other rows.
    #[inline]
    pub(crate) fn get(&self, own: FlatKey) -> Option<Option<Location>> {
        self.rows.get(&own).map(|changed| changed.location)
    }

    /// The result of the switch that made this overlay.
    pub(crate) fn switched(&self) -> Switched {
        let carried = self.rows.values().filter(|row| row.location.is_some()).count() as u64;
        Switched { changed: self.rows.len() as u64, carried }
    }
}

impl Shared {
    /// As [`FlatCache::switch`](super::FlatCache::switch).
    pub(crate) fn switch<'r, N: Into<NewRow<'r>>>(
        &self,
        version: Version,
        changed: impl IntoIterator<Item = N>,
    ) -> Result<Switched, CacheError> {
        let _one_at_a_time = self.switching.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_newer(version)?;
        self.switch_to(version, changed)
    }

    /// As [`FlatCache::switch_unlisted`](super::FlatCache::switch_unlisted).
    pub(crate) fn switch_unlisted<'r>(
        &self,
        version: Version,
        changed: impl FnOnce(Vec<(TableId, u64)>) -> Vec<NewRow<'r>>,
    ) -> Result<Switched, CacheError> {
        let _one_at_a_time = self.switching.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_newer(version)?;
        let _paused = self.pause_admission();
        self.epochs.wait_for_earlier();
        self.switch_to(version, changed(self.hot_rows()))
    }

    fn check_newer(&self, version: Version) -> Result<(), CacheError> {
        let current = self.current.read().version;
        if version > current { Ok(()) } else { Err(CacheError::Version { got: version, current }) }
    }

    /// The caller holds the lock of a switch.
    fn switch_to<'r, N: Into<NewRow<'r>>>(
        &self,
        version: Version,
        changed: impl IntoIterator<Item = N>,
    ) -> Result<Switched, CacheError> {
        let overlay = Arc::new(self.overlay(changed)?);
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
    fn overlay<'r, N: Into<NewRow<'r>>>(
        &self,
        changed: impl IntoIterator<Item = N>,
    ) -> Result<Overlay, CacheError> {
        let mut slots: ByKey<Slot> = ByKey::default();
        let (mut overlay, mut changed) = (Overlay::default(), changed.into_iter());
        // Reserved at once: growing the map would take half as much memory again.
        overlay.rows.reserve(changed.size_hint().0);
        let done = changed.try_for_each(|changed| {
            let NewRow { table, id, row } = changed.into();
            let own = self.changed_key(table, id, row)?;
            overlay.rows.insert(own, Changed { table, location: None });
            let Some(row) = row else { return Ok(()) };
            // A row that occurs twice is written twice to the same slot, which no batch has seen yet.
            let slot = match slots.entry(own) {
                hash_map::Entry::Occupied(slot) => Some(slot.into_mut()),
                hash_map::Entry::Vacant(none) => self.slot_for_held(table, own).map(|slot| none.insert(slot)),
            };
            if let Some(slot) = slot {
                self.fill(slot, table, own, row);
            }
            Ok(())
        });
        if let Err(error) = done {
            slots.into_values().for_each(|slot| self.pool.put_back(slot));
            return Err(error);
        }
        for (own, slot) in slots {
            if let Some(changed) = overlay.rows.get_mut(&own) {
                changed.location = Some(slot.location());
            }
        }
        Ok(overlay)
    }

    /// A slot for the new bytes of a row whose old bytes are in the pool, if there is room.
    fn slot_for_held(&self, table: TableId, own: FlatKey) -> Option<Slot> {
        let (_, key) = self.keys.row(table, own);
        let in_pool = |held: Held<'_>| !held.location().is_host() && self.is_row(table, own, held);
        self.index.contains(key, in_pool).then(|| self.take(self.classes[table.index()]))?
    }

    /// Merges the overlay into the index. Returns the slots of rows that found no room in the index.
    fn merge(&self, overlay: &Overlay) -> Vec<Unlinked> {
        let now = Stamp::of(self.epochs.tag());
        let mut unplaced = Vec::new();
        for (&own, &Changed { table, location }) in &overlay.rows {
            let (_, key) = self.keys.row(table, own);
            let Some(location) = location else {
                if let Some(stale) = self.index.remove(key, |held| self.is_row(table, own, held)) {
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
