//! The rows of a cut: those that changed since the last one, as they were at the cut.
//!
//! Train waits only while its next batch's rows are copied. At the cut, the set of changed rows is taken.
//! After it, a block of these rows is copied between any two steps, until all are copied. A step first copies
//! the rows that it is about to update, if they still wait (copy on write). So every row is copied as it was
//! at the cut, by the thread that trains, without a lock.

use crate::mem::prefetch::{prefetch, prefetch_line};
use crate::store::{RowSource, SourceShape, StoreError, Table, TakeChunk};
use crate::trainer::casting::Casting;
use crate::types::TableId;

use super::row_set::RowSet;

/// How many rows ahead memory is prefetched.
pub(crate) const AHEAD: usize = 8;

/// Rows that are taken at a time from those that wait, so that their records can be prefetched.
const BLOCK_ROWS: usize = 256;

/// Rows handed to the writer at a time.
const CHUNK_ROWS: usize = 16 << 10;

/// The changed rows of all tables and their records.
#[derive(Debug)]
pub(crate) struct RowImage {
    tables: Vec<TableImage>,
    /// The table whose rows are copied next.
    copying: usize,
}

/// The shape of a table's records.
#[derive(Clone, Debug)]
pub(crate) struct TableShape {
    pub dim: usize,
    /// Name and elements of each state.
    pub states: Vec<(&'static str, usize)>,
}

#[derive(Debug)]
struct TableImage {
    shape: TableShape,
    /// The copied rows, ascending after [`RowImage::sort`].
    rows: Vec<u64>,
    /// The records of `rows`: weights, then each state.
    records: Vec<f32>,
    /// The rows that are not copied yet.
    waiting: RowSet,
    /// No row before this one waits.
    next: u64,
}

impl TableShape {
    /// f32 elements of a record.
    pub(crate) fn width(&self) -> usize {
        self.dim + self.states.iter().map(|(_, width)| width).sum::<usize>()
    }

    /// Bytes of a record.
    pub(crate) fn record_bytes(&self) -> usize {
        self.width() * size_of::<f32>()
    }
}

impl RowImage {
    /// An image of these rows. Nothing is copied yet.
    pub(crate) fn new(shapes: &[TableShape], changed: Vec<RowSet>) -> Self {
        let table = |(waiting, shape): (RowSet, &TableShape)| TableImage {
            // Memory is taken when it is first written, so this takes no time.
            rows: Vec::with_capacity(waiting.len()),
            records: Vec::with_capacity(waiting.len() * shape.width()),
            shape: shape.clone(),
            waiting,
            next: 0,
        };
        Self { tables: changed.into_iter().zip(shapes).map(table).collect(), copying: 0 }
    }

    /// An image without rows. [`Self::set`] adds them.
    pub(crate) fn empty(shapes: &[TableShape]) -> Self {
        Self::new(shapes, shapes.iter().map(|_| RowSet::default()).collect())
    }

    /// Sets the record at an index of a table, which may be one past the last.
    pub(crate) fn set(&mut self, table: TableId, at: usize, (row, record): (u64, &[f32])) {
        let TableImage { rows, records, .. } = &mut self.tables[table.index()];
        if at == rows.len() {
            rows.push(row);
            records.extend_from_slice(record);
        } else {
            records[at * record.len()..][..record.len()].copy_from_slice(record);
        }
    }

    /// Prefetches what [`Self::set`] reads and writes.
    pub(crate) fn prefetch(&self, table: TableId, at: usize) {
        let TableImage { rows, records, shape, .. } = &self.tables[table.index()];
        if let Some(row) = rows.get(at) {
            prefetch_line(row);
            prefetch(&records[at * shape.width()..][..shape.width()]);
        }
    }

