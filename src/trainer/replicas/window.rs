//! The rows of a window of batches, and where each lies in a replica's cache of them.
//!
//! A cache is one run of numbers: the records of the window's distinct rows, table after table and by row. A
//! row's place is its number among those of its table, so a replica knows rows by small numbers and never
//! looks one up: both the window's rows and a batch's are sorted, and one walk along them gives the places of
//! all.

use crate::trainer::casting::Casting;
use crate::trainer::pipeline::item::PreparedBatch;
use crate::trainer::pipeline::scratchpad::SlotLayout;
use crate::trainer::pipeline::slots::{Claim, ClaimError, Slots};

/// The distinct rows of a window.
pub(crate) struct Window {
    tables: Vec<Rows>,
}

/// Those of one table.
struct Rows {
    /// Ascending.
    rows: Vec<u64>,
    /// Where each is in the scratchpad.
    slots: Vec<u32>,
    /// Which of the scratchpad's slots.
    class: usize,
    /// Elements of a record.
    words: usize,
    /// The first record's first word in a cache.
    start: usize,
}

impl Rows {
    fn end(&self) -> usize {
        self.start + self.rows.len() * self.words
    }
}

/// The records of one table in a cache.
#[derive(Clone, Copy)]
pub(crate) struct Cached<'a> {
    records: &'a [f32],
    words: usize,
}

impl<'a> Cached<'a> {
    /// The record at this place.
    #[inline(always)]
    pub(crate) fn record(self, place: u32) -> &'a [f32] {
        &self.records[place as usize * self.words..][..self.words]
    }
}

impl Window {
    /// Of these batches, whose rows are all in the scratchpad. `tables` says of each table which of the slots
    /// its rows are in, and words of a record.
    pub(crate) fn of(casts: &[PreparedBatch], tables: &[SlotLayout]) -> Self {
        let mut start = 0;
        let tables = tables.iter().enumerate().map(|(t, &SlotLayout { size: class, words })| {
            let mut rows: Vec<(u64, u32)> = Vec::new();
            for cast in casts {
                let slots = &cast.slots[cast.starts[t]..cast.starts[t + 1]];
                rows.extend(cast.casting.tables()[t].rows().iter().copied().zip(slots.iter().copied()));
            }
            // A row has the same slot all through the window.
            rows.sort_unstable();
            rows.dedup();
            let (rows, slots) = rows.into_iter().unzip();
            let rows = Rows { rows, slots, class, words, start };
            start = rows.end();
            rows
        });
        Self { tables: tables.collect() }
    }

    /// Claims the rows, table by table.
    ///
    /// # Errors
    /// [`ClaimError`] where another stage has one at the time.
    pub(crate) fn claim<'c>(&'c self, slots: &'c [Slots]) -> Result<Vec<Claim<'c>>, ClaimError> {
        self.tables.iter().map(|rows| slots[rows.class].claim(&rows.slots)).collect()
    }

    /// Copies the claimed rows over a cache.
    pub(crate) fn read(&self, claims: &[Claim<'_>], cache: &mut Vec<f32>) {
        cache.resize(self.tables.last().map_or(0, Rows::end), 0.0);
        for (rows, claim) in self.tables.iter().zip(claims) {
            claim.read(&mut cache[rows.start..rows.end()]);
        }
    }

    /// Copies a cache over the claimed rows.
    pub(crate) fn write(&self, claims: &mut [Claim<'_>], cache: &[f32]) {
        for (rows, claim) in self.tables.iter().zip(claims) {
            claim.write(&cache[rows.start..rows.end()]);
        }
    }

    /// Writes the places of the rows that a batch of the window, or a part of one, touches in table `t` over
    /// `places`: ascending, as its rows.
    pub(crate) fn place(&self, t: usize, casting: &Casting, places: &mut Vec<u32>) {
        let all = &self.tables[t].rows;
        let mut at = 0;
        places.clear();
        places.extend(casting.tables()[t].rows().iter().map(|row| {
            at += all[at..].partition_point(|other| other < row);
            at as u32
        }));
    }

    /// Where the record at this place of table `t` begins in a cache, and its words.
    #[inline]
    pub(crate) fn record(&self, t: usize, place: u32) -> (usize, usize) {
        let Rows { start, words, .. } = self.tables[t];
        (start + place as usize * words, words)
    }

    /// The records of table `t` in a cache.
    pub(crate) fn table_of<'a>(&self, t: usize, cache: &'a [f32]) -> Cached<'a> {
        let rows = &self.tables[t];
        Cached { records: &cache[rows.start..rows.end()], words: rows.words }
    }

    /// The records of each table in a cache, to write, and the words of one.
    pub(crate) fn tables_of<'a>(&self, mut cache: &'a mut [f32]) -> Vec<(&'a mut [f32], usize)> {
        let cut = self.tables.iter().map(|rows| {
            let records = cache.split_off_mut(..rows.end() - rows.start).unwrap_or_default();
            (records, rows.words)
        });
        cut.collect()
    }
}
