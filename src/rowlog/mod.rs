//! The trainer's working file: embedding tables that are larger than memory, updated on disk while they are
//! trained.
//!
//! All tables of a model share one logical file. (Physically it is several files: see `stripes`.) It is
//! unlinked as soon as it is created, so that the system frees its space however the process ends. It is
//! mapped: its pages are in the system's page cache, which evicts them when memory is short.
//!
//! ```text
//! table 0                               table 1, page-aligned
//! | record | record | ... | (padding) | record | ...
//!
//! record:  weight (dim) | state 0 (its width) | state 1 ...     all f32
//! ```
//!
//! The file is sparse, and a new one takes no disk space. A row that was never written has its first value,
//! which is not in the file: a pure function of the row number (`uniform`), or the row of a version. So
//! even a huge table needs no initialisation pass.
//!
//! By default the records of a table form a log (`log`), in the order in which they were last written, so
//! that rows evicted from the scratchpad reach the disk in long writes. With a [`RowOrder`] each row has a
//! fixed place instead, as drawn above, and the frequent rows are adjacent at the beginning of the table.

use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::store::{RecordLayout, StoreError, Table};

use crate::mem::OutOfHostMemory;
use crate::mem::prefetch::PREFETCH_AHEAD;
use crate::types::TableId;
pub use order::RowOrder;
pub(crate) use order::{read_orders, write_orders};
pub(crate) use uniform::{Uniform, table_code};

mod bitmap;
mod chunks;
mod log;
mod mapping;
pub(crate) mod order;
mod region;
mod stripes;
mod uniform;

use bitmap::Bitmap;
pub(crate) use region::WorkingRows;
use region::{Layout, Placed, READ_BYTES, WRITE_BYTES, place_in};
use stripes::Stripes;

/// A table to create.
#[derive(Debug)]
#[allow(missing_docs)]
pub(crate) struct WorkingTable {
    pub rows: u64,
    pub record: RecordLayout<'static>,
    pub first: First,
    /// Gives each row a fixed place; `None`: the records form a log.
    pub order: Option<RowOrder>,
}

/// The first values of the rows of a table.
#[derive(Debug)]
pub(crate) enum First {
    /// Weights of this distribution; all states are zero.
    Uniform(Uniform),
    /// The decoded rows of a version's table of the same shape. Its states are used if they equal those of
    /// the working table in name, width and order; otherwise states are zero.
    Version(Table),
}

/// Why a table of a working file cannot be created, read or written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages document the variants
pub(crate) enum WorkingError {
    #[error("expected a table number below {tables}")]
    Table { tables: usize },
    #[error("expected a row below {rows}, got {row}")]
    PastEnd { row: u64, rows: u64 },
    #[error("expected ascending rows, got {row} after {before}")]
    NotAscending { before: u64, row: u64 },
    #[error("expected {expected} elements of records, got {got}")]
    Records { expected: usize, got: usize },
    #[error("first values: expected shape {expected:?}, got {got:?}")]
    First { expected: [u64; 2], got: [u64; 2] },
    #[error("order: expected {expected} rows, got {got}")]
    Order { expected: u64, got: u64 },
    #[error("expected a file of less than 2^63 bytes, got {rows} rows of {width} f32")]
    TooLarge { rows: u64, width: usize },
    #[error(transparent)]
    Memory(#[from] OutOfHostMemory),
}

impl WorkingError {
    fn of(self, table: TableId) -> StoreError {
        StoreError::Working { table, source: Box::new(self) }
    }
}

/// A run of adjacent rows of at least this many bytes is read with one system call, which reads all of it
/// from the disk at once. Shorter runs are copied from the mapping.
const LONG_BYTES: usize = 64 << 10;
/// The sampling interval: one run in this many is checked for being in memory. The interval is shortest after
/// a check found a run on disk, and doubles otherwise. A check takes longer than reading a run that is in
/// memory. So does a request to the disk.
const SAMPLED_RUNS: RangeInclusive<usize> = 16..=256;
/// How many runs ahead to prefetch into the processor's cache, and how many bytes of each run. The hardware
/// prefetcher fetches the rest of a long run.
const RUNS_AHEAD: usize = 8;
const BYTES_AHEAD: usize = 2048;

/// The rows of a request, and their records end to end.
#[derive(Clone, Copy)]
struct RowRecords<'a> {
    rows: &'a [u64],
    records: &'a [f32],
}

