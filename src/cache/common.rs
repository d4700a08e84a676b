//! State that the caches on the host and on a device have in common: keys, policies, counts and retired
//! slots.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use super::epoch::{Epochs, RetireList};
use super::error::CacheError;
use super::evictor::Wake;
use super::index::{self, Unlinked};
use super::key::RowKeys;
use super::pointers::Pointers;
use super::policy::{Admission, Eviction, Fill, Level, Missed, Watermarks};
use super::shape::{CacheShape, Layout, TableShape};
use super::slabs::Class;
use super::stats::{CacheStats, Counts, TableCounts};
use super::version::NewRow;
use super::{CacheOptions, admission, check, eviction};
use crate::sync::{AtomicBool, Ordering};
use crate::types::{FlatKey, RowId, TableId};

/// The common part of a cache's state.
#[derive(Debug)]
pub(crate) struct Common {
    pub keys: RowKeys,
    pub tables: Vec<TableShape>,
    /// By table: the class of its slots, which include the tag.
    pub classes: Vec<Class>,
    pub layout: Layout,
    pub epochs: Arc<Epochs>,
    pub admission: Admission,
    pub eviction: Eviction,
    pub watermarks: Watermarks,
    pub switch_wait: Duration,
    pub pointers: Pointers,
    pub retired: RetireList,
    pub wake: Arc<Wake>,
    /// The class of a row that found no slot, plus one; 0 for no class. Eviction then empties some slabs, so
    /// that they can change their row size.
    pub starved: AtomicU64,
    pub counts: Counts,
    /// Whether a version switch has stopped the admission of rows.
    paused: AtomicBool,
}

/// Stops the admission of rows until it is dropped.
pub(crate) struct PausedAdmission<'c>(&'c AtomicBool);

impl Drop for PausedAdmission<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Common {
    /// # Errors
    /// When the bytes do not hold a row of each size, the tables' ids do not fit 64 bits, or an option is out
    /// of range.
    pub(crate) fn new(shape: &CacheShape, options: &CacheOptions) -> Result<Self, CacheError> {
        check(options)?;
        let rows: Vec<u64> = shape.tables.iter().map(|t| t.rows).collect();
        let keys = RowKeys::new(&rows, options.key_width)?;
        let plan = shape.plan(&keys, options)?;
        let class = |t: &TableShape| plan.layout.slabs.class(t.row_bytes);
        Ok(Self {
            classes: plan.tagged_tables.iter().filter_map(class).collect(),
            tables: shape.tables.clone(),
            layout: plan.layout,
            epochs: Arc::default(),
            admission: admission(options, plan.sketch_bytes),
            eviction: eviction(options, &keys, plan.ranked),
            keys,
            watermarks: options.watermarks,
            switch_wait: options.switch_wait,
            pointers: Pointers::new(shape.tables.len(), options.pointers),
            retired: RetireList::default(),
            wake: Arc::default(),
            starved: AtomicU64::new(0),
            counts: Counts {
                tables: shape.tables.iter().map(|_| TableCounts::default()).collect(),
                ..Counts::default()
            },
            paused: AtomicBool::new(false),
        })
    }

    /// Bytes of index, pool, records and policies.
    pub(crate) fn bytes(&self) -> usize {
        self.layout.bytes() + self.admission.bytes() + self.eviction.bytes()
    }

    /// The own key of a row.
    ///
    /// # Errors
    /// When the table or the id does not exist, or `bytes` is not the length of the table's rows.
    pub(crate) fn own_key(&self, row: RowId, bytes: usize) -> Result<FlatKey, CacheError> {
        let (table, id) = (row.table(), row.row());
        let Some(shape) = self.tables.get(table.index()) else {
            return Err(CacheError::Table { got: table.index(), tables: self.tables.len() });
        };
        if bytes != shape.row_bytes {
            return Err(CacheError::RowBytes { table: table.index(), got: bytes, expected: shape.row_bytes });
        }
        let past = CacheError::Id { table: table.index(), got: id, rows: shape.rows };
        self.keys.own(table, id).ok_or(past)
    }

    /// The own key of a row that a switch changes.
    ///
    /// # Errors
    /// As [`Self::own_key`].
    pub(crate) fn changed_key(&self, changed: NewRow<'_>) -> Result<FlatKey, CacheError> {
        let NewRow { row, bytes } = changed;
        let expected = self.tables.get(row.table().index()).map_or(0, |shape| shape.row_bytes);
        self.own_key(row, bytes.map_or(expected, <[u8]>::len))
    }

