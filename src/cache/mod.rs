//! The flat cache (FLECHE sections 3 and 4): rows of every table in one bounded memory, found by
//! one index, so that the hottest rows of the whole model share it, whatever table they are of.
//!
//! A batch travels through it like this:
//!
//! ```
//! # use flechette::cache::{CacheOptions, CacheShape, FlatCache, Query, Source, TableShape};
//! # use flechette::types::TableId;
//! # fn main() -> Result<(), flechette::cache::CacheError> {
//! let tables = vec![TableShape { rows: 1000, row_bytes: 8 }, TableShape { rows: 10, row_bytes: 4 }];
//! let cache = FlatCache::new(&CacheShape { bytes: 64 << 10, tables }, &CacheOptions::default())?;
//!
//! let mut query = Query::default(); // one a worker, reused
//! let pin = cache.pin(); // one a batch
//! query.clear();
//! query.push(TableId(0), [7, 8, 7]);
//! query.push(TableId(1), [7]);
//! let found = pin.lookup(&mut query)?;
//! assert_eq!(found.uniques(), [0, 1, 0, 2]); // of every id pushed, its unique row
//! assert_eq!(found.misses().len(), 3); // each row that is to be fetched, once
//! for miss in found.misses() {
//!     let fetched = vec![7; if miss.table == TableId(0) { 8 } else { 4 }];
//!     pin.insert(miss, &fetched)?;
//! }
//! match found.source(0) {
//!     Source::Row(row) => println!("{row:?}"), // in the cache, until the pin is dropped
//!     Source::Host(p) => println!("in the store's RAM: {:?}", found.pointed()[p]),
//!     Source::Miss(m) => println!("miss {m}"), // where the caller put `found.misses()[m]`
//! }
//! # Ok(()) }
//! ```
//!
//! - [`gpu`]: the same cache in the memory of a CUDA device;
//! - [`key`]: ids of all tables as one space of integers;
//! - [`index`]: key to location, read without a lock;
//! - `slab`: the memory of the rows; `slots`: which of it is free;
//! - [`epoch`]: when an evicted row's memory may be used again;
//! - [`policy`]: what is let in and what is put out;
//! - [`query`]: a batch's keys, deduplicated and probed; `batch`: what a batch sees of it;
//! - `shared`: the way of a row in and out; `evictor`: making room; `course`:
//!   what for;
//! - `version`: switching to another version's rows between two batches;
//! - `pointers`: the unified index, rows that are left in the store's RAM; [`tuner`]: how many;
//! - `warm`: filling before the first batch;
//! - [`shape`]: how `cache.bytes` is divided; `stats`, `error`.
//!
//! **Exactness.** A row is copied into a slot that nobody reads, and only then linked under its
//! key. It is never written again while it is linked, nor after, until no batch that could have
//! found it is unfinished. So whatever a batch reads through its pin is the row that was inserted
//! for that table and id, whole.
//!
//! **What waits for what.** Lookups take no lock. Inserts take short ones against each other.
//! Evictions happen on a thread of the cache's own, woken past the high watermark; until it has
//! made room, rows that do not fit are simply not cached, and counted.

mod batch;
pub(crate) mod epoch;
mod error;
mod eviction_plan;
mod evictor;
pub mod gpu;
pub mod index;
pub mod key;
mod pointers;
pub(crate) mod policy;
pub(crate) mod query;
pub(crate) mod shape;
mod shared;
pub(crate) mod slab;
mod slots;
mod stats;
#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
pub(crate) mod tuner;
mod version;
mod warm;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::types::{TableId, Version};
use epoch::{Epochs, Replaceable, RetireList};
use evictor::Evictor;
use index::Index;
use key::{KeyWidth, RowKeys, TOMBSTONE};
pub use policy::EvictionOption;
use policy::frequency::Sketch;
use policy::probability::Probability;
use policy::{Admission, Eviction, Watermarks};
use slab::Pool;
use stats::{Counts, TableCounts};

pub use batch::{BatchPin, Found, Source};
pub use error::CacheError;
pub use evictor::EvictStep;
pub use pointers::HostRows;
pub use query::{Miss, Query};
pub use shape::{CacheShape, TableShape};
pub(crate) use shared::Insertion;
pub use stats::{CacheStats, TableStats};
pub use version::Switched;
pub use warm::Warmed;