/// Where a run of records is in the file.
#[derive(Clone, Copy)]
struct Extent {
    offset: u64,
    bytes: usize,
}

/// Tables in an unlinked file. Different threads may read and write different rows at once. The callers make
/// sure that no row is written while another thread reads or writes it.
#[derive(Debug)]
pub struct WorkingFile {
    /// What error messages name: the file has no name.
    path: PathBuf,
    stripes: Stripes,
    tables: Vec<WorkingRows>,
    /// The present sampling interval, within [`SAMPLED_RUNS`].
    sampled: AtomicUsize,
}

impl WorkingFile {
    /// Creates the file in the existing directory `dir`.
    ///
    /// # Errors
    /// [`StoreError::Working`] for a table that cannot be created, [`StoreError::MissingDirectory`], and
    /// errors of the file system.
    pub(crate) fn create(dir: &Path, tables: Vec<WorkingTable>) -> Result<Self, StoreError> {
        let mut placed: Vec<WorkingRows> = Vec::with_capacity(tables.len());
        for (table, wanted) in (0..).map(TableId).zip(tables) {
            let begin = placed.last().map_or(0, WorkingRows::end);
            let rows = WorkingRows::new(wanted, begin).map_err(|source| source.of(table))?;
            placed.push(rows);
        }
        let path = dir.join("(working file)");
        let stripes = Stripes::create(dir, placed.last().map_or(0, WorkingRows::end))?;
        let sampled = AtomicUsize::new(*SAMPLED_RUNS.start());
        Ok(Self { path, stripes, tables: placed, sampled })
    }

    /// In the order given to [`Self::create`].
    #[must_use]
    pub fn tables(&self) -> &[WorkingRows] {
        &self.tables
    }

    /// Reads the records of `rows` into `records`, end to end in the same order. `rows` must be ascending and
    /// distinct.
    ///
    /// # Errors
    /// [`StoreError::Working`] for rows that are past the table or not ascending, and for `records` of
    /// another length; errors of the file system.
    pub(crate) fn read(&self, table: TableId, rows: &[u64], records: &mut [f32]) -> Result<(), StoreError> {
        let of = self.checked(table, rows, records.len())?;
        let _held = of.hold();
        let mut placed = Vec::with_capacity(rows.len());
        let records_of_rows = records.chunks_exact_mut(of.width().max(1));
        for (index, (&row, record)) in rows.iter().zip(records_of_rows).enumerate() {
            if let (Layout::Log(log), Some(&next)) = (of.layout(), rows.get(index + PREFETCH_AHEAD)) {
                log.prefetch(&self.stripes, next);
            }
            match of.place(&self.stripes, row) {
                Some(place) => placed.push(Placed { place, index }),
                None => of.first_value(row, record),
            }
        }
        self.read_placed(of, &mut placed, records, 0)
    }

    /// Reads the records of written rows. Gaps of up to `gap` bytes between two of them may be read too.
    fn read_placed(
        &self,
        of: &WorkingRows,
        placed: &mut [Placed],
        records: &mut [f32],
        gap: usize,
    ) -> Result<(), StoreError> {
        let width = of.width();
        let span = |run: &[Placed]| (run[run.len() - 1].place - run[0].place + 1) as usize * width;
        let bytes = |run: &[Placed]| span(run) * size_of::<f32>();
        let is_short = |run: &&&[Placed]| bytes(run) < LONG_BYTES;
        let runs: Vec<&[Placed]> = of.runs(placed, READ_BYTES, gap).collect();
        let extent = |run: &&[Placed]| Extent { offset: of.offset(run[0].place), bytes: bytes(run) };
        self.request(runs.iter().filter(is_short).map(extent));
        let mut staging = Vec::new();
        for (at, run) in runs.iter().enumerate() {
            if let Some(next) = runs.get(at + RUNS_AHEAD).filter(is_short) {
                self.stripes.prefetch(of.offset(next[0].place), bytes(next).min(BYTES_AHEAD));
            }
            if is_short(&run) {
                for row in *run {
                    self.stripes.load(&mut records[row.index * width..][..width], of.offset(row.place));
                }
                continue;
            }
            staging.resize(span(run), 0.0);
            let first = run[0].place;
            let read = self.stripes.read(bytemuck::cast_slice_mut(&mut staging), of.offset(first));
            read.map_err(|e| StoreError::at(&self.path, e))?;
            for row in *run {
                let from = (row.place - first) as usize * width;
                records[row.index * width..][..width].copy_from_slice(&staging[from..from + width]);
            }
        }
        Ok(())
    }

