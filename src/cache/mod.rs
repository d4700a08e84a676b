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
//!     pin.insert(miss.table, miss.id, &fetched)?;
//! }
//! match found.source(0) {
//!     Source::Row(row) => println!("{row:?}"), // in the cache, until the pin is dropped
//!     Source::Miss(m) => println!("miss {m}"), // where the caller put `found.misses()[m]`
//! }
//! # Ok(()) }
//! ```
//!
//! - [`device`]: the same cache in the memory of a CUDA device;
//! - [`key`]: ids of all tables as one space of integers;
//! - [`index`]: key to location, read without a lock;
//! - `slab`: the memory of the rows; `slots`: which of it is free;
//! - [`epoch`]: when an evicted row's memory may be used again;
//! - [`policy`]: what is let in and what is put out;
//! - [`query`]: a batch's keys, deduplicated and probed;
//! - [`shape`]: how `cache.bytes` is divided.
//!
//! **Exactness.** A row is copied into a slot that nobody reads, and only then linked under its
//! key. It is never written again while it is linked, nor after, until no batch that could have
//! found it is unfinished. So whatever a batch reads through its pin is the row that was inserted
//! for that table and id, whole.
//!
//! **What waits for what.** Lookups take no lock. Inserts take short ones against each other.
//! Evictions happen on a thread of the cache's own, woken past the high watermark; until it has
//! made room, rows that do not fit are simply not cached, and counted.

pub mod device;
pub mod epoch;
mod evictor;
pub mod index;
pub mod key;
pub mod policy;
pub mod query;
pub mod shape;
pub(crate) mod slab;
mod slots;
#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::types::{ROW_ALIGN, TableId};
use epoch::{Epochs, Limbo};
use evictor::{Evictor, Sweep};
use index::{Held, Index, Link, Location, Stamp, Unlinked};
use key::{FlatKeys, KeyError, KeyWidth};
use policy::{Admission, Watermarks};
use query::Place;
pub use query::{Miss, Query};
pub use shape::{CacheShape, TableShape};
use slab::{Class, Pool};

/// The default watermarks, for which `cache.fraction` makes room.
pub const WATERMARKS: Watermarks = Watermarks { high: 0.95, low: 0.9 };

/// Most unlinked slots that wait for batches to finish: 1 MiB of records. While so many wait,
/// nothing more is evicted.
const MAX_WAITING: usize = 1 << 16;

/// What may be chosen about a cache besides its size.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheOptions {
    /// The probability with which a missed row is let in, 0 to 1.
    pub admission: f64,
    /// Seed of the admission's draws.
    pub seed: u64,
    /// Between which shares of its memory the cache moves.
    pub watermarks: Watermarks,
    /// Whether the cache evicts on a thread of its own. Without, the owner calls
    /// [`FlatCache::evict_step`].
    pub background: bool,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self { admission: 1.0, seed: 0, watermarks: WATERMARKS, background: true }
    }
}

/// Why a cache could not be made, or does not take what it was given.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The bound is below what one row of each size takes.
    #[error("cache.bytes: {got} cannot hold a row of each of {sizes} row sizes, minimum {minimum}")]
    TooSmall {
        /// The bound.
        got: usize,
        /// The least bound for these tables.
        minimum: usize,
        /// How many different row sizes the tables have.
        sizes: usize,
    },
    /// An option is not a share, or the low watermark is above the high one.
    #[error("{field}: expected {expected}, got {got}")]
    Option {
        /// Which option.
        field: &'static str,
        /// What it may be.
        expected: &'static str,
        /// What it was.
        got: f64,
    },
    /// The tables have no flat keys.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The system gave no memory.
    #[error("cache.bytes: {bytes} bytes refused: {source}")]
    Memory {
        /// What was asked for.
        bytes: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// There is no such table.
    #[error("table {got}: expected one of {tables} tables")]
    Table {
        /// The table's place.
        got: usize,
        /// How many there are.
        tables: usize,
    },
    /// The table has no such row.
    #[error("table {table}: id {got} is past its {rows} rows")]
    Id {
        /// The table's place.
        table: usize,
        /// The id.
        got: u64,
        /// How many rows there are.
        rows: u64,
    },
    /// A row is not as long as its table's are.
    #[error("table {table}: expected rows of {expected} bytes, got {got}")]
    RowBytes {
        /// The table's place.
        table: usize,
        /// What came.
        got: usize,
        /// The length of the table's rows.
        expected: usize,
    },
    /// A table's rows have a length that no slot has.
    #[error("table {table}: row bytes: expected a multiple of {ROW_ALIGN} above 0, got {got}")]
    RowAlign {
        /// The table's place.
        table: usize,
        /// What came.
        got: usize,
    },
    /// A batch has more ids than a lookup can number.
    #[error("batch: {got} ids, limit {limit}")]
    Occurrences {
        /// What came.
        got: usize,
        /// The limit.
        limit: usize,
    },
}

