//! The flat cache in the memory of a CUDA device.
//!
//! It keeps the contract of [`super::FlatCache`]: a batch reads, for a table and an id, exactly the row that
//! was inserted. The index and the pool lie on the device, and kernels (`kernels/`) probe, copy and pool. The
//! host decides: it tracks free slots and running batches, admits rows, and chooses how much to evict, with
//! the code that the host cache uses.
//!
//! - `context`: the stream and memory that a batch is looked up with; `embed`: a batch from ids to the
//!   model's input;
//! - `table`: index and pool, and the jobs that change them; `replace`: admits rows by jobs on the table's
//!   one stream;
//! - `evict`: eviction by age; `rank`: eviction by rank; `sweeper` and `lister`: the kernels that they use;
//! - `version` and `overlay`: the switch to another version's rows between two batches;
//! - `pointers`: the unified index, whose entries can point at rows in pinned host memory;
//! - `warm`: fills the cache, and lists its rows for the next start.
//!
//! **Epochs.** A batch is pinned before its probe is launched. Its pin is dropped after it has waited for its
//! last kernel, also when it ends in an error or a panic. A kernel reports an unlinked entry, and the host
//! tags the entry after waiting for that kernel. A batch that is pinned later launches its probe later and
//! does not find the entry. A batch that was pinned before has a number of at most the tag, and keeps the
//! slot from being reused.
//!
//! **Locks.** A batch of hits takes no lock. A batch with misses takes the replacer's lock after it has
//! launched its last kernel.

pub(crate) mod args;
pub(crate) mod context;
mod embed;
mod evict;
mod kernels;
pub(crate) mod lister;
pub(crate) mod overlay;
mod pointers;
mod rank;
mod replace;
pub(crate) mod sweeper;
pub(crate) mod table;
mod version;
mod warm;

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
use crate::cache::gpu::context::LookupError;
use crate::cache::gpu::overlay::OverlayTable;
use crate::cache::gpu::table::{GpuTable, GpuTableShape};
use crate::device::cuda::memory::PinnedMemory;
use crate::device::cuda::{Driver, DriverError};
use crate::types::{FlatKey, TableId, Version};
pub use context::{ContextShape, LookupContext};
pub use embed::MissingRows;
use evict::Sweep;
pub(crate) use pointers::GpuHostRows;
use pointers::Pointing;
use replace::Replacer;
use version::Current;

/// Why a cache on a device cannot be made or rejects an input.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum GpuCacheError {
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Lookup(#[from] LookupError),
    #[error("the cache takes no more versions: an earlier switch failed")]
    SwitchFailed,
    #[error("host rows of table {table}: expected {expected} bytes, got {got}")]
    HostRows { table: usize, expected: u64, got: u64 },
    /// A pointer names a key, and several rows have this one.
    #[error("host rows of table {table}: its rows share keys, since cache.key_bits does not hold its ids")]
    SharedKeys { table: usize },
    #[error("host rows of table {table}: their address is out of reach of the index")]
    OutOfReach { table: usize },
}

impl From<DriverError> for GpuCacheError {
    fn from(error: DriverError) -> Self {
        Self::Lookup(error.into())
    }
}

/// How long to sleep between two looks at the running batches.
const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// The cache. Any number of threads may share it.
pub struct GpuCache<D: Driver> {
    shared: Arc<Shared<D>>,
    /// Dropping it stops and joins the thread.
    _evictor: Option<Evictor>,
}

