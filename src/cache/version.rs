//! Switching versions: from one batch to the next, all changed rows at once.
//!
//! Flat keys carry no version, so a switch brings the rows that changed. Those that the cache holds are
//! copied into slots of their own first; then the new version is made current together with an *overlay*
//! that says of every changed row where its new bytes are, or that the cache has none. A batch of the new
//! version looks there before it looks into the index. A batch of an old version looks into the index
//! alone, where it finds the old rows, and may still insert some. When the last of these batches has finished,
//! nobody wants the old rows: the overlay is merged into the index and withdrawn.
//!
//! **Why there is no stale hit.** A batch takes its number, then reads which version is current. The
//! switcher makes the version current, then takes a tag. By the argument of [`super::epoch`] a batch whose
//! number is past the tag sees the new version, hence the overlay; the others are waited for. So while
//! the overlay stands, who wants new rows asks it first, and what the index says of a changed row does not
//! matter; and while it is merged, nobody is left who would insert an old row.
//!
//! **Why no slot is freed too early.** While the overlay stands, a slot may be found there although the index has
//! evicted it. So [`super::epoch::RetireList`] is held for as long, and all that waits in it is tagged anew when
//! the overlay is gone.
//!
//! An overlay takes up to 76 bytes a changed row, beside `cache.bytes`, for as long as it stands, and while it is made up
//! to 57 more for each of them that the cache holds (`tests/it/cache_memory.rs`).

use std::collections::HashMap;
use std::collections::hash_map;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, PoisonError};

use super::error::CacheError;
use super::index::{Entry, Held, Location, Stamp, Unlinked};
use super::shared::{Insertion, Shared};
use super::slab::Slot;
use crate::mem::mix64;
use crate::types::{FlatKey, TableId, Version};

/// What a switch did with the changed rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Switched {
    /// How many rows had changed.
    pub changed: u64,
    /// How many of them the cache held and holds anew.
    pub carried: u64,
}

/// The version that batches are of which begin now.
#[derive(Debug)]
pub(crate) struct Current {
    pub version: Version,
    overlay: Option<Arc<Overlay>>,
}

impl Current {
    pub(crate) fn new(version: Version) -> Self {
        Self { version, overlay: None }
    }

    /// What a batch of this version asks before the index.
    #[inline]
    pub(crate) fn overlay(&self, version: Version) -> Option<&Overlay> {
        self.overlay.as_deref().filter(|_| self.version == version)
    }
}

/// Where the changed rows of a version are.
#[derive(Debug, Default)]
pub(crate) struct Overlay {
    /// By the rows' own keys.
    pub rows: ByKey<Changed>,
}

/// What is kept by flat keys.
pub(crate) type ByKey<T> = HashMap<FlatKey, T, BuildHasherDefault<Scattering>>;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Changed {
    pub table: TableId,
    /// None where the cache has not the row.
    pub location: Option<Location>,
}

impl Overlay {
    /// Of a changed row, where it is, or that the cache has it not; of any other, nothing.
    #[inline]
    pub(crate) fn get(&self, own: FlatKey) -> Option<Option<Location>> {
        self.rows.get(&own).map(|changed| changed.location)
    }

    /// What a switch by this overlay did.
    pub(crate) fn switched(&self) -> Switched {
        let carried = self.rows.values().filter(|row| row.location.is_some()).count() as u64;
        Switched { changed: self.rows.len() as u64, carried }
    }
}

/// Hashes flat keys, which are dense.
#[derive(Debug, Default)]
pub(crate) struct Scattering(u64);

impl Hasher for Scattering {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = mix64(self.0 ^ number);
    }
}

impl Shared {
    /// Makes a version current. Waits for the batches of the one before.
    pub(crate) fn switch<'r>(
        &self,
        version: Version,
        changed: impl IntoIterator<Item = (TableId, u64, &'r [u8])>,
    ) -> Result<Switched, CacheError> {
        let _one_at_a_time = self.switching.lock().unwrap_or_else(PoisonError::into_inner);
        let current = self.current.read().version;
        if version <= current {
            return Err(CacheError::Version { got: version, current });
        }
        let overlay = Arc::new(self.overlay(changed)?);
        self.limbo.hold();
        self.current.replace(Current { version, overlay: Some(overlay.clone()) });
        self.epochs.wait_for_earlier();
        let homeless = self.merge(&overlay);
        self.current.replace(Current { version, overlay: None });
        homeless.into_iter().for_each(|slot| self.limbo.put(slot, &self.epochs));
        self.limbo.release(&self.epochs);
        self.wake.now();
        Ok(overlay.switched())
    }

    /// Copies in the changed rows that the cache holds, as far as there is room.
    fn overlay<'r>(
        &self,
        changed: impl IntoIterator<Item = (TableId, u64, &'r [u8])>,
    ) -> Result<Overlay, CacheError> {
        let mut slots: ByKey<Slot> = HashMap::default();
        let (mut overlay, mut changed) = (Overlay::default(), changed.into_iter());
        // Growing would take half as much again.
        overlay.rows.reserve(changed.size_hint().0);
        let done = changed.try_for_each(|(table, id, row)| {
            let own = self.own_key(table, id, row.len())?;
            overlay.rows.insert(own, Changed { table, location: None });
            // A row that comes twice is written twice, to the same slot: nobody has seen it yet.
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

    /// A slot for the new bytes of a row whose old ones are in the pool, if there is room.
    fn slot_for_held(&self, table: TableId, own: FlatKey) -> Option<Slot> {
        let (_, key) = self.keys.row(table, own);
        let in_pool = |held: Held<'_>| !held.location().is_host() && self.is_row(table, own, held);
        self.index.contains(key, in_pool).then(|| self.take(self.classes[table.index()]))?
    }

    /// Brings the index to what the overlay says. Returns the slots that found no place there.
    fn merge(&self, overlay: &Overlay) -> Vec<Unlinked> {
        let now = Stamp::of(self.epochs.tag());
        let mut homeless = Vec::new();
        for (&own, &Changed { table, location }) in &overlay.rows {
            let (_, key) = self.keys.row(table, own);
            let Some(location) = location else {
                if let Some(stale) = self.index.remove(key, |held| self.is_row(table, own, held)) {
                    self.retire(stale);
                }
                continue;
            };
            if self.link(table, Entry { key, location, now }, None, |_| false) != Insertion::Stored {
                self.turned_away();
                homeless.push(Unlinked::withdrawn(key, location));
            }
        }
        homeless
    }
}

#[cfg(test)]
#[cfg(flechette_loom)]
mod models;
