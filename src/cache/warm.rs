//! Fills a cache with rows that are known to be hot, before its first batch.
//!
//! Rows are inserted in descending heat without the admission policy, up to the high watermark, so filling
//! never evicts. Their stamps descend: the first rows look as if the newest batch had used them, the last as
//! if unused for long. So the coldest of them are evicted first, and rows that batches use later are hotter
//! than nearly all.

use std::sync::PoisonError;

use super::FlatCache;
use super::error::CacheError;
use super::index::{Entry, Stamp};
use super::shared::{Insertion, Shared};
use crate::types::TableId;

/// The number of different stamps for the rows of a full index: enough for an order that eviction, which
/// works by samples, can see, and few of the 2^24 stamps.
pub(crate) const STAMPS: u64 = 1 << 12;

/// The result of filling a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Warmed {
    /// Rows that were inserted.
    pub stored: u64,
    /// Rows that were cached already, or for whose size there was no slot.
    pub passed_over: u64,
    /// Whether the cache was full before the rows ended.
    pub full: bool,
}

impl FlatCache {
    /// Fills the cache with rows of its current version, the hottest first, without the admission policy, up
    /// to the high watermark. A version switch waits for it. Takes no more items from `rows` than fit, and
    /// one more. Call it before the first batch; concurrent batches may make it skip rows.
    ///
    /// # Errors
    /// When a table or an id does not exist, or a length is not that of its table's rows. The rows before it
    /// are cached.
    pub(crate) fn warm<'r>(
        &self,
        rows: impl IntoIterator<Item = (TableId, u64, &'r [u8])>,
    ) -> Result<Warmed, CacheError> {
        let shared = &*self.shared;
        // The current version, to which the rows belong, must not change meanwhile.
        let _no_switch = shared.switching.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = shared.epochs.tag();
        let rows_a_stamp = (shared.index.capacity() / STAMPS).max(1);
        let mut warmed = Warmed::default();
        let mut rows = rows.into_iter();
        while shared.has_room() {
            let Some((table, id, row)) = rows.next() else { return Ok(warmed) };
            let stamp = Stamp::of(newest.wrapping_sub(warmed.stored / rows_a_stamp));
            match shared.insert_warm(stamp, table, id, row)? {
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
        let largest = self.classes.iter().map(|class| self.pool.shape().footprint(*class) as u64).max();
        fill.entries.0 += 1;
        fill.bytes.0 += largest.unwrap_or(0);
        !fill.crosses(&self.watermarks)
    }

    /// Inserts a row with a stamp, unless its key is linked already or there is no slot. Returns whether it
    /// did.
    fn insert_warm(&self, stamp: Stamp, table: TableId, id: u64, row: &[u8]) -> Result<bool, CacheError> {
        let own = self.own_key(table, id, row.len())?;
        let Some(mut slot) = self.take(self.classes[table.index()]) else { return Ok(false) };
        self.fill(&mut slot, table, own, row);
        let (_, key) = self.keys.row(table, own);
        let entry = Entry { key, location: slot.location(), now: stamp };
        // The first of the rows that share a key is the hottest, so it is kept. Nothing is replaced.
        let linked = self.link(table, entry, None, |_| true) == Insertion::Stored;
        if !linked {
            self.pool.put_back(slot);
        }
        Ok(linked)
    }
}
