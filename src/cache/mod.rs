//! The flat cache (FLECHE, Xie et al., EuroSys 2022, sections 3 and 4): rows of all tables share one bounded
//! memory and one index, so the memory holds the hottest rows of the whole model, whichever table they
//! belong to.
//!
//! How a batch uses it:
//!
//! ```
//! # use flechette::cache::{CacheOptions, CacheShape, FlatCache, Query, Source, TableShape};
//! # use flechette::types::TableId;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let tables = vec![TableShape { rows: 1000, row_bytes: 8 }, TableShape { rows: 10, row_bytes: 4 }];
//! let cache = FlatCache::new(&CacheShape { bytes: 64 << 10, tables }, &CacheOptions::default())?;
//!
//! let mut query = Query::default(); // one per worker, reused
//! let pin = cache.pin(); // one per batch
//! query.clear();
//! query.push(TableId(0), [7, 8, 7]);
//! query.push(TableId(1), [7]);
//! let found = pin.lookup(&mut query)?;
//! assert_eq!(found.uniques(), [0, 1, 0, 2]); // for every pushed id: the number of its distinct row
//! assert_eq!(found.misses().len(), 3); // each missing row, once
//! for miss in found.misses() {
//!     let fetched = vec![7; if miss.table == TableId(0) { 8 } else { 4 }];
//!     pin.insert(miss, &fetched)?;
//! }
//! match found.source(0) {
//!     Source::Row(row) => println!("{row:?}"), // in the cache, valid until the pin is dropped
//!     Source::Pointer(p) => println!("in the store's memory: {:?}", found.pointed()[p]),
//!     Source::Miss(m) => println!("miss {m}"), // the caller fetched `found.misses()[m]`
//! }
//! # Ok(()) }
//! ```
//!
//! Two batches that miss the same row both read it from the store. The first insert wins, and the other one
//! gets [`shared::Insertion::Present`].
//!
//! - [`key`]: maps the ids of all tables to one space of integers;
//! - [`index`]: maps a key to a location, read without a lock;
//! - `pool`: the memory of the rows; `slabs`: which of its slots are free;
//! - [`epoch`]: when an evicted row's memory may be reused;
//! - [`policy`]: which rows are admitted and evicted;
//! - [`query`]: deduplicates and probes a batch's keys; `batch`: a batch's interface to the cache;
//! - `common`: the state that a cache on a device has too; `shared`: inserting and retiring rows;
//! - `evictor`: the eviction thread; `eviction_plan`: what an eviction does next;
//! - `version`: switching to another version's rows between two batches;
//! - `pointers`: the unified index, which also has entries that point at rows in the store's memory;
//!   [`tuner`]: how many of them;
//! - `warm`: filling the cache before the first batch;
//! - [`shape`]: how `cache.bytes` is divided; `stats`: counts;
//! - [`gpu`]: the same cache in the memory of a CUDA device.
//!
//! **Exactness.** A row is copied into a slot that no batch reads, and only then linked under its key. The
//! slot is not written again until the row was unlinked and every batch that could have found it has
//! finished. So a batch reads through its pin exactly the row that was inserted for that table and id.
//!
//! **Waiting.** Lookups take no lock. Inserts take short locks against each other. A background thread
//! evicts. Inserts wake it when the cache is above the high watermark. Until the thread has made room, rows
//! that do not fit are counted and not cached.

mod batch;
mod common;
pub(crate) mod epoch;
mod error;
mod eviction_plan;
mod evictor;
pub mod gpu;
pub(crate) mod index;
pub mod key;
mod pointers;
pub(crate) mod policy;
pub(crate) mod pool;
pub(crate) mod query;
pub(crate) mod shape;
mod shared;
mod slabs;
mod stats;
#[cfg(test)]
#[cfg(not(flechette_loom))]
pub(crate) mod tests;
pub(crate) mod tuner;
mod version;
mod warm;

use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::types::{RowId, TableId, Version};
use common::Common;
use epoch::Replaceable;
use evictor::Evictor;
use index::Index;
use key::{KeyWidth, RowKeys, TOMBSTONE};
pub(crate) use policy::EvictionOption;
use policy::frequency::Sketch;
use policy::probability::Probability;
use policy::{Admission, Eviction, Watermarks};
use pool::Pool;

pub(crate) use batch::BatchPin;
pub use batch::Source;
pub(crate) use error::CacheError;
pub use evictor::EvictStep;
pub use pointers::HostRows;
pub(crate) use query::Miss;
pub use query::Query;
pub use shape::{CacheShape, TableShape};
pub(crate) use stats::CacheStats;
pub(crate) use version::{Cached, NewRow, Switched};
pub(crate) use warm::{WarmRow, Warmed};

