//! The unified index (FLECHE section 3.3): it also has pointers, which are entries that refer to a row in
//! host memory instead of a slot of the pool.
//!
//! A pointer takes an index entry and no slot. The evictor makes pointers: while fewer than allowed exist, a
//! victim gives up its slot and stays in the index as a pointer. A pointer stores only the row's id. A batch
//! reads that row from the store of its own version. So a pointer is valid for all versions.
//!
//! Pointers are made only to rows that the store holds in memory. The owner of that memory keeps a
//! [`HostRows`]. Dropping it removes all pointers to the table and waits for the batches that may have found
//! one.
//!
//! [`super::tuner`] finds a good number of pointers by trial, from the throughput that batches report.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::index::{EntryDecision, Location, PinnedLocation, Stamp};
use super::shared::Shared;
use super::tuner::Tuner;
use crate::sync::EvenPoisoned;
use crate::types::{FlatKey, TableId};

/// In this many steps the tuner grows the capacity from 0 to its limit.
const STEPS: u64 = 16;
/// Ids looked up between two measurements.
const WINDOW: u64 = 1 << 20;

/// Counts and limits of the pointers.
#[derive(Debug)]
pub(crate) struct Pointers {
    /// By table: the number of [`HostRows`]. There may be several, since a new version's store may be opened
    /// before the old one is closed.
    tables: Box<[AtomicU64]>,
    count: AtomicU64,
    capacity: AtomicU64,
    /// Whether the tuner has requested the removal of all pointers.
    clear: AtomicBool,
    /// Ids and nanoseconds since the last measurement.
    ids: AtomicU64,
    nanos: AtomicU64,
    tuner: Mutex<Tuner>,
}

impl Pointers {
    pub(crate) fn new(tables: usize, limit: u64) -> Self {
        Self {
            tables: (0..tables).map(|_| AtomicU64::new(0)).collect(),
            count: AtomicU64::new(0),
            capacity: AtomicU64::new(0),
            clear: AtomicBool::new(false),
            ids: AtomicU64::new(0),
            nanos: AtomicU64::new(0),
            tuner: Mutex::new(Tuner::new(limit, STEPS)),
        }
    }

    /// The number of pointers.
    pub(crate) fn count(&self) -> u64 {
        // On a device, the removal of a pointer may be counted before its creation, so the count may be
        // negative for a moment.
        (self.count.load(Ordering::Relaxed) as i64).max(0) as u64
    }

    pub(crate) fn removed(&self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn made(&self, more: u64) {
        self.count.fetch_add(more, Ordering::Relaxed);
    }

    /// How many more pointers may be made.
    pub(crate) fn room(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed).saturating_sub(self.count())
    }

    /// Sets how many pointers there may be, until the tuner changes it.
    pub(crate) fn allow(&self, capacity: u64) {
        self.capacity.store(capacity, Ordering::Relaxed);
    }

    /// Whether the tuner has requested the removal of all pointers since the last call.
    pub(crate) fn take_clear_request(&self) -> bool {
        self.clear.swap(false, Ordering::Relaxed)
    }

    /// Records how long a batch took to look up `ids` ids. After enough ids, steps the tuner. Returns whether
    /// the tuner requests the removal of all pointers.
    pub(crate) fn observe(&self, ids: u64, elapsed: Duration) -> bool {
        let nanos = self.nanos.fetch_add(elapsed.as_nanos() as u64, Ordering::Relaxed);
        if self.ids.fetch_add(ids, Ordering::Relaxed) + ids < WINDOW {
            return false;
        }
        // Another thread takes this measurement now.
        let Ok(mut tuner) = self.tuner.try_lock() else { return false };
        let nanos = nanos + elapsed.as_nanos() as u64;
        let ids = self.ids.swap(0, Ordering::Relaxed);
        self.nanos.store(0, Ordering::Relaxed);
        let advice = tuner.step(ids as f64 / (nanos as f64 * 1e-9));
        self.allow(advice.capacity);
        if advice.clear {
            self.clear.store(true, Ordering::Relaxed);
        }
        advice.clear
    }

    #[cfg(test)]
    #[cfg(not(flechette_loom))]
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// Reserves one more pointer into this table, if allowed.
    fn reserve(&self, table: TableId) -> bool {
        let allowed = self.tables[table.index()].load(Ordering::Relaxed) > 0 && self.room() > 0;
        if allowed {
            self.made(1);
        }
        allowed
    }
}

impl Shared {
    /// Decides whether a victim is unlinked or becomes a pointer. The caller holds the locks of the bucket
    /// and of the sweep.
    pub(crate) fn decide_on_victim(&self, key: FlatKey, pinned: PinnedLocation<'_>) -> EntryDecision {
        let table = self.keys.index_keys().table_of(key);
        // `id` returns `None` for a key that several rows share: such a key does not identify the pointer's
        // row.
        let id = table.and_then(|table| Some((table, self.keys.index_keys().code(table)?.id(key)?)));
        match id {
            Some((table, id)) if !pinned.location().is_pointer() && self.pointers.reserve(table) => {
                EntryDecision::Relink(Location::pointer(id))
            }
            _ => EntryDecision::Unlink,
        }
    }

    /// Unlinks all pointers if the tuner has requested it. The caller holds the sweep's lock.
    pub(crate) fn clear_pointers_if_requested(&self) {
        if self.pointers.take_clear_request() {
            self.unlink_pointers(|_| true);
        }
    }

    /// Unlinks the pointers into the chosen tables.
    fn withdraw(&self, table: impl Fn(TableId) -> bool) {
        // Pointers are made only under the sweep's lock, so none is made meanwhile.
        let _sweep = self.sweep.lock().even_poisoned();
        self.unlink_pointers(table);
    }

    fn unlink_pointers(&self, table: impl Fn(TableId) -> bool) {
        let now = Stamp::of(self.epochs.tag());
        for bucket in 0..self.index.buckets() {
            let decide = |key, pinned: PinnedLocation<'_>, _| {
                let of_table = self.keys.index_keys().table_of(key).is_some_and(&table);
                if pinned.location().is_pointer() && of_table {
                    EntryDecision::Unlink
                } else {
                    EntryDecision::Keep
                }
            };
            self.index.visit_bucket(bucket, now, decide, |unlinked| self.retire(unlinked));
        }
    }
}

/// Allows pointers to the rows of a table. The store keeps these rows in memory until this is dropped.
#[derive(Debug)]
pub struct HostRows {
    shared: Arc<Shared>,
    table: TableId,
}

impl HostRows {
    pub(crate) fn new(shared: Arc<Shared>, table: TableId) -> Self {
        shared.pointers.tables[table.index()].fetch_add(1, Ordering::Relaxed);
        Self { shared, table }
    }
}

impl Drop for HostRows {
    /// Removes the pointers and waits for all batches that began before. A thread that has a pin must not
    /// drop a `HostRows`, because it would wait for itself.
    fn drop(&mut self) {
        let Self { shared, table } = self;
        // Decremented before the sweep's lock is taken: pointers are made under that lock, and only after
        // this count was read.
        shared.pointers.tables[table.index()].fetch_sub(1, Ordering::Relaxed);
        shared.withdraw(|t| t == *table);
        shared.epochs.wait_for_earlier();
    }
}
