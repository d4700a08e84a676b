//! The counters of a cache, and a snapshot of them.

use std::sync::atomic::{AtomicU64, Ordering};

use super::query::Tally;

/// One table's counts since the cache was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    /// Ids found in the cache, duplicates included. The repeats of a missed row within its batch count too,
    /// since the row is fetched once.
    pub hits: u64,
    /// Ids found as pointers into the store's memory, duplicates included.
    pub pointed: u64,
    /// Rows not found. A row counts once per batch.
    pub misses: u64,
    /// Ids not found because another row of the table has their index key, duplicates included.
    pub collisions: u64,
    /// Rows evicted, replaced by another row, or removed by a version switch.
    pub evictions: u64,
}

/// A snapshot of a cache's counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Counts by table.
    pub tables: Vec<TableStats>,
    /// Index entries in use.
    pub entries: u64,
    /// Index entries when the index is full: 0.8 of its slots.
    pub entry_capacity: u64,
    /// Entries that point into the store's memory.
    pub pointers: u64,
    /// Bytes of the pool that linked rows occupy.
    pub pool_used_bytes: u64,
    /// Bytes of the pool's slabs.
    pub pool_bytes: u64,
    /// Bytes of index, pool, their records, and policies: at most `cache.bytes`.
    pub total_bytes: u64,
    /// Rows inserted.
    pub inserted: u64,
    /// Rows that the admission policy rejected.
    pub not_admitted: u64,
    /// Rows rejected because there was no room.
    pub rejected_full: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub tables: Vec<TableCounts>,
    /// Bytes of linked rows, including their shares of the slabs' unused ends.
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
    /// Adds a lookup's accesses. A zero costs no atomic operation.
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

    /// A snapshot, not atomic across counters.
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