/// The part that the evictor's thread uses too.
pub(crate) struct Shared<D: Driver> {
    gpu_table: Arc<GpuTable<D>>,
    keys: RowKeys,
    tables: Vec<TableShape>,
    /// By table: the class of its slots, tags included.
    classes: Vec<Class>,
    slots: Slots,
    /// Bytes of everything, on the device and on the host.
    bytes: usize,
    epochs: Arc<Epochs>,
    /// The driver error of a batch that never ends, if there is one.
    endless: OnceLock<DriverError>,
    /// The version that new batches use.
    current: Replaceable<Current<D>>,
    /// Locked during a switch of versions. `Some`: the overlay of a switch that runs or has failed.
    switching: Mutex<Option<Arc<OverlayTable<D>>>>,
    pointing: Pointing,
    admission: Admission,
    eviction: Eviction,
    watermarks: Watermarks,
    retired: RetireList,
    replacer: Mutex<Replacer<D>>,
    sweep: Mutex<Sweep<D>>,
    wake: Arc<Wake>,
    /// A size class that found no slot, plus one; else 0. The evictor empties slabs for it.
    starved: AtomicU64,
    entries: AtomicU64,
    counts: Counts,
}

impl<D: Driver> GpuCache<D> {
    /// Allocates the cache and, with `options.background`, starts the evicting thread.
    ///
    /// # Errors
    /// As [`super::FlatCache::new`], and driver errors.
    pub fn new(shape: &CacheShape, options: &CacheOptions, driver: Arc<D>) -> Result<Self, GpuCacheError> {
        check(options)?;
        let rows: Vec<u64> = shape.tables.iter().map(|t| t.rows).collect();
        let keys = RowKeys::new(&rows, options.key_width).map_err(CacheError::from)?;
        let plan = shape.plan(&keys, options)?;
        let (layout, bytes) = (&plan.layout, plan.bytes());
        let gpu_table = Arc::new(GpuTable::new(
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
            endless: OnceLock::new(),
            current: Replaceable::new(Current::new(options.version)),
            switching: Mutex::default(),
            pointing: Pointing::new(shape.tables.len(), options.pointers),
            admission: admission(options, plan.sketch_bytes),
            eviction: eviction(options, &keys, plan.ranked),
            watermarks: options.watermarks,
            retired: RetireList::default(),
            replacer: Mutex::new(Replacer::new(&gpu_table)?),
            sweep: Mutex::new(Sweep::new(&gpu_table, &keys, shape.tables.len(), &options.eviction)?),
            keys,
            wake: Arc::default(),
            starved: AtomicU64::new(0),
            entries: AtomicU64::new(0),
            counts: Counts {
                tables: shape.tables.iter().map(|_| TableCounts::default()).collect(),
                ..Counts::default()
            },
            gpu_table,
        });
        let stepped = shared.clone();
        let step = move || {
            stepped.evict_step().unwrap_or_else(|error| {
                tracing::error!(%error, "eviction in the device's cache failed");
                EvictStep::Idle
            })
        };
        let evictor = options.background.then(|| Evictor::start(&shared.wake, step)).transpose();
        let refused = |source| CacheError::Memory { bytes, source };
        Ok(Self { _evictor: evictor.map_err(refused)?, shared })
    }

    /// As [`super::FlatCache::switch`]: makes a version current for new batches. `changed` are the rows that
    /// differ from the previous version; those that are cached are carried over.
    ///
    /// Waits for the batches of the previous version and for the device. Pointers to unchanged rows in host
    /// memory stay. No more pointers are made until [`Self::host_rows`] is called for this version. To
    /// release the memory of the previous version, drop its [`GpuHostRows`].
    ///
    /// # Errors
    /// [`GpuCacheError`] if the version is not newer than the current one, a row does not fit its
    /// table, or the overlay cannot be allocated; nothing has changed then. After a later driver error the
    /// switch has failed: batches still read correct rows, but the cache frees no slots and takes no more
    /// versions.
    #[cfg_attr(not(test), expect(dead_code))] // tests call it; the program does not yet
    pub(crate) fn switch<'r>(
        &self,
        version: Version,
        changed: impl IntoIterator<Item = (TableId, u64, &'r [u8])>,
    ) -> Result<Switched, GpuCacheError> {
        self.shared.switch(version, changed)
    }

    /// The version that new batches use.
    #[must_use]
    #[cfg(test)]
    pub(crate) fn version(&self) -> Version {
        self.shared.current.read().version
    }