    /// Sorts the rows of each table, and keeps the last record of each.
    pub(crate) fn sort(&mut self) {
        self.tables.iter_mut().for_each(TableImage::sort);
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

    /// Takes the sets of waiting rows. They are empty if the image is complete.
    pub(crate) fn take_sets(&mut self) -> Vec<RowSet> {
        self.tables.iter_mut().map(|table| std::mem::take(&mut table.waiting)).collect()
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

    /// Copies the rows that a batch is about to update, if they wait.
    pub(crate) fn copy_before(&mut self, tables: &[Table], casting: &Casting) {
        for ((image, table), casted) in self.tables.iter_mut().zip(tables).zip(casting.tables()) {
            if image.waiting.len() == 0 {
                continue;
            }
            let rows = casted.rows();
            for (k, &row) in rows.iter().enumerate() {
                if let Some(values) = rows.get(k + AHEAD).and_then(|&row| table.row_values(row)) {
                    prefetch(values);
                }
                if image.waiting.remove(row) {
                    image.copy(row, table);
                }
            }
        }
    }

    /// Copies waiting rows until they make up `bytes` bytes or none waits.
    pub(crate) fn copy_block(&mut self, tables: &[Table], bytes: usize) {
        let mut left = bytes / size_of::<f32>();
        let mut rows = Vec::with_capacity(BLOCK_ROWS);
        while let (Some(image), Some(table)) = (self.tables.get_mut(self.copying), tables.get(self.copying)) {
            let width = image.shape.width();
            let most = BLOCK_ROWS.min(left / width.max(1));
            if most == 0 && image.waiting.len() > 0 {
                return;
            }
            rows.clear();
            image.waiting.take_from(image.next, most, &mut rows);
            let Some(last) = rows.last() else {
                self.copying += 1;
                continue;
            };
            image.next = last + 1;
            left -= rows.len() * width;
            image.copy_rows(&rows, table);
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
            let width = image.shape.width().max(1);
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
    fn sort(&mut self) {
        if self.rows.is_sorted_by(|row, next| row < next) {
            return;
        }
        let width = self.shape.width();
        let mut order: Vec<(u64, usize)> = self.rows.iter().copied().zip(0..).collect();
        order.sort_unstable();
        let mut records = Vec::with_capacity(self.records.len());
        self.rows.clear();
        // Of a row that occurs several times, the last record counts.
        for same in order.chunk_by(|a, b| a.0 == b.0) {
            let (row, at) = same[same.len() - 1];
            self.rows.push(row);
            records.extend_from_slice(&self.records[at * width..][..width]);
        }
        self.records = records;
    }

    /// Copies the records of rows.
    fn copy_rows(&mut self, rows: &[u64], table: &Table) {
        for (k, &row) in rows.iter().enumerate() {
            if let Some(&ahead) = rows.get(k + AHEAD) {
                prefetch(table.row_values(ahead).unwrap_or_default());
                (0..self.shape.states.len()).for_each(|state| prefetch(table.state(state, ahead)));
            }
            self.copy(row, table);
        }
    }

    /// Copies the record of a row.
    fn copy(&mut self, row: u64, table: &Table) {
        self.rows.push(row);
        self.records.extend_from_slice(table.row_values(row).unwrap_or_default());
        for state in 0..self.shape.states.len() {
            self.records.extend_from_slice(table.state(state, row));
        }
    }
}

impl RowSource for RowImage {
    fn shape(&self, table: TableId) -> Result<SourceShape<'_>, StoreError> {
        let TableImage { shape, rows, .. } = self.table(table)?;
        let states = shape.states.iter().map(|&(name, width)| (name, width)).collect();
        Ok(SourceShape {
            rows: rows.len() as u64,
            dim: shape.dim,
            element: crate::types::Element::F32,
            states,
        })
    }

    fn for_each_chunk(&self, table: TableId, take: &mut TakeChunk<'_>) -> Result<(), StoreError> {
        let image = self.table(table)?;
        let chunk = CHUNK_ROWS * image.shape.width().max(1);
        let firsts = (0..).step_by(CHUNK_ROWS);
        image.records.chunks(chunk).zip(firsts).try_for_each(|(records, first)| take(first, records))
    }

    fn first_not_finite(&self, table: TableId) -> Result<Option<u64>, StoreError> {
        let image = self.table(table)?;
        let mut records = image.rows.iter().zip(image.records.chunks_exact(image.shape.width().max(1)));
        let bad = records.find(|(_, record)| !record[..image.shape.dim].iter().all(|x| x.is_finite()));
        Ok(bad.map(|(&row, _)| row))
    }
}
