//! The rows of a cut: those that changed since the last one, as they were at the cut.
//!
//! With rows in memory, the set of changed rows is taken at the cut. Its rows wait until they are copied
//! ([`super::kept_rows`]).
//!
//! An image keeps its memory for the next cut. New memory would cost a page fault every few records.

use crate::mem::OutOfHostMemory;
use crate::mem::prefetch::{prefetch, prefetch_line};
use crate::pace::{self, give_way_every};
use crate::store::{RecordLayout, RowSource, SourceShape, StoreError, Table, TakeChunk, all_finite};
use crate::trainer::row_set::RowSet;
use crate::types::{Element, TableId};

/// How many rows ahead memory is prefetched.
pub(crate) const AHEAD: usize = 8;

/// Rows that are copied between two calls of the scheduler.
const ROWS_OF_TURN: u32 = 256;

/// Rows handed to the writer at a time.
const CHUNK_ROWS: usize = 16 << 10;

/// The changed rows of all tables and their records.
#[derive(Debug)]
pub(crate) struct RowImage {
    tables: Vec<TableImage>,
    /// Memory for the sorted records of a table.
    scratch: Vec<f32>,
}

/// The changed rows of a table and their records.
#[derive(Debug)]
pub(crate) struct TableImage {
    record: RecordLayout<'static>,
    /// The copied rows, ascending after [`RowImage::sort`].
    rows: Vec<u64>,
    /// The records of `rows`: weights, then each state.
    records: Vec<f32>,
    /// The rows that are not copied yet.
    waiting: RowSet,
    /// No row before this one waits.
    next: u64,
}

/// The weights of a row and its states. Unused states are empty.
pub(crate) type RecordParts<'r> = [&'r [f32]; 3];

impl RowImage {
    /// An image without rows, for tables of these records and numbers of rows.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] for the sets of waiting rows.
    pub(crate) fn empty(layouts: &[RecordLayout<'static>], rows: &[u64]) -> Result<Self, OutOfHostMemory> {
        let table = |(record, &rows): (&RecordLayout<'static>, &u64)| {
            Ok(TableImage {
                record: record.clone(),
                rows: Vec::new(),
                records: Vec::new(),
                waiting: RowSet::new(rows)?,
                next: 0,
            })
        };
        let tables = layouts.iter().zip(rows).map(table).collect::<Result<_, _>>()?;
        Ok(Self { tables, scratch: Vec::new() })
    }

    /// Takes the changed rows, which then wait to be copied. The image must be empty.
    pub(crate) fn take_rows(&mut self, changed: &mut [RowSet]) {
        for (table, changed) in self.tables.iter_mut().zip(changed) {
            std::mem::swap(&mut table.waiting, changed);
            make_room(&mut table.rows, table.waiting.len());
            make_room(&mut table.records, table.waiting.len() * table.record.width());
        }
    }

    /// Forgets all rows, but keeps their memory.
    pub(crate) fn clear(&mut self) {
        for TableImage { rows, records, waiting, next, .. } in &mut self.tables {
            rows.clear();
            records.clear();
            waiting.clear();
            *next = 0;
        }
    }

    /// Its tables.
    pub(crate) fn tables_mut(&mut self) -> impl Iterator<Item = &mut TableImage> {
        self.tables.iter_mut()
    }

    /// Sorts the rows of each table, and keeps the last record of each.
    pub(crate) fn sort(&mut self) {
        let Self { tables, scratch } = self;
        tables.iter_mut().for_each(|table| table.sort(scratch));
    }

    /// The copied rows of a table.
    pub(crate) fn rows(&self, table: usize) -> &[u64] {
        &self.tables[table].rows
    }

    /// The rows of a table, copied or not.
    pub(crate) fn all_rows(&self, table: usize) -> impl Iterator<Item = u64> + '_ {
        let TableImage { rows, waiting, .. } = &self.tables[table];
        rows.iter().copied().chain(waiting.iter())
    }

    /// Number of copied rows of all tables.
    pub(crate) fn len(&self) -> usize {
        self.tables.iter().map(|table| table.rows.len()).sum()
    }

    /// Number of tables.
    pub(crate) fn tables(&self) -> usize {
        self.tables.len()
    }

    /// Bytes of the rows and their records.
    pub(crate) fn bytes(&self) -> usize {
        let bytes = |table: &TableImage| size_of_val(&table.rows[..]) + size_of_val(&table.records[..]);
        self.tables.iter().map(bytes).sum()
    }

    /// Whether every row is copied.
    pub(crate) fn is_complete(&self) -> bool {
        self.tables.iter().all(|table| table.waiting.len() == 0)
    }

    /// Copies all waiting rows.
    pub(crate) fn copy_all(&mut self, tables: &[Table]) {
        for (image, table) in self.tables.iter_mut().zip(tables) {
            let count = image.record.states.len();
            let state = |state, row| if state < count { table.state(state, row) } else { &[] };
            let parts = |row| [table.row_values(row).unwrap_or_default(), state(0, row), state(1, row)];
            image.copy_waiting(usize::MAX, parts);
        }
    }