use shared::Shared;

/// The default watermarks. `cache.fraction` makes room for them.
pub(crate) const WATERMARKS: Watermarks = Watermarks { high: 0.95, low: 0.9 };

/// The options of a cache, except its size.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheOptions {
    /// Which missed rows are admitted.
    pub admission: AdmissionOption,
    /// Which rows are evicted first.
    pub eviction: EvictionOption,
    /// The fill levels at which eviction starts and ends.
    pub watermarks: Watermarks,
    /// Bits of the index's keys. If they are too few for all rows, rows of the larger tables share keys, and
    /// each cached row of those tables stores its own key as a tag.
    pub key_width: KeyWidth,
    /// The most pointers to rows in the store's memory (`pointers.rs`). Each takes an index entry.
    pub pointers: u64,
    /// The version that batches use until the first switch.
    pub version: Version,
    /// How long a switch waits for the batches that began before it. Then it fails, before anything changes.
    /// A batch that begins meanwhile and does not end is waited for without a limit, because it may still
    /// read rows of the version before.
    pub switch_wait: Duration,
    /// Whether the cache evicts on its own thread. If not, the owner calls [`FlatCache::evict_step`]: tests
    /// and benchmarks do, so that evictions come at the same batches in each run.
    pub background: bool,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self {
            admission: AdmissionOption::DEFAULT,
            eviction: EvictionOption::Lru,
            watermarks: WATERMARKS,
            key_width: KeyWidth::W64,
            pointers: 0,
            version: Version(0),
            switch_wait: Duration::from_secs(60),
            background: true,
        }
    }
}

/// Which missed rows are admitted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AdmissionOption {
    /// Each missed row, with a fixed probability.
    Probability {
        /// From 0 to 1.
        p: f64,
        /// Seed of the draws.
        seed: u64,
    },
    /// Rows that were missed repeatedly (`policy/frequency.rs`).
    Frequency {
        /// A full cache admits a missed row when its miss count is this, 1 to 15.
        misses: u32,
    },
}

impl AdmissionOption {
    /// All missed rows.
    pub(crate) const ALL: Self = Self::Probability { p: 1.0, seed: 0 };
    /// A full cache admits rows at a miss count of 2. This rule has the best hit rates in
    /// `docs/benchmarks.md`.
    pub(crate) const DEFAULT: Self = Self::Frequency { misses: 2 };
}

/// The flat cache. Any number of workers share it by reference.
#[derive(Debug)]
pub struct FlatCache {
    shared: Arc<Shared>,
    /// Stops and joins its thread when dropped.
    _evictor: Option<Evictor>,
}

impl FlatCache {
    /// Allocates the memory and, if [`CacheOptions::background`] is set, starts the eviction thread.
    ///
    /// # Errors
    /// When the bytes do not hold a row of each size, the tables' ids do not fit 64 bits, an option is out of
    /// range, or the allocation fails.
    pub fn new(shape: &CacheShape, options: &CacheOptions) -> Result<Self, CacheError> {
        let common = Common::new(shape, options)?;
        let bytes = common.bytes();
        let refused = |source| CacheError::Memory { bytes, source };
        let shared = Arc::new(Shared {
            index: Index::new(common.layout.buckets).map_err(refused)?,
            pool: Pool::new(common.layout.slabs.clone()).map_err(refused)?,
            current: Replaceable::new(version::Current::new(options.version)),
            switching: Mutex::default(),
            sweep: Mutex::default(),
            common,
        });
        let stepped = shared.clone();
        let start = || Evictor::start(&shared.wake, move || stepped.evict_step());
        let evictor = options.background.then(start).transpose();
        Ok(Self { _evictor: evictor.map_err(refused)?, shared })
    }

    /// Gets the memory of index and rows from the system now, so that no batch waits for it.
    pub(crate) fn prefault(&self) {
        self.shared.index.prefault();
        self.shared.pool.prefault();
    }

