//! The unified index (FLECHE 3.3): entries that point at a row in host memory instead of a slot.
//!
//! A pointer takes an entry of the index and no slot. It is made by the evictor: where there may be more
//! pointers, a cold row gives up its slot and stays in the index as a pointer. It says which row of its
//! table it is; where the table lies, whoever reads it knows of the batch's version. So a pointer is as good
//! for one version as for the next.
//!
//! Only rows that the store holds in RAM may be pointed at: their owner keeps a [`HostRows`] for as long.
//! Dropping it withdraws all pointers to the table and waits for the batches that may have found one.
//!
//! How many there may be, [`super::tuner`] finds by trying, from the throughput that batches report.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::index::{Fate, Held, Location, Stamp};
use super::shared::Shared;
use super::tuner::Tuner;
use crate::types::{FlatKey, TableId};

/// Steps in which the tuner goes up to its limit.
const STEPS: u64 = 16;
/// Ids looked up between two measurements.
const WINDOW: u64 = 1 << 20;

/// What the cache knows of its pointers.
#[derive(Debug)]
pub(crate) struct Pointers {
    /// By table: how many say that its rows may be pointed at. A new version's store may come before the old
    /// one's goes.
    tables: Box<[AtomicU64]>,
    count: AtomicU64,
    capacity: AtomicU64,
    /// Whether all are to go.
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

    /// How many there are.
    pub(crate) fn count(&self) -> u64 {
        // On a device a pointer may be seen to go before it was seen to come: below none for a moment.
        (self.count.load(Ordering::Relaxed) as i64).max(0) as u64
    }

    /// Counts one out.
    pub(crate) fn removed(&self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts so many in.
    pub(crate) fn made(&self, more: u64) {
        self.count.fetch_add(more, Ordering::Relaxed);
    }

    /// How many more there may be.
    pub(crate) fn room(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed).saturating_sub(self.count())
    }

    /// Sets how many there may be, whatever the tuner would say.
    pub(crate) fn allow(&self, capacity: u64) {
        self.capacity.store(capacity, Ordering::Relaxed);
    }

    /// Whether the tuner has said that all are to go, since the last time this was asked.
    pub(crate) fn told_to_clear(&self) -> bool {
        self.clear.swap(false, Ordering::Relaxed)
    }

    /// Takes note of how long a batch took to look up so many ids, and now and then has the tuner decide. Returns
    /// whether it said that all are to go.
    pub(crate) fn observe(&self, ids: u64, elapsed: Duration) -> bool {
        let nanos = self.nanos.fetch_add(elapsed.as_nanos() as u64, Ordering::Relaxed);
        if self.ids.fetch_add(ids, Ordering::Relaxed) + ids < WINDOW {
            return false;
        }
        // Whoever measures now measures for those who come meanwhile.
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

    /// Takes room for one more pointer into this table, if there is any.
    fn added(&self, table: TableId) -> bool {
        let may = self.tables[table.index()].load(Ordering::Relaxed) > 0 && self.room() > 0;
        if may {
            self.made(1);
        }
        may
    }
}

impl Shared {
    /// What becomes of an entry that is to be put out of the pool: under the bucket's lock and the sweep's.
    pub(crate) fn put_out(&self, key: FlatKey, held: Held<'_>) -> Fate {
        let table = self.keys.index_keys().table_of(key);
        // Of a key that several rows share, a pointer could not say whose it is.
        let id = table.and_then(|table| Some((table, self.keys.index_keys().code(table)?.id(key)?)));
        match id {
            Some((table, id)) if !held.location().is_host() && self.pointers.added(table) => {
                Fate::Move(Location::host(id))
            }
            _ => Fate::Leave,
        }
    }

    /// As [`Pointers::observe`].
    pub(crate) fn observe(&self, ids: u64, elapsed: Duration) {
        if self.pointers.observe(ids, elapsed) {
            // A sweep of the whole index is for the evicting thread, and not for a request's.
            self.wake.now();
        }
    }

    /// Unlinks all pointers if the tuner has said so. Under the sweep's lock.
    pub(crate) fn clear_pointers_if_told(&self) {
        if self.pointers.told_to_clear() {
            self.unlink_pointers(|_| true);
        }
    }

    /// Unlinks the pointers into the tables that are chosen.
    fn withdraw(&self, table: impl Fn(TableId) -> bool) {
        // The sweep's lock: nobody makes a pointer meanwhile.
        let _sweep = self.sweep.lock().unwrap_or_else(PoisonError::into_inner);
        self.unlink_pointers(table);
    }

    fn unlink_pointers(&self, table: impl Fn(TableId) -> bool) {
        let now = Stamp::of(self.epochs.tag());
        for bucket in 0..self.index.buckets() {
            let fate = |key, held: Held<'_>, _| {
                let of_table = self.keys.index_keys().table_of(key).is_some_and(&table);
                if held.location().is_host() && of_table { Fate::Leave } else { Fate::Stay }
            };
            self.index.evict(bucket, now, fate, |unlinked| self.retire(unlinked));
        }
    }
}

/// The right to point at the rows of a table, while the store holds them in RAM.
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
    /// Withdraws the pointers and waits for all batches that began before; so a thread must not drop it
    /// that has a pin itself.
    fn drop(&mut self) {
        let Self { shared, table } = self;
        // Before the sweep's lock is taken: who makes a pointer has the lock and looks here.
        shared.pointers.tables[table.index()].fetch_sub(1, Ordering::Relaxed);
        shared.withdraw(|t| t == *table);
        shared.epochs.wait_for_earlier();
    }
}