    /// Lets the unified index point at the rows of a table until the returned value is dropped. `rows` holds
    /// all rows of the table in order, as they are in the current version, and is not written in the
    /// meantime.
    ///
    /// # Errors
    /// [`GpuCacheError`] if there is no such table, `rows` is too short or out of reach, or
    /// `version` is not current.
    pub(crate) fn host_rows(
        &self,
        version: Version,
        table: TableId,
        rows: Arc<PinnedMemory<D>>,
    ) -> Result<GpuHostRows<D>, GpuCacheError> {
        self.shared.host_rows(version, table, rows)
    }

    /// As [`super::FlatCache::observe`].
    pub(crate) fn observe(&self, ids: u64, elapsed: Duration) {
        self.shared.observe(ids, elapsed);
    }

    /// As [`super::FlatCache::set_pointers`].
    #[cfg_attr(not(test), expect(dead_code))] // tests call it; the program does not yet
    pub(crate) fn set_pointers(&self, capacity: u64) {
        self.shared.pointing.count.allow(capacity);
    }

    /// As [`super::FlatCache::evict_step`]. Waits for the device.
    ///
    /// # Errors
    /// Driver errors.
    #[cfg(test)]
    pub(crate) fn evict_step(&self) -> Result<EvictStep, GpuCacheError> {
        Ok(self.shared.evict_step()?)
    }

    /// Waits for the jobs that run, so that each offered row is cached or counted as rejected.
    ///
    /// # Errors
    /// Driver errors.
    #[cfg(test)]
    pub(crate) fn settle(&self) -> Result<(), GpuCacheError> {
        Ok(self.shared.settle()?)
    }

    /// The counts, without rows whose jobs still run.
    #[must_use]
    pub(crate) fn stats(&self) -> CacheStats {
        self.shared.stats()
    }
}

impl<D: Driver> Shared<D> {
    /// The own key of a row; an error if the row does not fit its table.
    fn own_key(&self, table: TableId, id: u64, bytes: usize) -> Result<FlatKey, CacheError> {
        self.keys.own_key(&self.tables, (table, id), bytes)
    }

    /// Words of a row in its slot, tag included.
    fn slot_words(&self, table: TableId) -> usize {
        let tag = if self.keys.tagged(table) { TAG_BYTES } else { 0 };
        (tag + self.tables[table.index()].row_bytes) / UNIT
    }

    /// Bytes of the pool that a row takes.
    fn footprint(&self, table: TableId) -> u64 {
        self.slots.shape().footprint(self.classes[table.index()]) as u64
    }

    /// Notes that the end of a batch cannot be awaited, so that its pin stays for good.
    fn batch_never_ends(&self, error: DriverError) {
        tracing::error!(%error, "waiting for a batch failed: what it may read is never freed");
        let _ = self.endless.set(error);
    }

    /// Waits until every batch that began before this call has ended, on the device too.
    fn wait_for_earlier(&self) -> Result<(), DriverError> {
        let tag = self.epochs.tag();
        while self.epochs.oldest() <= tag {
            if let Some(error) = self.endless.get() {
                return Err(error.clone());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    fn crossed(&self) -> bool {
        self.fill_level().crosses(&self.watermarks)
    }

    /// Whether the cache is below its low watermark, so that admitting a row evicts nothing.
    fn is_roomy(&self) -> bool {
        self.fill_level().excess(&self.watermarks) == 0.0
    }

    fn fill_level(&self) -> Fill {
        let bytes = self.counts.linked_bytes.load(Ordering::Relaxed);
        Fill {
            entries: (self.entries.load(Ordering::Relaxed), self.entry_capacity()),
            bytes: (bytes, self.slots.shape().data_bytes() as u64),
        }
    }

    fn entry_capacity(&self) -> u64 {
        index::capacity(self.gpu_table.shape().buckets as usize)
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

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
