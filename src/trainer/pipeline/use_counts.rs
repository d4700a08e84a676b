//! How often a data set uses each row. LFU needs this frequency for each row that is fetched
//! (frequency-aware cache, section 4).

use bytemuck::{Pod, Zeroable};

use crate::mem::OutOfHostMemory;
use crate::mem::probe_table::{Bucket, ProbeTable, Tag};
use crate::types::RowId;

/// Counts by row. They never change.
#[derive(Debug)]
pub(crate) struct UseCounts(ProbeTable<CountBucket>);

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct CountBucket {
    row: RowId,
    count: u32,
    /// 0 if the bucket is empty, else 1.
    used: u32,
}

impl Bucket for CountBucket {
    #[inline(always)]
    fn is_empty(&self) -> bool {
        self.used == 0
    }

    #[inline(always)]
    fn tag(&self) -> Tag {
        Tag::of(self.row.number())
    }
}

impl UseCounts {
    /// The counts of these rows, which are distinct.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the allocation fails.
    pub(crate) fn new(rows: impl ExactSizeIterator<Item = (RowId, u32)>) -> Result<Self, OutOfHostMemory> {
        let mut table = ProbeTable::new(rows.len())?;
        rows.for_each(|(row, count)| table.insert(CountBucket { row, count, used: 1 }));
        Ok(Self(table))
    }

    /// Prefetches the cache line that [`Self::get`] reads first.
    #[inline(always)]
    pub(crate) fn prefetch(&self, row: RowId) {
        self.0.prefetch(Tag::of(row.number()));
    }

    /// The row's count; 0 if it has none.
    #[inline]
    pub(crate) fn get(&self, row: RowId) -> u32 {
        let bucket = self.0.find(Tag::of(row.number()), |bucket| bucket.row == row);
        bucket.map_or(0, |bucket| bucket.count)
    }
}

#[cfg(test)]
mod tests;