use shared::Shared;

/// The default watermarks, for which `cache.fraction` makes room.
pub const WATERMARKS: Watermarks = Watermarks { high: 0.95, low: 0.9 };

/// What may be chosen about a cache besides its size.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheOptions {
    /// Which missed rows are let in.
    pub admission: AdmissionOption,
    /// Which rows go first.
    pub eviction: EvictionOption,
    /// Between which shares of its memory the cache moves.
    pub watermarks: Watermarks,
    /// Bits of the index's keys. Where they do not hold all rows, rows bear their own key as a tag.
    pub key_width: KeyWidth,
    /// Most rows of the store's RAM that the unified index points at; each takes an entry of the index.
    pub pointers: u64,
    /// The version whose rows are inserted first.
    pub version: Version,
    /// Whether the cache evicts on a thread of its own. Without, the owner calls
    /// [`FlatCache::evict_step`].
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
            background: true,
        }
    }
}

/// Which missed rows are let in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AdmissionOption {
    /// Each with this probability, drawn from this seed.
    Probability {
        /// The probability, 0 to 1.
        p: f64,
        /// The draws' seed.
        seed: u64,
    },
    /// Those missed so often of late.
    Frequency {
        /// How often, 1 to 15.
        misses: u32,
    },
}

impl AdmissionOption {
    /// Every missed row.
    pub const ALL: Self = Self::Probability { p: 1.0, seed: 0 };
    /// Once the cache is full, rows missed for the second time of late: of all that were tried the best on
    /// the traces of `benches/hit_rates` (2026-11-21: at most 0.6 points behind the best of LRU, LFU, ARC, S3-FIFO and
    /// W-TinyLFU, where all missed rows are 0.3 to 9.3 behind).
    pub const DEFAULT: Self = Self::Frequency { misses: 2 };
}

/// The cache. Shared by reference between any number of workers.
#[derive(Debug)]
pub struct FlatCache {
    shared: Arc<Shared>,
    /// Stops and joins its thread when dropped.
    _evictor: Option<Evictor>,
}

impl FlatCache {
    /// Takes the memory and, if asked to, starts the evicting thread.
    ///
    /// # Errors
    /// [`CacheError`] where the bytes do not hold a row of each size, the tables' ids do not fit
    /// 64 bits, an option is out of its range, or the system refuses the memory.
    pub fn new(shape: &CacheShape, options: &CacheOptions) -> Result<Self, CacheError> {
        check(options)?;
        let rows: Vec<u64> = shape.tables.iter().map(|t| t.rows).collect();
        let keys = RowKeys::new(&rows, options.key_width)?;
        let plan = shape.plan(&keys, options)?;
        let refused = |source| CacheError::Memory { bytes: plan.bytes(), source };
        let class = |t: &TableShape| plan.layout.slabs.class(t.row_bytes);
        let shared = Arc::new(Shared {
            classes: plan.slots.iter().filter_map(class).collect(),
            tables: shape.tables.clone(),
            index: Index::new(plan.layout.buckets).map_err(refused)?,
            pool: Pool::new(plan.layout.slabs.clone()).map_err(refused)?,
            epochs: Epochs::default(),
            current: Replaceable::new(version::Current::new(options.version)),
            switching: Mutex::default(),
            admission: admission(options, plan.sketch_bytes),
            eviction: eviction(options, &keys, plan.ranked),
            keys,
            watermarks: options.watermarks,
            pointers: pointers::Pointers::new(shape.tables.len(), options.pointers),
            limbo: RetireList::default(),
            sweep: Mutex::default(),
            wake: Arc::default(),
            starved: AtomicU64::new(0),
            counts: Counts {
                tables: shape.tables.iter().map(|_| TableCounts::default()).collect(),
                ..Counts::default()
            },
        });
        let stepped = shared.clone();
        let start = || Evictor::start(&shared.wake, move || stepped.evict_step());
        let evictor = options.background.then(start).transpose();
        Ok(Self { _evictor: evictor.map_err(refused)?, shared })
    }

