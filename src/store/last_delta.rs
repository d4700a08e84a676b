//! Reads rows of a version's last delta. Rows that are requested in ascending order are found without a
//! search.
//!
//! The rows that change at a switch are the keys of the last delta, one table after the other. The overlay
//! finds a row in a hash table, which misses the caches of the processor: that took more than half of a
//! switch. Here the keys are read in order.

use super::EmbeddingStore;
use crate::types::{RowId, TableId};

pub(crate) struct LastDeltaRows<'s> {
    store: &'s EmbeddingStore,
    table: TableId,
    /// Keys before this one are not above the last row.
    at: usize,
}

impl<'s> LastDeltaRows<'s> {
    pub(crate) fn new(store: &'s EmbeddingStore) -> Self {
        Self { store, table: TableId(0), at: 0 }
    }

    /// The bytes of a row; `None` if the last delta of its table has not changed it. Fast for a row after the
    /// last one, in the same table; others are found by bisection.
    pub(crate) fn row(&mut self, row: RowId) -> Option<&'s [u8]> {
        let (table, id) = (self.store.table(row.table())?, row.row());
        let delta = table.deltas().last()?;
        let keys = delta.keys();
        if row.table() != self.table || self.at > keys.len() || (self.at > 0 && keys[self.at - 1] >= id) {
            (self.table, self.at) = (row.table(), keys.partition_point(|&key| key < id));
        }
        self.at += keys[self.at..].iter().take_while(|&&key| key < id).count();
        let start = self.at * table.row_bytes();
        let bytes = || delta.weight.as_slice().get(start..start + table.row_bytes());
        if *keys.get(self.at)? == id { bytes() } else { None }
    }
}