    /// The row of an index entry. `tag` returns the entry's tag, if it has one.
    pub(crate) fn row_of(&self, key: FlatKey, tag: impl FnOnce() -> Option<u64>) -> Option<RowId> {
        let table = self.keys.index_keys().table_of(key)?;
        let (table, id) = match self.keys.tagged(table) {
            true => self.keys.own_keys().decode(FlatKey(tag()?))?,
            false => self.keys.index_keys().decode(key)?,
        };
        Some(RowId::new(table, id))
    }

    /// Bytes of the pool that a row takes.
    pub(crate) fn footprint(&self, table: TableId) -> u64 {
        self.layout.slabs.footprint(self.classes[table.index()]) as u64
    }

    /// The largest footprint.
    pub(crate) fn largest(&self) -> u64 {
        let footprints = self.classes.iter().map(|class| self.layout.slabs.footprint(*class) as u64);
        footprints.max().unwrap_or(0)
    }

    /// How full a cache of `entries` entries is.
    pub(crate) fn fill_with(&self, entries: u64) -> Fill {
        let bytes = self.counts.linked_bytes.load(Ordering::Relaxed);
        Fill {
            entries: Level { used: entries, capacity: self.entry_capacity() },
            bytes: Level { used: bytes, capacity: self.layout.slabs.data_bytes() as u64 },
            watermarks: self.watermarks,
        }
    }

    /// Index entries at the intended load.
    pub(crate) fn entry_capacity(&self) -> u64 {
        index::capacity(self.layout.buckets)
    }

    /// Whether a missed row is admitted; counts it if not. A cache below its low watermark is roomy.
    pub(crate) fn admits(&self, missed: Missed, fill: impl FnOnce() -> Fill) -> bool {
        let allowed = self.admission.admits(missed, || fill().excess() == 0.0);
        let admitted = allowed && !self.is_paused();
        if !admitted {
            self.counts.not_admitted.fetch_add(1, Ordering::Relaxed);
        }
        admitted
    }

    /// Admits no row of a batch that is pinned from now on, until the result is dropped. Earlier batches may
    /// still insert rows, so the caller waits for them: a later pin sees the pause, by the argument of
    /// [`super::epoch`].
    pub(crate) fn pause_admission(&self) -> PausedAdmission<'_> {
        self.paused.store(true, Ordering::Release);
        PausedAdmission(&self.paused)
    }

    /// Whether no row is admitted now.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }

    /// Counts a row that found no room, and wakes the eviction thread.
    pub(crate) fn count_rejected(&self) {
        self.counts.rejected_full.fetch_add(1, Ordering::Relaxed);
        self.wake.now();
    }

    /// Counts a row for which there was no slot.
    pub(crate) fn starve(&self, class: Class) {
        self.starved.store(u64::from(class.0) + 1, Ordering::Relaxed);
        self.count_rejected();
    }

    /// Updates the counts for an unlinked entry, and retires its slot if it has one.
    pub(crate) fn retire(&self, unlinked: Unlinked) {
        if unlinked.location().is_pointer() {
            self.pointers.removed();
            return;
        }
        if let Some(table) = self.keys.index_keys().table_of(unlinked.key) {
            self.counts.linked_bytes.fetch_sub(self.footprint(table), Ordering::Relaxed);
            self.counts.tables[table.index()].evictions.fetch_add(1, Ordering::Relaxed);
        }
        self.retired.put(unlinked, &self.epochs);
    }

    /// As [`Pointers::observe`].
    pub(crate) fn observe(&self, ids: u64, elapsed: Duration) {
        if self.pointers.observe(ids, elapsed) {
            // Removing the pointers sweeps the whole index, which would delay this request. So the eviction
            // thread does it.
            self.wake.now();
        }
    }

    /// The counts of a cache that is this full.
    pub(crate) fn stats(&self, fill: &Fill) -> CacheStats {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Fill { entries, bytes, .. } = *fill;
        CacheStats {
            tables: self.counts.tables.iter().map(TableCounts::read).collect(),
            entries: entries.used,
            entry_capacity: entries.capacity,
            pointers: self.pointers.count(),
            pool_used_bytes: bytes.used,
            pool_bytes: bytes.capacity,
            total_bytes: self.bytes() as u64,
            inserted: load(&self.counts.inserted),
            not_admitted: load(&self.counts.not_admitted),
            rejected_full: load(&self.counts.rejected_full),
        }
    }
}