    /// Begins a batch. What it finds stays readable until the pin is dropped.
    #[must_use]
    pub fn pin(&self) -> BatchPin<'_> {
        BatchPin::new(&self.shared)
    }

    /// Makes a version current for the batches that begin from now on. `changed` are its rows that are not
    /// the same in the version before; those that the cache holds are carried over.
    ///
    /// Waits for the batches of the version before, so it is not for a request's path, nor for a thread that has
    /// a pin. One switch at a time: others wait.
    ///
    /// # Errors
    /// [`CacheError`] where the version is not newer than the current one, or a row is not one of the tables'.
    /// Nothing has changed then.
    pub fn switch<'r>(
        &self,
        version: Version,
        changed: impl IntoIterator<Item = (TableId, u64, &'r [u8])>,
    ) -> Result<Switched, CacheError> {
        self.shared.switch(version, changed)
    }

    /// The version of the batches that begin now.
    #[must_use]
    pub fn version(&self) -> Version {
        self.shared.current.read().version
    }

    /// Lets the unified index point at rows of this table, which the caller holds in RAM until it drops
    /// what it gets.
    ///
    /// # Errors
    /// [`CacheError::Table`] where there is no such table.
    pub fn host_rows(&self, table: TableId) -> Result<HostRows, CacheError> {
        let tables = self.shared.tables.len();
        if table.index() >= tables {
            return Err(CacheError::Table { got: table.index(), tables });
        }
        Ok(HostRows::new(self.shared.clone(), table))
    }

    /// Tells the cache how long a batch took to get its rows: what the size of the unified index is tuned by.
    pub fn observe(&self, ids: u64, elapsed: Duration) {
        self.shared.observe(ids, elapsed);
    }

    /// Sets how many pointers the unified index may have, until the tuner decides otherwise.
    pub fn set_pointers(&self, capacity: u64) {
        self.shared.pointers.allow(capacity);
    }

    /// The rows that the cache holds, the last used first.
    #[must_use]
    pub fn hot_rows(&self) -> Vec<(TableId, u64)> {
        self.shared.hot_rows()
    }

    /// Evicts for a while if the cache is past its high watermark or on its way down from it, and
    /// frees what no batch can read any more. Returns whether there is more to do. This is what
    /// the evicting thread calls.
    pub fn evict_step(&self) -> EvictStep {
        self.shared.evict_step()
    }

    /// The counts.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        self.shared.stats()
    }
}

fn admission(options: &CacheOptions, sketch_bytes: usize) -> Admission {
    match options.admission {
        AdmissionOption::Probability { p, seed } => Admission::Probability(Probability::new(p, seed)),
        AdmissionOption::Frequency { misses } => Admission::Frequency(Sketch::new(sketch_bytes, misses)),
    }
}

/// The policy, with ranks of the first so many rows.
fn eviction(options: &CacheOptions, keys: &RowKeys, ranked: usize) -> Eviction {
    // A row that does not exist gets a key that no entry has.
    let key = |&(table, id): &(TableId, u64)| keys.index_keys().encode(table, id).unwrap_or(TOMBSTONE);
    Eviction::new(&options.eviction, ranked, key)
}

fn check(options: &CacheOptions) -> Result<(), CacheError> {
    let Watermarks { high, low } = options.watermarks;
    let admission = match options.admission {
        AdmissionOption::Probability { p, .. } => {
            ("cache.admission_probability", "a probability from 0 to 1", p, 0.0, 1.0)
        }
        AdmissionOption::Frequency { misses } => {
            ("cache.admission_misses", "1 to 15 misses", f64::from(misses), 1.0, 15.0)
        }
    };
    let bounds = [
        admission,
        ("cache.high_watermark", "a share above 0, at most 1", high, f64::MIN_POSITIVE, 1.0),
        ("cache.low_watermark", "a share above 0, at most the high watermark", low, f64::MIN_POSITIVE, high),
    ];
    match bounds.into_iter().find(|(_, _, got, least, most)| !(least..=most).contains(&got)) {
        Some((field, expected, got, ..)) => Err(CacheError::Option { field, expected, got }),
        None => Ok(()),
    }
}
