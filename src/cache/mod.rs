//! The flat cache (FLECHE sections 3 and 4): rows of every table in one bounded memory, found by
//! one index, so that the hottest rows of the whole model share it, whatever table they are of.
//!
//! A batch travels through it like this:
//!
//! ```
//! # use flechette::cache::{CacheOptions, CacheShape, FlatCache, Query, Source, TableShape};
//! # use flechette::types::TableId;
//! # fn main() -> Result<(), flechette::cache::CacheError> {
//! let tables = vec![TableShape { rows: 1000, dim: 2 }, TableShape { rows: 10, dim: 1 }];
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
//!     let fetched = vec![0.5; if miss.table == TableId(0) { 2 } else { 1 }];
//!     pin.insert(miss.table, miss.id, &fetched)?;
//! }
//! match found.source(0) {
//!     Source::Row(row) => println!("{row:?}"), // in the cache, until the pin is dropped
//!     Source::Miss(m) => println!("miss {m}"), // where the caller put `found.misses()[m]`
//! }
//! # Ok(()) }
//! ```
//!
//! - [`key`]: ids of all tables as one space of integers;
//! - [`index`]: key to location, read without a lock;
//! - [`slab`]: the memory of the rows;
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
