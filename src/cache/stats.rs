//! What a cache counts, and the counts as plain numbers.

use std::sync::atomic::{AtomicU64, Ordering};

use super::query::Tally;

/// One table's counts since the cache was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    /// Ids found in the cache, duplicates included; and the repeats of a missed row within its batch, since the row is
    /// fetched once.
    pub hits: u64,
    /// Ids found as pointers into the store's memory, duplicates included.
    pub pointed: u64,
    /// Rows not found, once for each batch.
    pub misses: u64,
    /// Ids not found because another row of the table has their index key, duplicates included.
    pub collisions: u64,
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
    /// Of the entries, those that point into the store's RAM.
    pub pointers: u64,
    /// Bytes of the pool that hold rows that can be found.
    pub pool_used_bytes: u64,
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// Bytes of index and pool with all their records, and of the policies: at most `cache.bytes`.
    pub total_bytes: u64,
    /// Rows that were copied in.
    pub inserted: u64,
    /// Rows that the admission policy did not let in.
    pub not_admitted: u64,
    /// Rows that found no room.
    pub rejected_full: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub tables: Vec<TableCounts>,
    /// Bytes of linked rows, their shares of the slabs' ends included.
    pub linked_bytes: AtomicU64,
    pub inserted: AtomicU64,
    pub not_admitted: AtomicU64,
    pub rejected_full: AtomicU64,
}

#[derive(Debug, Default)]
pub(crate) struct TableCounts {
    pub hits: AtomicU64,
    pub pointed: AtomicU64,
    pub misses: AtomicU64,
    pub collisions: AtomicU64,
    pub evictions: AtomicU64,
}

impl TableCounts {
    /// Adds a lookup's accesses; what did not happen costs nothing.
    pub(crate) fn add(&self, tally: &Tally) {
        let counts = [
            (&self.hits, tally.hits),
            (&self.pointed, tally.pointed),
            (&self.misses, tally.misses),
            (&self.collisions, tally.collisions),
        ];
        for (count, more) in counts {
            if more > 0 {
                count.fetch_add(more, Ordering::Relaxed);
            }
        }
    }

    /// The counts as of now, one after the other.
    pub(crate) fn read(&self) -> TableStats {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        TableStats {
            hits: load(&self.hits),
            pointed: load(&self.pointed),
            misses: load(&self.misses),
            collisions: load(&self.collisions),
            evictions: load(&self.evictions),
        }
    }
}