/// What became of a row that was offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Insertion {
    /// It is found from now on.
    Stored,
    /// Another batch was first with it.
    Present,
    /// The admission policy did not let it in.
    NotAdmitted,
    /// There is no room until eviction has made some.
    Full,
}

/// One table's counts since the cache was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    /// Ids looked up and found, duplicates included.
    pub hits: u64,
    /// Ids looked up and not found, duplicates included.
    pub misses: u64,
    /// Rows put out.
    pub evictions: u64,
}

/// A cache's counts, as plain numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// By table.
    pub tables: Vec<TableStats>,
    /// Rows that can be found now.
    pub entries: u64,
    /// How many entries the index is made for.
    pub entry_capacity: u64,
    /// Bytes of the pool that hold rows that can be found.
    pub pool_used_bytes: u64,
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// Bytes of index and pool with all their records: at most `cache.bytes`.
    pub total_bytes: u64,
    /// Rows that were copied in.
    pub inserted: u64,
    /// Rows that the admission policy did not let in.
    pub not_admitted: u64,
    /// Rows that found no room.
    pub rejected_full: u64,
}

/// The cache. Shared by reference between any number of workers.
#[derive(Debug)]
pub struct FlatCache {
    shared: Arc<Shared>,
    /// Stops and joins its thread when dropped.
    _evictor: Option<Evictor>,
}

/// What the evictor's thread sees too.
#[derive(Debug)]
struct Shared {
    keys: FlatKeys,
    tables: Vec<TableShape>,
    classes: Vec<Class>,
    index: Index,
    pool: Pool,
    epochs: Epochs,
    admission: Admission,
    watermarks: Watermarks,
    /// Slots out of the index.
    limbo: Limbo,
    sweep: Mutex<Sweep>,
    wake: Arc<evictor::Wake>,
    /// A class that found no slot, plus one: where there is space, slabs are to change their size.
    starved: AtomicU64,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    tables: Vec<TableCounts>,
    /// Bytes of linked rows, their shares of the slabs' ends included.
    linked_bytes: AtomicU64,
    inserted: AtomicU64,
    not_admitted: AtomicU64,
    rejected_full: AtomicU64,
}

#[derive(Debug, Default)]
struct TableCounts {
    hits: AtomicU64,
    misses: AtomicU64,
    evictions: AtomicU64,
}

