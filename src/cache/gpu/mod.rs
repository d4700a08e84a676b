//! The flat cache in the memory of a CUDA device.
//!
//! It keeps the contract of [`super::FlatCache`]: a batch reads, for a table and an id, exactly the row that
//! was inserted. The index and the pool lie on the device, and kernels (`kernels/`) probe, copy and pool. The
//! host decides: it tracks free slots and running batches, admits rows, and chooses how much to evict, with
//! the code that the host cache uses.
//!
//! - `context`: the stream and the memory for the lookup of a batch; `embed`: runs a batch, from its ids to
//!   the model's input;
//! - `table`: index and pool, and the jobs that change them; `replace`: admits rows by jobs, all on one
//!   stream;
//! - `evict`: eviction by age; `rank`: eviction by rank; `sweeper` and `lister`: launch their kernels;
//! - `version` and `overlay`: the switch to another version's rows between two batches;
//! - `pointers`: the unified index, which also has entries that point at rows in pinned host memory;
//! - `warm`: fills the cache, and lists its rows for the next start.
//!
//! **Epochs** (`cache/epoch.rs`). A batch is pinned before its probe is launched. Its pin is dropped after
//! its last kernel has ended, also when the batch ends in an error or a panic. A kernel reports an unlinked
//! entry, and the host tags the entry after that kernel has ended. A batch that is pinned later launches its
//! probe later and does not find the entry. A batch that was pinned before has a number of at most the tag,
//! and keeps the slot from being reused.
//!
//! **Locks.** A batch of hits takes no lock. A batch with misses, or with rows that are read through
//! pointers, takes the replacer's lock after it has launched its last kernel.
//!
//! **Admission.** A row that misses counts once a batch, however often it occurs there, because the device
//! does not count its occurrences. So with merged requests the device caches a new row later than the host.

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

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use super::common::Common;
use super::epoch::Replaceable;
use super::evictor::{EvictStep, Evictor};
use super::policy::Fill;
use super::shape::{Layout, tag_bytes};
use super::slabs::SlotAllocator;
use super::version::{NewRow, Switched};
use super::{CacheError, CacheOptions, CacheShape, CacheStats};
use crate::cache::gpu::args::Pointable;
use crate::cache::gpu::context::LookupError;
use crate::cache::gpu::overlay::OverlayTable;
use crate::cache::gpu::table::{GpuTable, GpuTableShape};
use crate::device::cuda::memory::PinnedMemory;
use crate::device::cuda::{Driver, DriverError};
use crate::mem::WORD_BYTES;
use crate::types::{TableId, Version};
pub use context::{ContextShape, LookupContext};
pub use embed::MissingRows;
use evict::Sweep;
pub(crate) use pointers::GpuHostRows;
use replace::Replacer;
use version::{Cached, Current};

/// Why a cache on a device cannot be created, or rejects its input.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages are the documentation
pub enum GpuCacheError {
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Lookup(#[from] LookupError),
    #[error("an earlier version switch failed, so the cache can no longer be switched or warmed")]
    SwitchFailed,
    #[error("host rows of table {table}: expected {expected} bytes, got {got}")]
    HostRows { table: usize, expected: u64, got: u64 },
    /// A pointer is found by its key alone, so no other row may have the key.
    #[error("host rows of table {table}: its rows share keys, since cache.key_bits is too small for its ids")]
    SharedKeys { table: usize },
    #[error("host rows of table {table}: the index cannot reach their address")]
    OutOfReach { table: usize },
}

impl From<DriverError> for GpuCacheError {
    fn from(error: DriverError) -> Self {
        Self::Lookup(error.into())
    }
}

/// The cache. Any number of threads may share it.
pub struct GpuCache<D: Driver> {
    shared: Arc<Shared<D>>,
    /// Dropping it stops and joins the thread.
    _evictor: Option<Evictor>,
}

/// The state that batches and the eviction thread share.
pub(crate) struct Shared<D: Driver> {
    gpu_table: Arc<GpuTable<D>>,
    common: Common,
    slots: SlotAllocator,
    /// The driver error of the first batch that could not be waited for. Its pin is never dropped.
    endless: OnceLock<DriverError>,
    /// The version that new batches use.
    current: Replaceable<Current<D>>,
    /// Locked during a version switch. `Some`: the overlay of a switch that is running or has failed.
    switching: Mutex<Option<Arc<OverlayTable<D>>>>,
    /// By table: its rows in registered memory.
    pointable: Mutex<Vec<Option<Pointable>>>,
    replacer: Mutex<Replacer<D>>,
    sweep: Mutex<Sweep<D>>,
    entries: AtomicU64,
}

impl<D: Driver> Deref for Shared<D> {
    type Target = Common;

