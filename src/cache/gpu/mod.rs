//! The flat cache in the memory of a CUDA device.
//!
//! The contract is [`super::FlatCache`]'s: what a batch reads is the row that was inserted for that table and id,
//! whole. What differs is who does the work. Index and pool lie on the device; probes, copies and pooling are
//! its kernels (`kernels/`). The host keeps what decides: which slots are free, which batches are unfinished,
//! what is admitted and how much is to be put out, with the same code as for itself.
//!
//! - `worker`: a batch, from its ids to the model's input;
//! - `replace`: rows that come in, as jobs on the tier's one stream;
//! - `evict`: rows that go, `rank`: those of the lowest rank;
//! - `version`: switching to another version's rows between two batches;
//! - `pointers`: the unified index, rows that are left in pinned memory of the host;
//! - `warm`: rows that it begins with, and those that it would begin with again.
//!
//! **Epochs.** A batch is pinned before its probe is launched, and its pin is dropped once an event after its
//! last kernel has fired: at the end of [`DeviceWorker::embed`], or where that failed on the way, by whoever
//! polls the queue of (pin, event). An unlinked entry is reported by a kernel; the host tags it after that
//! kernel's event has fired. A batch pinned later launches its probe later, and so does not find the entry; a
//! batch pinned before has a number of at most the tag, and keeps the slot from being used anew.
//!
//! **What waits for what.** A batch of hits takes no lock. One with misses takes the replacer's, after its last
//! kernel was launched.

pub mod args;
mod block;
mod evict;
mod kernels;
pub mod lane;
pub mod lister;
pub mod overlay;
mod pointers;
mod rank;
mod replace;
mod shape;
pub mod sweeper;
pub mod table;
mod version;
mod warm;
mod worker;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use super::epoch::{Epochs, Replaceable, RetireList};
use super::evictor::{EvictStep, Evictor, Wake};
use super::key::RowKeys;
use super::policy::{Admission, Eviction, Fill, Watermarks};
use super::shape::TAG_BYTES;
use super::slots::{Class, Slots, UNIT};
use super::stats::{Counts, TableCounts};
use super::version::Switched;
use super::{
    CacheError, CacheOptions, CacheShape, CacheStats, TableShape, admission, check, eviction, index,
};
use crate::cache::gpu::lane::LaneError;
use crate::cache::gpu::overlay::OverlayTable;
use crate::cache::gpu::table::{GpuTable, GpuTableShape};
use crate::device::cuda::memory::PinnedMemory;
use crate::device::cuda::{Driver, DriverError};
use crate::types::{FlatKey, TableId, Version};
use evict::Sweep;
pub use pointers::DeviceHostRows;
use pointers::Pointing;
use replace::Replacer;
pub(crate) use replace::{DeviceWriter, Offer};
use version::{Current, Hold};
pub use worker::{DeviceWorker, Missing, WorkerShape};

/// Why a cache on a device could not be made, or does not take what it was given.
#[derive(Debug, thiserror::Error)]
pub enum DeviceCacheError {
    /// As for a cache on the host.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A batch or a worker's shape, or the driver.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// A switch that the driver broke off: changed rows are found by what it made for the time being.
    #[error("the cache takes no more versions: a switch was broken off")]
    BrokenOff,
    /// Memory of the host that does not hold a table's rows.
    #[error("host rows of table {table}: expected {expected} bytes, got {got}")]
    HostRows {
        /// The table's place.
        table: usize,
        /// The bytes of its rows.
        expected: u64,
        /// What there is.
        got: u64,
    },
    /// Of a key that several rows share, a pointer could not say whose it is.
    #[error("host rows of table {table}: its rows share keys, since cache.key_bits does not hold its ids")]
    Tagged {
        /// The table's place.
        table: usize,
    },
    /// Memory of the host that lies too far from the other.
    #[error("host rows of table {table}: out of the reach of the index")]
    OutOfReach {
        /// The table's place.
        table: usize,
    },
}

impl From<DriverError> for DeviceCacheError {
    fn from(error: DriverError) -> Self {
        Self::Lane(error.into())
    }
}

/// How long unfinished batches are left before it is seen again whether they are.
const PATIENCE: Duration = Duration::from_micros(100);

/// The cache. Shared by reference between any number of workers.
pub struct DeviceCache<D: Driver> {
    shared: Arc<Shared<D>>,
    /// Stops and joins its thread when dropped.
    _evictor: Option<Evictor>,
}