impl FlatCache {
    /// Takes the memory and, if asked to, starts the evicting thread.
    ///
    /// # Errors
    /// [`CacheError`] where the bytes do not hold a row of each size, the tables' ids do not fit
    /// 64 bits, an option is out of its range, or the system refuses the memory.
    pub fn new(shape: &CacheShape, options: &CacheOptions) -> Result<Self, CacheError> {
        check(options)?;
        let layout = shape.layout()?;
        let rows: Vec<u64> = shape.tables.iter().map(|t| t.rows).collect();
        let keys = FlatKeys::new(&rows, KeyWidth::W64)?;
        let refused = |source| CacheError::Memory { bytes: layout.bytes(), source };
        let class = |t: &TableShape| layout.slabs.class(t.row_bytes);
        let shared = Arc::new(Shared {
            keys,
            classes: shape.tables.iter().filter_map(class).collect(),
            tables: shape.tables.clone(),
            index: Index::new(layout.buckets).map_err(refused)?,
            pool: Pool::new(layout.slabs.clone()).map_err(refused)?,
            epochs: Epochs::default(),
            admission: Admission::new(options.admission, options.seed),
            watermarks: options.watermarks,
            limbo: Limbo::default(),
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
        BatchPin { cache: &self.shared, pin: self.shared.epochs.pin() }
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

pub use evictor::EvictStep;

fn check(options: &CacheOptions) -> Result<(), CacheError> {
    let Watermarks { high, low } = options.watermarks;
    let bounds = [
        ("cache.admission", "a probability from 0 to 1", options.admission, 0.0, 1.0),
        ("cache.high_watermark", "a share above 0, at most 1", high, f64::MIN_POSITIVE, 1.0),
        ("cache.low_watermark", "a share above 0, at most the high watermark", low, f64::MIN_POSITIVE, high),
    ];
    match bounds.into_iter().find(|(_, _, got, least, most)| !(least..=most).contains(&got)) {
        Some((field, expected, got, ..)) => Err(CacheError::Option { field, expected, got }),
        None => Ok(()),
    }
}

/// A batch's hold on the cache, and its way to it.
///
/// Keep it for one batch: while it lives, slots evicted since it began are not used again.
#[derive(Debug)]
pub struct BatchPin<'c> {
    cache: &'c Shared,
    pin: epoch::Pin<'c>,
}

impl BatchPin<'_> {
    /// The batch's number; later pins have larger ones.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.pin.number()
    }

    /// Looks up every id that was pushed to `query`, each distinct row once.
    ///
    /// # Errors
    /// [`CacheError`] for a table or an id that the cache was not made for.
    pub fn lookup<'q>(&'q self, query: &'q mut Query) -> Result<Found<'q>, CacheError> {
        let Shared { keys, tables, index, counts, .. } = self.cache;
        query.deduplicate(keys, tables)?;
        query.probe(index, keys, &self.pin);
        for (counts, tally) in counts.tables.iter().zip(query.tallies()) {
            if tally.hits > 0 {
                counts.hits.fetch_add(tally.hits, Ordering::Relaxed);
            }
            if tally.misses > 0 {
                counts.misses.fetch_add(tally.misses, Ordering::Relaxed);
            }
        }
        Ok(Found { cache: self.cache, pin: &self.pin, query })
    }

    /// Offers a row's bytes: copied in first, then found by everyone. Never waits for room.
    ///
    /// # Errors
    /// [`CacheError`] for a table, an id or a length that the cache was not made for.
    pub fn insert(&self, table: TableId, id: u64, row: &[u8]) -> Result<Insertion, CacheError> {
        self.cache.insert(self.pin.number(), table, id, row)
    }

    /// Offers rows one after the other. Returns how many were stored.
    ///
    /// # Errors
    /// As [`Self::insert`], for the first row that is refused; those before it are in.
    pub fn insert_all<'r>(
        &self,
        rows: impl IntoIterator<Item = (TableId, u64, &'r [u8])>,
    ) -> Result<u64, CacheError> {
        let mut stored = 0;
        for (table, id, row) in rows {
            stored += u64::from(self.insert(table, id, row)? == Insertion::Stored);
        }
        Ok(stored)
    }
}

/// What a lookup found. Lives as long as its pin and its query are left alone.
#[derive(Clone, Copy, Debug)]
pub struct Found<'q> {
    cache: &'q Shared,
    pin: &'q epoch::Pin<'q>,
    query: &'q Query,
}

/// Where one distinct row of a batch is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source<'q> {
    /// In the cache: its bytes, as they were inserted.
    Row(&'q [u8]),
    /// Nowhere yet: it is `misses()[m]`.
    Miss(usize),
}

impl<'q> Found<'q> {
    /// Of every occurrence, in the order of the pushes: its distinct row, numbered from 0 in the order
    /// of first occurrences.
    #[must_use]
    pub fn uniques(&self) -> &'q [u32] {
        self.query.uniques()
    }

    /// How many distinct rows there are.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.query.rows().len()
    }

    /// The distinct rows that the cache does not hold, in ascending order of `unique`.
    #[must_use]
    pub fn misses(&self) -> &'q [Miss] {
        self.query.misses()
    }

    /// Where a distinct row is; `unique` is below [`Self::rows`].
    #[inline]
    #[must_use]
    pub fn source(&self, unique: u32) -> Source<'q> {
        let row = &self.query.rows()[unique as usize];
        match row.place {
            Place::Miss(m) => Source::Miss(m as usize),
            Place::Slot(location) => {
                let bytes = self.cache.tables[row.table.index()].row_bytes;
                let held = Held::again(location, self.query.batch(), self.pin);
                Source::Row(self.cache.pool.row(held, bytes))
            }
        }
    }
}

