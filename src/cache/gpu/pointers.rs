//! The unified index on a device (FLECHE 3.3): entries that point at a row in pinned memory of the host, which the
//! gather reads there.
//!
//! As on the host (`cache/pointers.rs`) a pointer takes an entry of the index and no slot, is made by the evictor of
//! a cold row while there may be more, goes for the index's sake only, and gives way to the row itself once that is
//! admitted again. What differs: **a pointer is an address**, and so of one version. It is made where the table's
//! rows lie in the version that is current. A switch stops that at once; merging its overlay takes the pointers to
//! changed rows out (`version`); and those to rows that have not changed are as good as before, for as long as the
//! old memory is there. Whoever switches then gives the new version's memory, and drops what it got for the old one.
//!
//! **Giving memory up.** No pointer into it is made any more, since that is the sweep's, whose lock we take to stop it;
//! then all that there are go, in a sweep of the whole index; then we wait for the batches that began before,
//! and for the jobs that they have left, which copy rows out of that memory into the pool. Only then is it given
//! up. Where the driver fails on the way it stays registered as long as the cache lives.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::super::CacheError;
use super::super::key::RowKeys;
use super::super::pointers::Pointers;
use super::super::slots::UNIT;
use super::evict::Sweep;
use super::{DeviceCacheError, Shared, lock};
use crate::cache::gpu::args::Pointable;
use crate::cache::gpu::sweeper::{Stretch, Victims};
use crate::device::cuda::memory::PinnedMemory;
use crate::device::cuda::{Driver, DriverError};
use crate::types::{FlatKey, TableId, Version};

/// Buckets of one look for pointers.
const STRETCH: u32 = 1 << 20;

/// What the cache knows of its pointers.
pub(crate) struct Pointing {
    /// How many there are, and may be.
    pub count: Pointers,
    /// By table: where rows lie that may be pointed at.
    tables: Mutex<Vec<Option<Pointable>>>,
}

impl Pointing {
    pub(crate) fn new(tables: usize, limit: u64) -> Self {
        Self { count: Pointers::new(0, limit), tables: Mutex::new(vec![None; tables]) }
    }

    /// Where the row of an entry lies in memory of the host, if its table may be pointed at: bits of a location, and
    /// its words.
    pub(crate) fn of_entry(&self, keys: &RowKeys, key: FlatKey) -> Option<(u64, usize)> {
        let (table, id) = keys.index_keys().decode(key)?;
        let words = lock(&self.tables)[table.index()]?.words as usize;
        Some((self.location(table, id)?, words))
    }

    /// Where a row lies in memory of the host, if its table may be pointed at: bits of a location.
    pub(crate) fn location(&self, table: TableId, id: u64) -> Option<u64> {
        let pointable = lock(&self.tables)[table.index()]?;
        (id < pointable.rows).then(|| pointable.location(id))
    }
}

impl<D: Driver> Shared<D> {
    pub(crate) fn host_rows(
        self: &Arc<Self>,
        version: Version,
        table: TableId,
        rows: Arc<PinnedMemory<D>>,
    ) -> Result<DeviceHostRows<D>, DeviceCacheError> {
        // What is current, and so whose rows these are, stays as it is meanwhile.
        let _no_switch = lock(&self.switching);
        let current = self.current.read().version;
        if version != current {
            return Err(CacheError::NotCurrent { got: version, current }.into());
        }
        let Some(code) = self.keys.index_keys().code(table) else {
            return Err(CacheError::Table { got: table.index(), tables: self.tables.len() }.into());
        };
        if self.keys.tagged(table) {
            return Err(DeviceCacheError::Tagged { table: table.index() });
        }
        let row_bytes = self.tables[table.index()].row_bytes;
        let (got, expected) = (rows.bytes() as u64, code.rows().saturating_mul(row_bytes as u64));
        if got < expected {
            return Err(DeviceCacheError::HostRows { table: table.index(), expected, got });
        }
        let out_of_reach = DeviceCacheError::OutOfReach { table: table.index() };
        let first = self.tier.register(rows).ok_or(out_of_reach)?;
        let words = (row_bytes / UNIT) as u64;
        let pointable = Pointable { base: code.base().0, rows: code.rows(), first, words };
        self.change_tables(&mut lock(&self.sweep), |tables| tables[table.index()] = Some(pointable));
        Ok(DeviceHostRows { shared: self.clone(), pointable })
    }

    /// Makes no more pointers, until memory of the host is given anew.
    pub(crate) fn stop_pointing(&self) {
        self.change_tables(&mut lock(&self.sweep), |tables| tables.fill(None));
    }

    fn change_tables(&self, sweep: &mut Sweep<D>, change: impl FnOnce(&mut [Option<Pointable>])) {
        let mut tables = lock(&self.pointing.tables);
        change(&mut tables);
        sweep.sweeper.point_at(tables.iter().flatten().copied());
    }

    /// As [`Pointers::observe`].
    pub(crate) fn observe(&self, ids: u64, elapsed: Duration) {
        if self.pointing.count.observe(ids, elapsed) {
            // A sweep of the whole index is for the evicting thread, and not for a request's.
            self.wake.now();
        }
    }

    /// Unlinks all pointers if the tuner has said so.
    pub(crate) fn clear_pointers_if_told(&self, sweep: &mut Sweep<D>) -> Result<(), DriverError> {
        if self.pointing.count.take_clear_request() {
            self.unlink_pointers(sweep, (0, u64::MAX))?;
        }
        Ok(())
    }

    /// Unlinks the pointers to locations from the first and below the second.
    fn unlink_pointers(&self, sweep: &mut Sweep<D>, (from, to): (u64, u64)) -> Result<(), DriverError> {
        let buckets = self.tier.shape().buckets;
        let mut hand = 0;
        while hand < buckets {
            let stretch = Stretch {
                hand,
                buckets: (buckets - hand).min(STRETCH.into()) as u32,
                most: usize::MAX,
                victims: Victims::Pointers(from, to),
            };
            // A sweep that finds fewer than it has room for has found all.
            if !self.sweep(sweep, self.epochs.tag(), stretch)? {
                hand += u64::from(STRETCH);
            }
        }
        Ok(())
    }

    /// Withdraws the pointers into some memory, waits for whoever may read it, and gives it up.
    fn give_up(&self, memory: &Pointable) -> Result<(), DriverError> {
        {
            let sweep = &mut *lock(&self.sweep);
            let is_it = |table: &Option<Pointable>| table.is_some_and(|table| table.first == memory.first);
            self.change_tables(sweep, |tables| {
                tables.iter_mut().filter(|t| is_it(t)).for_each(|t| *t = None)
            });
            self.unlink_pointers(sweep, (memory.first, memory.location(memory.rows)))?;
        }
        self.wait_for_earlier()?;
        self.settle()?;
        self.tier.unregister(memory.first);
        Ok(())
    }
}

/// The right to point at the rows of a table, while they lie in pinned memory of the host.
pub struct DeviceHostRows<D: Driver> {
    shared: Arc<Shared<D>>,
    pointable: Pointable,
}

impl<D: Driver> Drop for DeviceHostRows<D> {
    /// Withdraws the pointers and waits for the device, and for all batches that began before.
    fn drop(&mut self) {
        if let Err(error) = self.shared.give_up(&self.pointable) {
            tracing::error!(%error, "rows of the host stay registered, since a batch may still read them");
        }
    }
}