/// What workers and the evictor's thread see too.
pub(crate) struct Shared<D: Driver> {
    tier: Arc<GpuTable<D>>,
    keys: RowKeys,
    tables: Vec<TableShape>,
    /// By table: the class of its slots, tags included.
    classes: Vec<Class>,
    slots: Slots,
    /// Bytes of everything, the host's records included.
    bytes: usize,
    epochs: Arc<Epochs>,
    /// Batches that were left on the way, until their events have fired.
    unfinished: Mutex<Vec<(Hold<D>, D::Event)>>,
    /// Why there is a batch that is never over, where there is one.
    endless: OnceLock<DriverError>,
    /// The version that batches are of which begin now.
    current: Replaceable<Current<D>>,
    /// Held by whoever switches versions; the overlay of a switch while it is not over, also because it was
    /// broken off.
    switching: Mutex<Option<Arc<OverlayTable<D>>>>,
    /// The unified index.
    pointing: Pointing,
    admission: Admission,
    eviction: Eviction,
    watermarks: Watermarks,
    limbo: RetireList,
    replacer: Mutex<Replacer<D>>,
    sweep: Mutex<Sweep<D>>,
    wake: Arc<Wake>,
    /// A class that found no slot, plus one: where there is space, slabs are to change their size.
    starved: AtomicU64,
    entries: AtomicU64,
    counts: Counts,
}

impl<D: Driver> DeviceCache<D> {
    /// Takes the memory and, if asked to, starts the evicting thread.
    ///
    /// # Errors
    /// As [`super::FlatCache::new`], and what the driver says.
    pub fn new(shape: &CacheShape, options: &CacheOptions, driver: Arc<D>) -> Result<Self, DeviceCacheError> {
        check(options)?;
        let rows: Vec<u64> = shape.tables.iter().map(|t| t.rows).collect();
        let keys = RowKeys::new(&rows, options.key_width).map_err(CacheError::from)?;
        let plan = shape.plan(&keys, options)?;
        let (layout, bytes) = (&plan.layout, plan.bytes());
        let tier = Arc::new(GpuTable::new(
            driver,
            GpuTableShape {
                buckets: layout.buckets as u64,
                slab_bytes: layout.slabs.slab_bytes,
                slabs: layout.slabs.slabs,
            },
        )?);
        let class = |t: &TableShape| layout.slabs.class(t.row_bytes);
        let shared = Arc::new(Shared {
            classes: plan.slots.iter().filter_map(class).collect(),
            tables: shape.tables.clone(),
            bytes,
            slots: Slots::new(layout.slabs.clone()),
            epochs: Arc::default(),
            unfinished: Mutex::default(),
            endless: OnceLock::new(),
            current: Replaceable::new(Current::new(options.version)),
            switching: Mutex::default(),
            pointing: Pointing::new(shape.tables.len(), options.pointers),
            admission: admission(options, plan.sketch_bytes),
            eviction: eviction(options, &keys, plan.ranked),
            watermarks: options.watermarks,
            limbo: RetireList::default(),
            replacer: Mutex::new(Replacer::new(&tier)?),
            sweep: Mutex::new(Sweep::new(&tier, &keys, shape.tables.len(), &options.eviction)?),
            keys,
            wake: Arc::default(),
            starved: AtomicU64::new(0),
            entries: AtomicU64::new(0),
            counts: Counts {
                tables: shape.tables.iter().map(|_| TableCounts::default()).collect(),
                ..Counts::default()
            },
            tier,
        });
        let stepped = shared.clone();
        let step = move || {
            stepped.evict_step().unwrap_or_else(|error| {
                tracing::error!(%error, "the cache on the device evicts no more");
                EvictStep::Idle
            })
        };
        let evictor = options.background.then(|| Evictor::start(&shared.wake, step)).transpose();
        let refused = |source| CacheError::Memory { bytes, source };
        Ok(Self { _evictor: evictor.map_err(refused)?, shared })
    }

    /// A worker that takes batches of this shape through the cache, one after the other.
    ///
    /// # Errors
    /// [`DeviceCacheError`] when the shape does not hold together, or the driver refuses.
    pub fn worker(&self, shape: &WorkerShape) -> Result<DeviceWorker<D>, DeviceCacheError> {
        DeviceWorker::new(&self.shared, shape)
    }