    fn deref(&self) -> &Common {
        &self.common
    }
}

impl<D: Driver> GpuCache<D> {
    /// Allocates the cache and, with `options.background`, starts the eviction thread.
    ///
    /// # Errors
    /// As [`super::FlatCache::new`], and driver errors.
    pub fn new(shape: &CacheShape, options: &CacheOptions, driver: Arc<D>) -> Result<Self, GpuCacheError> {
        let common = Common::new(shape, options)?;
        let Layout { buckets, slabs } = &common.layout;
        let (slab_bytes, slabs) = (slabs.slab_bytes, slabs.slabs);
        let shape = GpuTableShape { buckets: *buckets as u64, slab_bytes, slabs };
        let gpu_table = Arc::new(GpuTable::new(driver, shape)?);
        let bytes = common.bytes();
        let shared = Arc::new(Shared {
            slots: SlotAllocator::new(common.layout.slabs.clone()),
            endless: OnceLock::new(),
            current: Replaceable::new(Current::new(options.version)),
            switching: Mutex::default(),
            pointable: Mutex::new(vec![None; common.tables.len()]),
            replacer: Mutex::new(Replacer::new(&gpu_table)?),
            sweep: Mutex::new(Sweep::new(&gpu_table, &common)?),
            entries: AtomicU64::new(0),
            gpu_table,
            common,
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

    /// As [`super::FlatCache::switch`].
    ///
    /// Waits for the batches of the previous version and for the device. Pointers to unchanged rows in host
    /// memory stay. No more pointers are made until [`Self::host_rows`] is called for this version. To
    /// release the memory of the previous version, drop its [`GpuHostRows`].
    ///
    /// # Errors
    /// [`GpuCacheError`] if the version is the current one, a row does not fit its table, or
    /// the overlay cannot be allocated. Then nothing has changed. After a later driver error, the switch has
    /// failed: batches still read correct rows, but the cache frees no slots and refuses further switches.
    pub(crate) fn switch<'r, C>(
        &self,
        version: Version,
        changed: impl FnOnce(Cached<'_, D>) -> Result<C, GpuCacheError>,
    ) -> Result<Switched, GpuCacheError>
    where
        C: IntoIterator<Item = NewRow<'r>>,
    {
        self.shared.switch(version, changed)
    }

    /// Lets the unified index point at the rows of a table until the returned value is dropped. `rows` holds
    /// all rows of the table in order, as they are in the current version. It must not be written until then.
    ///
    /// # Errors
    /// [`GpuCacheError`] if the table does not exist or its rows share keys, if `rows` is too short or the
    /// index cannot reach its address, or if `version` is not current.
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

    /// The counts since the cache was created. Rows of jobs that are still running are not counted yet.
    #[must_use]
    pub(crate) fn stats(&self) -> CacheStats {
        self.shared.stats(&self.shared.fill_level())
    }
}

impl<D: Driver> Shared<D> {
    /// Words of a row in its slot, tag included.
    fn slot_words(&self, table: TableId) -> usize {
        (tag_bytes(&self.keys, table) + self.tables[table.index()].row_bytes) / WORD_BYTES
    }

    /// Records that waiting for a batch failed. Its kernels may still run, so its pin is never dropped.
    fn batch_never_ends(&self, error: DriverError) {
        tracing::error!(%error, "waiting for a batch failed: the slots that it may read are never freed");
        let _ = self.endless.set(error);
    }

    /// Waits until every batch that began before this call has ended on the host and on the device.
    fn wait_for_earlier(&self) -> Result<(), DriverError> {
        self.epochs.wait_for_earlier_while(|| self.every_batch_ends())
    }

    /// As [`Self::wait_for_earlier`], but waits at most this long. Returns whether they have ended.
    fn earlier_end_within(&self, limit: Duration) -> Result<bool, DriverError> {
        self.epochs.earlier_end_within_while(limit, || self.every_batch_ends())
    }

    /// # Errors
    /// That of [`Self::batch_never_ends`].
    fn every_batch_ends(&self) -> Result<(), DriverError> {
        self.endless.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    fn fill_level(&self) -> Fill {
        self.fill_with(self.entries.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
impl<D: Driver> GpuCache<D> {
    /// The version that new batches use.
    #[must_use]
    pub(crate) fn version(&self) -> Version {
        self.shared.current.read().version
    }

    /// As [`super::FlatCache::set_pointers`].
    pub(crate) fn set_pointers(&self, capacity: u64) {
        self.shared.pointers.allow(capacity);
    }

    /// As [`super::FlatCache::evict_step`]. Waits for the device.
    ///
    /// # Errors
    /// Driver errors.
    pub(crate) fn evict_step(&self) -> Result<EvictStep, GpuCacheError> {
        Ok(self.shared.evict_step()?)
    }

    /// Waits for all running jobs. Afterwards each offered row is cached or counted as rejected.
    ///
    /// # Errors
    /// Driver errors.
    pub(crate) fn settle(&self) -> Result<(), GpuCacheError> {
        Ok(self.shared.settle()?)
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
