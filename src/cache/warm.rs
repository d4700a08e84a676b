//! Fills a cache with rows that are known to be hot, before its first batch.
//!
//! The hottest rows are inserted first, without the admission policy, up to the high watermark, so filling
//! never evicts. The stamps descend: the first rows look as if the newest batch had used them, and the last
//! rows as if they were unused for long. So eviction removes the coldest of them first, and rows that batches
//! use later look hotter than nearly all of them.

use super::FlatCache;
use super::error::CacheError;
use super::index::{Entry, Stamp};
use super::shared::{Insertion, Shared};
use crate::sync::EvenPoisoned;
use crate::types::RowId;

/// The number of different stamps for the rows of a full index. It is large enough that eviction, which
/// samples ages, can tell hot rows from cold rows, and small among the 2^24 possible stamps.
pub(crate) const STAMPS: u64 = 1 << 12;

/// A row to fill a cache with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WarmRow<'r> {
    pub row: RowId,
    pub bytes: &'r [u8],
}

/// The result of filling a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Warmed {
    /// Rows that were inserted.
    pub stored: u64,
    /// Rows that found no free slot, or with a key that was linked already.
    pub passed_over: u64,
    /// Whether rows were left when the cache was full.
    pub full: bool,
}

impl FlatCache {
    /// Fills the cache with rows of its current version, the hottest first, without the admission policy, up
    /// to the high watermark. Waits for earlier batches; version switches wait until it returns. Takes at
    /// most one more item from `rows` than fits. Call it before the first batch, or after a switch with rows
    /// that the switch has dropped. Concurrent batches may make it skip rows.
    ///
    /// # Errors
    /// When a table or an id does not exist, or a length is not that of its table's rows. Then the rows
    /// before the wrong one are cached.
    pub(crate) fn warm<'r>(&self, rows: impl IntoIterator<Item = WarmRow<'r>>) -> Result<Warmed, CacheError> {
        let shared = &*self.shared;
        // The current version, to which the rows belong, must not change meanwhile.
        let _no_switch = shared.switching.lock().even_poisoned();
        // The slots of rows that a switch has just removed are free after these batches.
        shared.epochs.wait_for_earlier();
        let newest = shared.epochs.tag();
        let rows_per_stamp = (shared.entry_capacity() / STAMPS).max(1);
        let mut warmed = Warmed::default();
        let mut rows = rows.into_iter();
        while shared.has_room() {
            let Some(row) = rows.next() else { return Ok(warmed) };
            let stamp = Stamp::of(newest.wrapping_sub(warmed.stored / rows_per_stamp));
            match shared.insert_warm(stamp, row)? {
                true => warmed.stored += 1,
                false => warmed.passed_over += 1,
            }
        }
        Ok(Warmed { full: rows.next().is_some(), ..warmed })
    }
}

impl Shared {
    /// Whether one more row of the largest size leaves the cache below its high watermark.
    fn has_room(&self) -> bool {
        let mut fill = self.fill_level();
        fill.entries.used += 1;
        fill.bytes.used += self.largest();
        !fill.crosses()
    }

    /// Inserts a row with a stamp, unless its key is linked already or no slot is free. Returns whether the
    /// row was inserted.
    fn insert_warm(&self, stamp: Stamp, WarmRow { row, bytes }: WarmRow<'_>) -> Result<bool, CacheError> {
        let table = row.table();
        let own = self.own_key(row, bytes.len())?;
        let Some(mut slot) = self.take(self.classes[table.index()]) else { return Ok(false) };
        self.fill(&mut slot, table, own, bytes);
        let (_, key) = self.keys.row(table, own);
        let entry = Entry { key, location: slot.location(), now: stamp };
        // Of rows that share a key, the first is the hottest. So it is kept, and nothing is replaced.
        let linked = self.link(table, entry, None, |_| true) == Insertion::Stored;
        if !linked {
            self.pool.put_back(slot);
        }
        Ok(linked)
    }
}
