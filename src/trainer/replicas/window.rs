//! The rows of a window of batches, and where each is in a replica's cache.
//!
//! A cache is one array: the records of the distinct rows of the window, table by table and in ascending
//! order. The *place* of a row is its rank among the window's rows of its table. No hash lookup is needed to
//! find places: the rows of the window and of a batch are both sorted, and one walk along both gives them.

use std::ops::Range;

use crate::trainer::casting::Casting;
use crate::trainer::pipeline::item::PreparedBatch;
use crate::trainer::pipeline::scratchpad::SlotLayout;
use crate::trainer::pipeline::slots::{Claim, ClaimError, Slots};

/// The distinct rows of a window.
pub(crate) struct Window {
    tables: Vec<WindowTable>,
}

/// Where a record is in a cache.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RecordSpan {
    start: usize,
    words: usize,
}

impl RecordSpan {
    /// The elements of the record.
    pub(crate) fn range(self) -> Range<usize> {
        self.start..self.start + self.words
    }
}

/// The records of a table in a cache, for writing.
pub(crate) struct CachedMut<'a> {
    pub records: &'a mut [f32],
    /// f32 elements of a record.
    pub words: usize,
}

/// The rows of one table.
struct WindowTable {
    /// Ascending.
    rows: Vec<u64>,
    /// The slot of each row in the scratchpad.
    slots: Vec<u32>,
    /// Index of the table's slot size in the scratchpad.
    class: usize,
    /// f32 elements of a record.
    words: usize,
    /// Index of the table's first element in a cache.
    start: usize,
}

impl WindowTable {
    fn end(&self) -> usize {
        self.start + self.rows.len() * self.words
    }
}

/// The records of one table in a cache.
#[derive(Clone, Copy)]
pub(crate) struct CachedRecords<'a> {
    records: &'a [f32],
    words: usize,
}

impl<'a> CachedRecords<'a> {
    #[inline(always)]
    pub(crate) fn record(self, place: u32) -> &'a [f32] {
        &self.records[place as usize * self.words..][..self.words]
    }
}

impl Window {
    /// The window of these batches. All their rows must be in the scratchpad. `tables` has the slot layout
    /// of each table.
    pub(crate) fn of(batches: &[PreparedBatch], tables: &[SlotLayout]) -> Self {
        let mut start = 0;
        let tables = tables.iter().enumerate().map(|(t, &SlotLayout { size: class, words })| {
            let mut rows: Vec<(u64, u32)> = Vec::new();
            for prepared in batches {
                let slots = &prepared.slots[prepared.starts[t]..prepared.starts[t + 1]];
                rows.extend(prepared.casting.tables()[t].rows().iter().copied().zip(slots.iter().copied()));
            }
            // A row keeps its slot during the window.
            rows.sort_unstable();
            rows.dedup();
            let (rows, slots) = rows.into_iter().unzip();
            let rows = WindowTable { rows, slots, class, words, start };
            start = rows.end();
            rows
        });
        Self { tables: tables.collect() }
    }

    /// Claims the slots of the rows, table by table.
    ///
    /// # Errors
    /// [`ClaimError`] when another claim has one of them.
    pub(crate) fn claim<'c>(&'c self, slots: &'c [Slots]) -> Result<Vec<Claim<'c>>, ClaimError> {
        self.tables.iter().map(|rows| slots[rows.class].claim(&rows.slots)).collect()
    }

    /// Copies the claimed rows into a cache.
    pub(crate) fn read(&self, claims: &[Claim<'_>], cache: &mut Vec<f32>) {
        cache.resize(self.tables.last().map_or(0, WindowTable::end), 0.0);
        for (rows, claim) in self.tables.iter().zip(claims) {
            claim.read(&mut cache[rows.start..rows.end()]);
        }
    }

    /// Copies a cache into the claimed rows.
    pub(crate) fn write(&self, claims: &mut [Claim<'_>], cache: &[f32]) {
        for (rows, claim) in self.tables.iter().zip(claims) {
            claim.write(&cache[rows.start..rows.end()]);
        }
    }

    /// Writes the places of the rows of table `t` in `casting` to `places`, ascending. `casting` is of a
    /// batch of the window or of a part of one.
    pub(crate) fn place(&self, t: usize, casting: &Casting, places: &mut Vec<u32>) {
        let all = &self.tables[t].rows;
        let mut at = 0;
        places.clear();
        places.extend(casting.tables()[t].rows().iter().map(|row| {
            at += all[at..].partition_point(|other| other < row);
            at as u32
        }));
    }

    /// Where the record at this place of table `t` is in a cache.
    #[inline]
    pub(crate) fn record(&self, t: usize, place: u32) -> RecordSpan {
        let WindowTable { start, words, .. } = self.tables[t];
        RecordSpan { start: start + place as usize * words, words }
    }

    /// The records of table `t` in a cache.
    pub(crate) fn table_of<'a>(&self, t: usize, cache: &'a [f32]) -> CachedRecords<'a> {
        let rows = &self.tables[t];
        CachedRecords { records: &cache[rows.start..rows.end()], words: rows.words }
    }

    /// The records of each table in a cache.
    pub(crate) fn tables_of<'a>(&self, mut cache: &'a mut [f32]) -> Vec<CachedMut<'a>> {
        let cut = self.tables.iter().map(|rows| {
            let records = cache.split_off_mut(..rows.end() - rows.start).unwrap_or_default();
            CachedMut { records, words: rows.words }
        });
        cut.collect()
    }
}
