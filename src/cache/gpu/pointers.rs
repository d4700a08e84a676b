//! The unified index on a device (FLECHE section 3.3): entries that point at a row in pinned host memory,
//! where the gather reads it.
//!
//! As on the host (`cache/pointers.rs`), a pointer takes an entry of the index but no slot. The evictor turns
//! a cold row into a pointer while more are allowed. Pointers are evicted only when the index is too full,
//! and a row that is admitted again replaces its pointer. On a device **a pointer is an address**, so it
//! belongs to one version. Pointers are made only to rows in registered memory, which has the rows of the
//! current version. A switch stops making pointers, and its merge removes the pointers to changed rows
//! (`version`). The other pointers stay valid while the old memory exists. After the switch, the caller
//! registers the new version's memory and drops the old [`GpuHostRows`].
//!
//! **Releasing memory.** `release` takes the sweep's lock, under which all pointers are made. It first stops
//! new pointers into the memory, and then sweeps the whole index to remove the existing ones. It unlocks the
//! sweep and waits for earlier batches, and for their jobs, which may copy rows from that memory into the
//! pool. Only then is the memory unregistered. After a driver error it stays registered as long as the cache
//! lives.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::CacheError;
use super::evict::Sweep;
use super::{GpuCacheError, Shared};
use crate::cache::gpu::args::Pointable;
use crate::cache::gpu::sweeper::{Stretch, Victims};
use crate::device::cuda::memory::PinnedMemory;
use crate::device::cuda::{Driver, DriverError};
use crate::mem::WORD_BYTES;
use crate::sync::EvenPoisoned;
use crate::types::{FlatKey, TableId, Version};

/// Buckets per sweep when pointers are removed.
const BUCKETS_PER_SWEEP: u32 = 1 << 20;

/// Where a row is in host memory.
pub(crate) struct RowPointer {
    /// The bits of its location.
    pub location: u64,
    /// Its length.
    pub words: usize,
}

impl<D: Driver> Shared<D> {
    /// The pointer to the row of an entry with this key. `None` if its table is not registered.
    pub(crate) fn pointer_of(&self, key: FlatKey) -> Option<RowPointer> {
        let (table, id) = self.keys.index_keys().decode(key)?;
        let words = self.pointable.lock().even_poisoned()[table.index()]?.words as usize;
        Some(RowPointer { location: self.pointer(table, id)?, words })
    }

    /// The bits of a row's location in host memory, if its table is registered.
    pub(crate) fn pointer(&self, table: TableId, id: u64) -> Option<u64> {
        let pointable = self.pointable.lock().even_poisoned()[table.index()]?;
        (id < pointable.rows).then(|| pointable.location(id))
    }

    /// Counts an entry that is a pointer.
    pub(crate) fn count_pointer(&self) {
        self.entries.fetch_add(1, Ordering::Relaxed);
        self.pointers.made(1);
    }

    pub(crate) fn host_rows(
        self: &Arc<Self>,
        version: Version,
        table: TableId,
        rows: Arc<PinnedMemory<D>>,
    ) -> Result<GpuHostRows<D>, GpuCacheError> {
        // The rows belong to the current version, which must not change meanwhile.
        let _no_switch = self.switching.lock().even_poisoned();
        let current = self.current.read().version;
        if version != current {
            return Err(CacheError::NotCurrent { got: version, current }.into());
        }
        let Some(code) = self.keys.index_keys().code(table) else {
            return Err(CacheError::Table { got: table.index(), tables: self.tables.len() }.into());
        };
        if self.keys.tagged(table) {
            return Err(GpuCacheError::SharedKeys { table: table.index() });
        }
        let row_bytes = self.tables[table.index()].row_bytes;
        let (got, expected) = (rows.bytes() as u64, code.rows().saturating_mul(row_bytes as u64));
        if got < expected {
            return Err(GpuCacheError::HostRows { table: table.index(), expected, got });
        }
        let out_of_reach = GpuCacheError::OutOfReach { table: table.index() };
        let first = self.gpu_table.register(rows).ok_or(out_of_reach)?;
        let words = (row_bytes / WORD_BYTES) as u64;
        let pointable = Pointable { base: code.base().0, rows: code.rows(), first, words };
        self.change_tables(&mut self.sweep.lock().even_poisoned(), |tables| {
            tables[table.index()] = Some(pointable)
        });
        Ok(GpuHostRows { shared: self.clone(), pointable })
    }

    /// Stops making pointers until tables are registered again.
    pub(crate) fn stop_pointing(&self) {
        self.change_tables(&mut self.sweep.lock().even_poisoned(), |tables| tables.fill(None));
    }

    fn change_tables(&self, sweep: &mut Sweep<D>, change: impl FnOnce(&mut [Option<Pointable>])) {
        let mut tables = self.pointable.lock().even_poisoned();
        change(&mut tables);
        sweep.sweeper.point_at(tables.iter().flatten().copied());
    }

    /// Unlinks all pointers if the tuner has requested it.
    pub(crate) fn clear_pointers_if_due(&self, sweep: &mut Sweep<D>) -> Result<(), DriverError> {
        if self.pointers.take_clear_request() {
            self.unlink_pointers(sweep, 0..u64::MAX)?;
        }
        Ok(())
    }

    /// Unlinks the pointers to these locations.
    fn unlink_pointers(&self, sweep: &mut Sweep<D>, locations: Range<u64>) -> Result<(), DriverError> {
        let buckets = self.gpu_table.shape().buckets;
        let mut hand = 0;
        while hand < buckets {
            let stretch = Stretch {
                hand,
                buckets: (buckets - hand).min(BUCKETS_PER_SWEEP.into()) as u32,
                most: usize::MAX,
                victims: Victims::Pointers(locations.clone()),
            };
            // If the sweep evicted fewer entries than it could, no pointer of the stretch is left.
            if !self.sweep(sweep, self.epochs.tag(), stretch)? {
                hand += u64::from(BUCKETS_PER_SWEEP);
            }
        }
        Ok(())
    }

    /// Removes the pointers into `memory`, waits for its readers, and unregisters it.
    fn release(&self, memory: &Pointable) -> Result<(), DriverError> {
        {
            let sweep = &mut *self.sweep.lock().even_poisoned();
            let is_in = |table: &Option<Pointable>| table.is_some_and(|table| table.first == memory.first);
            self.change_tables(sweep, |tables| {
                tables.iter_mut().filter(|t| is_in(t)).for_each(|t| *t = None)
            });
            self.unlink_pointers(sweep, memory.first..memory.location(memory.rows))?;
        }
        self.wait_for_earlier()?;
        self.settle()?;
        self.gpu_table.unregister(memory.first);
        Ok(())
    }
}

/// Registers a table's rows in pinned host memory, so that the cache may point at them.
pub(crate) struct GpuHostRows<D: Driver> {
    shared: Arc<Shared<D>>,
    pointable: Pointable,
}

impl<D: Driver> Drop for GpuHostRows<D> {
    /// Removes the pointers and waits for the device and for all earlier batches. A thread that runs a batch
    /// must not drop a `GpuHostRows`, because it would wait for itself.
    fn drop(&mut self) {
        if let Err(error) = self.shared.release(&self.pointable) {
            tracing::error!(%error, "releasing host rows failed: they stay registered");
        }
    }
}