    /// A writer with room for so many bytes of rows at a time.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn writer(&self, staging_bytes: usize) -> Result<DeviceWriter<D>, DeviceCacheError> {
        DeviceWriter::new(&self.shared, staging_bytes)
    }

    /// As [`super::FlatCache::switch`]: makes a version current for the batches that begin from now on. `changed` are
    /// its rows that are not the same in the version before; those that the cache holds are carried over.
    ///
    /// Waits for the batches of the version before, and for the device. Pointers into memory of the host stay, but
    /// for those to rows that changed, and no more are made until [`Self::host_rows`] is called for this version;
    /// the memory of the version before is given up by dropping what was got for it.
    ///
    /// # Errors
    /// [`DeviceCacheError`] where the version is not newer than the current one, a row is not one of the tables',
    /// or there is no memory for the overlay: nothing has changed then. What the driver says later breaks the
    /// switch off: batches go on reading right rows, but the cache frees no room and takes no version any more.
    pub fn switch<'r>(
        &self,
        version: Version,
        changed: impl IntoIterator<Item = (TableId, u64, &'r [u8])>,
    ) -> Result<Switched, DeviceCacheError> {
        self.shared.switch(version, changed)
    }

    /// The version of the batches that begin now.
    #[must_use]
    pub fn version(&self) -> Version {
        self.shared.current.read().version
    }

    /// Lets the unified index point at all rows of this table, which lie in `rows` one after the other, as they are
    /// in the current version, until what this gives is dropped. Nobody writes there for as long.
    ///
    /// # Errors
    /// [`DeviceCacheError`] where there is no such table, `rows` is too short or out of reach, or `version` is not
    /// the current one.
    pub fn host_rows(
        &self,
        version: Version,
        table: TableId,
        rows: Arc<PinnedMemory<D>>,
    ) -> Result<DeviceHostRows<D>, DeviceCacheError> {
        self.shared.host_rows(version, table, rows)
    }

    /// As [`super::FlatCache::observe`].
    pub fn observe(&self, ids: u64, elapsed: Duration) {
        self.shared.observe(ids, elapsed);
    }

    /// As [`super::FlatCache::set_pointers`].
    pub fn set_pointers(&self, capacity: u64) {
        self.shared.pointing.count.allow(capacity);
    }

    /// As [`super::FlatCache::evict_step`]. Waits for the device.
    ///
    /// # Errors
    /// What the driver says.
    pub fn evict_step(&self) -> Result<EvictStep, DeviceCacheError> {
        Ok(self.shared.evict_step()?)
    }

    /// Waits for the replacement under way, so that what was offered is found, or counted out.
    ///
    /// # Errors
    /// What the driver says.
    pub fn settle(&self) -> Result<(), DeviceCacheError> {
        Ok(self.shared.settle()?)
    }

    /// The counts. Rows whose replacement is under way are not among them.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        self.shared.stats()
    }
}

impl<D: Driver> Shared<D> {
    /// The own key of a row, if it is one of these tables' and so long.
    fn own_key(&self, table: TableId, id: u64, bytes: usize) -> Result<FlatKey, CacheError> {
        self.keys.own_key(&self.tables, (table, id), bytes)
    }

    /// Words of a row in its slot, tag included.
    fn slot_words(&self, table: TableId) -> usize {
        let tag = if self.keys.tagged(table) { TAG_BYTES } else { 0 };
        (tag + self.tables[table.index()].row_bytes) / UNIT
    }

    /// What a row takes of the pool.
    fn footprint(&self, table: TableId) -> u64 {
        self.slots.shape().footprint(self.classes[table.index()]) as u64
    }

    /// Keeps the hold of a batch until its event has fired.
    fn finish_later(&self, hold: Hold<D>, event: Result<D::Event, DriverError>) {
        match event {
            Ok(event) => lock(&self.unfinished).push((hold, event)),
            Err(error) => {
                tracing::error!(%error, "a batch that never ends keeps what it may read");
                std::mem::forget(hold);
                let _ = self.endless.set(error);
            }
        }
    }

    /// Waits until every batch that began before this call is over, on the device too.
    fn wait_for_earlier(&self) -> Result<(), DriverError> {
        let tag = self.epochs.tag();
        loop {
            self.poll()?;
            if self.epochs.oldest() > tag {
                return Ok(());
            }
            if let Some(error) = self.endless.get() {
                return Err(error.clone());
            }
            std::thread::sleep(PATIENCE);
        }
    }

    /// Drops the pins of batches whose events have fired.
    fn poll(&self) -> Result<(), DriverError> {
        let mut unfinished = lock(&self.unfinished);
        let mut i = 0;
        while i < unfinished.len() {
            if self.tier.driver().fired(&unfinished[i].1)? {
                unfinished.swap_remove(i);
            } else {
                i += 1;
            }
        }
        Ok(())
    }

    fn crossed(&self) -> bool {
        self.fill_level().crosses(&self.watermarks)
    }

    /// Whether the cache has not yet filled up to where it evicts to, so that a row pushes nobody out.
    fn is_roomy(&self) -> bool {
        self.fill_level().excess(&self.watermarks) == 0.0
    }

    /// How full index and pool are.
    fn fill_level(&self) -> Fill {
        let bytes = self.counts.linked_bytes.load(Ordering::Relaxed);
        Fill {
            entries: (self.entries.load(Ordering::Relaxed), self.entry_capacity()),
            bytes: (bytes, self.slots.shape().data_bytes() as u64),
        }
    }

    fn entry_capacity(&self) -> u64 {
        index::capacity(self.tier.shape().buckets as usize)
    }

    fn stats(&self) -> CacheStats {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Fill { entries: (entries, entry_capacity), bytes: (pool_used_bytes, pool_bytes) } =
            self.fill_level();
        CacheStats {
            tables: self.counts.tables.iter().map(TableCounts::read).collect(),
            entries,
            entry_capacity,
            pointers: self.pointing.count.count(),
            pool_used_bytes,
            pool_bytes,
            total_bytes: self.bytes as u64,
            inserted: load(&self.counts.inserted),
            not_admitted: load(&self.counts.not_admitted),
            rejected_full: load(&self.counts.rejected_full),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
