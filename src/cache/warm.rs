//! Filling a cache before its first batch with rows that are known to be hot.
//!
//! Rows come the hottest first and are let in without asking the admission policy, as far as there is room
//! below the high watermark, so that filling never evicts. Their stamps go backwards: the first rows are as
//! if used by the newest batch, the last as if long ago, and so the coldest of them leave first. Whatever a
//! batch uses from then on is hotter than all of them but the first.

use std::sync::PoisonError;

use super::FlatCache;
use super::error::CacheError;
use super::index::{Entry, Stamp};
use super::shared::{Insertion, Shared};
use crate::types::TableId;

/// Into how many stamps the rows of a full index are divided: fine enough that eviction, which works by
/// samples, sees an order, and nothing beside the 2^24 stamps there are.
pub(crate) const STAMPS: u64 = 1 << 12;

/// What became of the rows that a cache was to be filled with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Warmed {
    /// Rows that are found from now on.
    pub stored: u64,
    /// Rows that were asked for and were there already, or found no room of their size.
    pub passed_over: u64,
    /// Whether there was no room for more, so that the rest was not asked for.
    pub full: bool,
}

impl FlatCache {
    /// Fills the cache with rows of its current version, the hottest first, bypassing admission, up to the high
    /// watermark. A switch waits for it. The rows are asked for one by one, and no more of them than have room. For a time before
    /// batches: beside them it may leave out more rows than it must.
    ///
    /// # Errors
    /// [`CacheError`] for a table, an id or a length that the cache was not made for; the rows before it are
    /// in.
    pub fn warm<'r>(
        &self,
        rows: impl IntoIterator<Item = (TableId, u64, &'r [u8])>,
    ) -> Result<Warmed, CacheError> {
        let shared = &*self.shared;
        // What is current, and so whose rows these are, stays as it is meanwhile.
        let _no_switch = shared.switching.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = shared.epochs.tag();
        let rows_a_stamp = (shared.index.capacity() / STAMPS).max(1);
        let mut warmed = Warmed::default();
        let mut rows = rows.into_iter();
        while shared.has_room() {
            let Some((table, id, row)) = rows.next() else { return Ok(warmed) };
            let stamp = Stamp::of(newest.wrapping_sub(warmed.stored / rows_a_stamp));
            match shared.warm(stamp, table, id, row)? {
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

    /// Links a row under a stamp, unless its key is taken or there is no slot. Returns whether it did.
    fn warm(&self, stamp: Stamp, table: TableId, id: u64, row: &[u8]) -> Result<bool, CacheError> {
        let own = self.own_key(table, id, row.len())?;
        let Some(mut slot) = self.take(self.classes[table.index()]) else { return Ok(false) };
        self.fill(&mut slot, table, own, row);
        let (_, key) = self.keys.row(table, own);
        let entry = Entry { key, location: slot.location(), now: stamp };
        // Of rows that share a key, the first is the hottest and stays; and nothing leaves for another.
        let linked = self.link(table, entry, None, |_| true) == Insertion::Stored;
        if !linked {
            self.pool.put_back(slot);
        }
        Ok(linked)
    }
}