impl Shared {
    fn insert(&self, batch: u64, table: TableId, id: u64, row: &[u8]) -> Result<Insertion, CacheError> {
        let key = self.key(table, id, row.len())?;
        if !self.admission.admits(key, batch) {
            self.counts.not_admitted.fetch_add(1, Ordering::Relaxed);
            return Ok(Insertion::NotAdmitted);
        }
        let class = self.classes[table.index()];
        let Some(mut slot) = self.take(class) else {
            self.counts.rejected_full.fetch_add(1, Ordering::Relaxed);
            self.starved.store(u64::from(class.0) + 1, Ordering::Relaxed);
            self.wake.now();
            return Ok(Insertion::Full);
        };
        self.pool.fill(&mut slot, row);
        let location = slot.location();
        let replace = self.limbo.waiting() < MAX_WAITING;
        let link = self.index.insert(key, location, Stamp::of(batch), replace);
        if matches!(link, Link::Present | Link::Full) {
            self.pool.put_back(slot);
        } else {
            self.counts.inserted.fetch_add(1, Ordering::Relaxed);
            self.counts.linked_bytes.fetch_add(self.pool.shape().footprint(class) as u64, Ordering::Relaxed);
        }
        Ok(match link {
            Link::Present => Insertion::Present,
            Link::Full => {
                self.counts.rejected_full.fetch_add(1, Ordering::Relaxed);
                Insertion::Full
            }
            Link::New => {
                if self.crossed() {
                    self.wake.now();
                }
                Insertion::Stored
            }
            Link::Replaced(unlinked) => {
                self.retire(unlinked);
                self.wake.now();
                Insertion::Stored
            }
        })
    }

    /// The key of a row, if it is one of these tables' and so long.
    fn key(&self, table: TableId, id: u64, bytes: usize) -> Result<crate::types::FlatKey, CacheError> {
        let Some(code) = self.keys.code(table) else {
            return Err(CacheError::Table { got: table.index(), tables: self.tables.len() });
        };
        let expected = self.tables[table.index()].row_bytes;
        if bytes != expected {
            return Err(CacheError::RowBytes { table: table.index(), got: bytes, expected });
        }
        code.key(id).ok_or(CacheError::Id { table: table.index(), got: id, rows: code.rows() })
    }

    /// A slot, if need be one that unfinished batches kept until just now.
    fn take(&self, class: Class) -> Option<slab::Slot> {
        self.pool.take(class).or_else(|| {
            self.reclaim();
            self.pool.take(class)
        })
    }

    /// Counts an entry out and puts its slot aside until no batch can read it.
    fn retire(&self, unlinked: Unlinked) {
        if let Some((table, _)) = self.keys.decode(unlinked.key) {
            let footprint = self.pool.shape().footprint(self.classes[table.index()]) as u64;
            self.counts.linked_bytes.fetch_sub(footprint, Ordering::Relaxed);
            self.counts.tables[table.index()].evictions.fetch_add(1, Ordering::Relaxed);
        }
        self.limbo.put(unlinked, &self.epochs);
    }

    /// Frees the slots whose batches are all finished. Returns how many still wait.
    fn reclaim(&self) -> usize {
        self.limbo.reclaim(&self.epochs, |slot| self.pool.free(slot))
    }

    fn crossed(&self) -> bool {
        let (entries, bytes) = self.used();
        self.watermarks.crossed(entries, self.index.capacity())
            || self.watermarks.crossed(bytes, self.pool.shape().data_bytes() as u64)
    }

    /// Entries, and bytes of the pool, in use.
    fn used(&self) -> (u64, u64) {
        (self.index.entries(), self.counts.linked_bytes.load(Ordering::Relaxed))
    }

    fn stats(&self) -> CacheStats {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let table = |t: &TableCounts| TableStats {
            hits: load(&t.hits),
            misses: load(&t.misses),
            evictions: load(&t.evictions),
        };
        let (entries, pool_used_bytes) = self.used();
        CacheStats {
            tables: self.counts.tables.iter().map(table).collect(),
            entries,
            entry_capacity: self.index.capacity(),
            pool_used_bytes,
            pool_bytes: self.pool.shape().data_bytes() as u64,
            total_bytes: (self.pool.shape().bytes() + self.index.buckets() * index::BUCKET_BYTES) as u64,
            inserted: load(&self.counts.inserted),
            not_admitted: load(&self.counts.not_admitted),
            rejected_full: load(&self.counts.rejected_full),
        }
    }
}