    /// Starts a batch. Rows that it finds stay readable until the pin is dropped.
    #[must_use]
    pub fn pin(&self) -> BatchPin<'_> {
        BatchPin::new(&self.shared)
    }

    /// Makes `version` the version of new batches. `changed` returns all cached rows that differ from the
    /// previous version; it may return others, too. They are updated, or dropped if they come without bytes.
    /// No missed row is admitted until the switch ends, and no slot is freed while its overlay exists
    /// (`version.rs`).
    ///
    /// Waits for the batches of the previous version, so do not call it on a request's path, nor on a thread
    /// that has a pin. Once the new version is the current one, this wait has no limit: batches are answered
    /// as before, but no other switch begins. Concurrent switches wait for each other.
    ///
    /// # Errors
    /// When the version is the current one, an earlier batch does not end
    /// ([`CacheOptions::switch_wait`]), or a row's table, id or length is wrong. Then nothing changes.
    pub(crate) fn switch<'c, 'r, C>(
        &'c self,
        version: Version,
        changed: impl FnOnce(Cached<'c>) -> C,
    ) -> Result<Switched, CacheError>
    where
        C: IntoIterator<Item = NewRow<'r>>,
    {
        self.shared.switch(version, changed)
    }

    /// The version that new batches use.
    #[must_use]
    #[cfg(test)]
    pub(crate) fn version(&self) -> Version {
        self.shared.current.read().version
    }

    /// Allows the unified index to point at rows of this table. The caller keeps the table in memory until it
    /// drops the returned value.
    ///
    /// # Errors
    /// [`CacheError::Table`] when there is no such table.
    pub fn host_rows(&self, table: TableId) -> Result<HostRows, CacheError> {
        let tables = self.shared.tables.len();
        if table.index() >= tables {
            return Err(CacheError::Table { got: table.index(), tables });
        }
        Ok(HostRows::new(self.shared.clone(), table))
    }

    /// Reports how long a batch took to look up `ids` ids. From this, the tuner chooses how many pointers the
    /// unified index may have.
    pub(crate) fn observe(&self, ids: u64, elapsed: Duration) {
        self.shared.observe(ids, elapsed);
    }

    /// Sets how many pointers the unified index may have, until the tuner changes it. For tests and
    /// benchmarks of a fixed number of them.
    pub fn set_pointers(&self, capacity: u64) {
        self.shared.pointers.allow(capacity);
    }

    /// The cached rows, the most recently used first.
    #[must_use]
    pub(crate) fn hot_rows(&self) -> Vec<RowId> {
        self.shared.hot_rows()
    }

    /// Takes one step of an eviction, if an eviction is needed or in progress, and frees slots that no batch
    /// can read any more. Returns whether more steps are needed. For tests and benchmarks without the
    /// eviction thread ([`CacheOptions::background`]).
    pub fn evict_step(&self) -> EvictStep {
        self.shared.evict_step()
    }

    /// The counts since the cache was created.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        self.shared.stats(&self.shared.fill_level())
    }
}

fn admission(options: &CacheOptions, sketch_bytes: usize) -> Admission {
    match options.admission {
        AdmissionOption::Probability { p, seed } => Admission::Probability(Probability::new(p, seed)),
        AdmissionOption::Frequency { misses } => Admission::Frequency(Sketch::new(sketch_bytes, misses)),
    }
}

/// The eviction policy. For LFU, only the first `ranked` of the listed rows get a rank.
fn eviction(options: &CacheOptions, keys: &RowKeys, ranked: usize) -> Eviction {
    // A row that does not exist gets a key that no entry has.
    let key = |row: RowId| keys.index_keys().encode(row.table(), row.row()).unwrap_or(TOMBSTONE);
    Eviction::new(&options.eviction, ranked, key)
}

fn check(options: &CacheOptions) -> Result<(), CacheError> {
    let Watermarks { high, low } = options.watermarks;
    let admission = match options.admission {
        AdmissionOption::Probability { p, .. } => Bound {
            field: "cache.admission_probability",
            expected: "a probability from 0 to 1",
            got: p,
            allowed: 0.0..=1.0,
        },
        AdmissionOption::Frequency { misses } => Bound {
            field: "cache.admission_misses",
            expected: "1 to 15 misses",
            got: misses.into(),
            allowed: 1.0..=15.0,
        },
    };
    let high_watermark = Bound {
        field: "cache.high_watermark",
        expected: "a share above 0, at most 1",
        got: high,
        allowed: f64::MIN_POSITIVE..=1.0,
    };
    let low_watermark = Bound {
        field: "cache.low_watermark",
        expected: "a share above 0, at most the high watermark and 0.999",
        got: low,
        // A cache that is full must be above it, or nothing would be evicted.
        allowed: f64::MIN_POSITIVE..=high.min(0.999),
    };
    [admission, high_watermark, low_watermark].into_iter().try_for_each(Bound::check)
}

/// An option and its allowed values.
struct Bound {
    field: &'static str,
    expected: &'static str,
    got: f64,
    allowed: RangeInclusive<f64>,
}

impl Bound {
    fn check(self) -> Result<(), CacheError> {
        let Self { field, expected, got, allowed } = self;
        if allowed.contains(&got) { Ok(()) } else { Err(CacheError::Option { field, expected, got }) }
    }
}