    /// Starts reading runs from the disk, unless all runs of a sample are in memory. The disk works on many
    /// requests at once, whereas a page fault waits for one page.
    fn request(&self, runs: impl Iterator<Item = Extent> + Clone) {
        // A heuristic, so races between threads do not matter.
        let sampled = self.sampled.load(Ordering::Relaxed);
        if runs.clone().step_by(sampled).all(|run| self.stripes.in_memory(run.offset)) {
            self.sampled.store((2 * sampled).min(*SAMPLED_RUNS.end()), Ordering::Relaxed);
            return;
        }
        self.sampled.store(*SAMPLED_RUNS.start(), Ordering::Relaxed);
        runs.for_each(|Extent { offset, bytes }| self.stripes.request(offset, bytes));
    }

    /// Writes `records`, which holds the records of `rows` end to end in the same order. `rows` must be
    /// ascending and distinct. If the disk is full, each of these rows has its old or its new record. A row
    /// with a fixed place needs no more disk space after its first write. In a log, every write may need
    /// more.
    ///
    /// # Errors
    /// Those of [`Self::read`]; [`StoreError::DiskFull`].
    pub fn write(&self, table: TableId, rows: &[u64], records: &[f32]) -> Result<(), StoreError> {
        let of = self.checked(table, rows, records.len())?;
        let written = match of.layout() {
            Layout::Log(log) => log.write(&self.stripes, rows, records),
            Layout::Placed { order, written } => {
                let place = |row: &u64| place_in(order.as_ref(), *row);
                let placed = rows.iter().enumerate();
                let mut placed: Vec<_> =
                    placed.map(|(index, row)| Placed { place: place(row), index }).collect();
                of.runs(&mut placed, WRITE_BYTES, 0)
                    .try_for_each(|run| self.write_run(of, written, run, RowRecords { rows, records }))
            }
        };
        written.map_err(|e| StoreError::at(&self.path, e))
    }

    /// Writes the records of a run of rows with fixed places.
    fn write_run(
        &self,
        of: &WorkingRows,
        written: &Bitmap,
        run: &[Placed],
        RowRecords { rows, records }: RowRecords<'_>,
    ) -> io::Result<()> {
        let width = of.width();
        let record = |row: &Placed| &records[row.index * width..][..width];
        if run.iter().all(|row| written.has(rows[row.index])) {
            run.iter().for_each(|row| self.stripes.store(record(row), of.offset(row.place)));
            return Ok(());
        }
        let mut run_records = Vec::with_capacity(run.len() * width);
        run.iter().for_each(|row| run_records.extend_from_slice(record(row)));
        self.stripes.write(bytemuck::cast_slice(&run_records), of.offset(run[0].place))?;
        // Marked after the write, because readers read marked rows from the file.
        run.iter().for_each(|row| written.mark(rows[row.index]));
        Ok(())
    }

    pub(crate) fn table(&self, table: TableId) -> Result<&WorkingRows, StoreError> {
        let none = WorkingError::Table { tables: self.tables.len() };
        self.tables.get(table.index()).ok_or_else(|| none.of(table))
    }

    /// The table, after checking the rows and the number of elements.
    fn checked(&self, table: TableId, rows: &[u64], elements: usize) -> Result<&WorkingRows, StoreError> {
        let of = self.table(table)?;
        let refused = |source: WorkingError| Err(source.of(table));
        let expected = rows.len().saturating_mul(of.width());
        if expected != elements {
            return refused(WorkingError::Records { expected, got: elements });
        }
        if let Some(&[before, row]) = rows.windows(2).find(|two| two[0] >= two[1]) {
            return refused(WorkingError::NotAscending { before, row });
        }
        match rows.last() {
            Some(&row) if row >= of.rows() => refused(WorkingError::PastEnd { row, rows: of.rows() }),
            _ => Ok(of),
        }
    }
}

#[cfg(test)]
mod tests;