    /// Reads every row with `read`, which gets a table, ascending rows, and room for their records.
    ///
    /// # Errors
    /// The first error of `read`.
    pub(crate) fn fill(
        &mut self,
        read: impl Fn(TableId, &[u64], &mut [f32]) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        for (image, t) in self.tables.iter_mut().zip(0..) {
            let width = image.record.width().max(1);
            image.rows.extend(image.waiting.iter());
            image.records.resize(image.rows.len() * width, 0.0);
            let chunks = image.rows.chunks(CHUNK_ROWS).zip(image.records.chunks_mut(CHUNK_ROWS * width));
            for (rows, records) in chunks {
                read(TableId(t), rows, records)?;
            }
            for &row in &image.rows {
                image.waiting.remove(row);
            }
        }
        Ok(())
    }

    fn table(&self, table: TableId) -> Result<&TableImage, StoreError> {
        let expected = self.tables.len();
        self.tables.get(table.index()).ok_or(StoreError::Tables { expected, got: table.index() + 1 })
    }
}

impl TableImage {
    /// The copied rows.
    pub(crate) fn rows(&self) -> &[u64] {
        &self.rows
    }

    /// Sets the row and the record at an index, which may be one past the last. A row that is there already
    /// must be the same.
    pub(crate) fn set(&mut self, at: usize, row: u64, record: &[f32]) {
        if at == self.rows.len() {
            self.rows.push(row);
            self.records.extend_from_slice(record);
        } else {
            self.records[at * record.len()..][..record.len()].copy_from_slice(record);
        }
    }

    /// Prefetches what [`Self::set`] reads and writes.
    pub(crate) fn prefetch(&self, at: usize) {
        if let Some(row) = self.rows.get(at) {
            prefetch_line(row);
            let width = self.record.width();
            prefetch(&self.records[at * width..][..width]);
        }
    }

    fn sort(&mut self, scratch: &mut Vec<f32>) {
        if self.rows.is_sorted_by(|row, next| row < next) {
            return;
        }
        let width = self.record.width();
        let mut order: Vec<(u64, usize)> = self.rows.iter().copied().zip(0..).collect();
        pace::sort_unstable_by(&mut order, Ord::cmp);
        scratch.clear();
        scratch.reserve_exact(self.records.len());
        self.rows.clear();
        // Of a row that occurs several times, the last record counts.
        let mut copied = give_way_every(ROWS_OF_TURN);
        for same in order.chunk_by(|a, b| a.0 == b.0) {
            copied();
            let (row, at) = same[same.len() - 1];
            self.rows.push(row);
            scratch.extend_from_slice(&self.records[at * width..][..width]);
        }
        std::mem::swap(&mut self.records, scratch);
    }

    /// Copies a row if it waits.
    #[inline(always)]
    pub(crate) fn copy_one<'r>(&mut self, row: u64, parts: impl FnOnce() -> RecordParts<'r>) {
        if self.waiting.remove(row) {
            self.rows.push(row);
            parts().iter().for_each(|part| self.records.extend_from_slice(part));
        }
    }

    /// Copies the first waiting rows, at most `most`.
    pub(crate) fn copy_waiting<'r>(&mut self, most: usize, parts: impl Fn(u64) -> RecordParts<'r>) {
        let Self { rows, records, waiting, next, .. } = self;
        let first = rows.len();
        waiting.take_from(*next, most, rows);
        let copied = &rows[first..];
        let mut taken = give_way_every(ROWS_OF_TURN);
        for (k, &row) in copied.iter().enumerate() {
            taken();
            if let Some(&ahead) = copied.get(k + AHEAD) {
                parts(ahead).into_iter().for_each(prefetch);
            }
            parts(row).iter().for_each(|part| records.extend_from_slice(part));
        }
        *next = copied.last().map_or(*next, |last| last + 1);
    }
}

/// Makes room for `len` elements, and for an eighth more if memory is needed. New memory is taken only when
/// it is first written. But an image of an earlier cut that must grow by a few rows has its memory moved,
/// for each table, which takes longer than a step.
fn make_room<T>(empty: &mut Vec<T>, len: usize) {
    if empty.capacity() < len {
        empty.reserve_exact(len + len / 8);
    }
}

impl RowSource for RowImage {
    fn shape(&self, table: TableId) -> Result<SourceShape<'_>, StoreError> {
        let TableImage { record, rows, .. } = self.table(table)?;
        Ok(SourceShape { rows: rows.len() as u64, element: Element::F32, record: record.clone() })
    }

    fn for_each_chunk(&self, table: TableId, take: &mut TakeChunk<'_>) -> Result<(), StoreError> {
        let image = self.table(table)?;
        let chunk = CHUNK_ROWS * image.record.width().max(1);
        let firsts = (0..).step_by(CHUNK_ROWS);
        image.records.chunks(chunk).zip(firsts).try_for_each(|(records, first)| take(first, records))
    }

    fn first_not_finite(&self, table: TableId) -> Result<Option<u64>, StoreError> {
        let image = self.table(table)?;
        if all_finite(&image.records) {
            return Ok(None);
        }
        let mut records = image.rows.iter().zip(image.records.chunks_exact(image.record.width().max(1)));
        let bad = records.find(|(_, record)| !all_finite(record));
        Ok(bad.map(|(&row, _)| row))
    }
}
