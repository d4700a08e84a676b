//! The trainer's working file: tables larger than memory, trained in place.
//!
//! All tables of a model lie in one file, which has no name: it is unlinked as soon as it is made, so that
//! nothing is left of it however the process ends. (To the file system it is several: `stripes`.) It is mapped, and
//! what is in memory of it are pages of the system's cache, which takes them back when memory is short.
//!
//! ```text
//! table 0                               table 1, on a page
//! | record | record | ... | (padding) | record | ...
//!
//! record:  weight (dim) | state 0 (its width) | state 1 ...     all f32
//! ```
//!
//! The file is sparse and a new one takes no room. A row that was never written is not in it: a bit a row
//! says so, and the row is then its first value, which is a pure function of the row, or a version's. So a
//! huge table needs no first pass.
//!
//! Records lie in the order in which they were written last, in a log (`log`): rows that leave a scratchpad go to the disk
//! in long writes. With a [`RowOrder`] each has a place of its own instead, as drawn above, the frequent ones end to end at
//! the table's beginning.

use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::store::{StoreError, Table};

use crate::mem::OutOfHostMemory;
use crate::mem::prefetch::PREFETCH_AHEAD;
use crate::types::TableId;
pub use order::{RowOrder, read_orders, write_orders};
pub use uniform::{Uniform, table_code};

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

/// A table to make.
#[derive(Debug)]
pub struct WorkingTable {
    /// How many rows.
    pub rows: u64,
    /// Elements of a row's weight.
    pub dim: usize,
    /// Names of the states of a row, and the elements of each.
    pub states: Vec<(&'static str, usize)>,
    /// What rows are before they are written.
    pub first: First,
    /// By what order records lie; `None`: by row.
    pub order: Option<RowOrder>,
}

/// What rows are before they are written.
#[derive(Debug)]
pub enum First {
    /// Weights of this distribution beside zeroed states.
    Uniform(Uniform),
    /// The rows of a version's table, decoded, of as many rows and elements. Beside them its states, if they are
    /// those of the working table by name, width and order, else zeros (see [`Table::without_states`]).
    Version(Table),
}

/// Why a working file cannot be made of a table, or asked for its rows.
#[derive(Debug, thiserror::Error)]
pub enum WorkingError {
    /// No such table.
    #[error("expected a table below {tables}")]
    Table {
        /// How many there are.
        tables: usize,
    },
    /// No such row.
    #[error("expected a row below {rows}, got {row}")]
    PastEnd {
        /// The row.
        row: u64,
        /// How many there are.
        rows: u64,
    },
    /// Rows out of order, or one twice.
    #[error("expected ascending rows, got {row} after {before}")]
    NotAscending {
        /// The one before.
        before: u64,
        /// The row.
        row: u64,
    },
    /// Records that are not as many as the rows.
    #[error("expected {expected} elements of records, got {got}")]
    Records {
        /// Rows times width.
        expected: usize,
        /// How many came.
        got: usize,
    },
    /// First values of another shape.
    #[error("first values: expected shape {expected:?}, got {got:?}")]
    First {
        /// Rows and elements a row of the working table.
        expected: [u64; 2],
        /// Those of the version's.
        got: [u64; 2],
    },
    /// An order of another table's rows.
    #[error("order: expected one of {expected} rows, got one of {got}")]
    Order {
        /// The table's rows.
        expected: u64,
        /// The order's.
        got: u64,
    },
    /// More than the length of a file can say.
    #[error("expected a file of less than 2^63 bytes, got {rows} rows of {width} f32")]
    TooLarge {
        /// The table's rows.
        rows: u64,
        /// Elements of a record.
        width: usize,
    },
    /// No memory for a bit a row.
    #[error(transparent)]
    Memory(#[from] OutOfHostMemory),
}

/// Bytes of rows end to end that are read by one call, which asks the disk for all of them at once.
const LONG_BYTES: usize = 64 << 10;
/// Of so many pieces that are to be read one is looked at, to see whether they are in memory or still on the disk: of the fewer
/// while some were on the disk not long ago. To look takes longer than to read one that is in memory, and to ask for one as long.
const SAMPLED_RUNS: RangeInclusive<usize> = 16..=256;
/// How many pieces ahead memory is asked for one, and for how much of it: the rest of a long one the processor sees coming.
const RUNS_AHEAD: usize = 8;
const BYTES_AHEAD: usize = 2048;

/// Tables in a file without a name. Reading and writing take `&self`: different threads may do both at once
/// on different rows. That nobody writes a row while another reads or writes it is for the callers to see to.
#[derive(Debug)]
pub struct WorkingFile {
    /// Where the file was made, for errors to name.
    dir: PathBuf,
    stripes: Stripes,
    tables: Vec<WorkingRows>,
    /// Of how many pieces one is looked at, within [`SAMPLED_RUNS`].
    sampled: AtomicUsize,
}

impl WorkingFile {
    /// Makes the file in `dir`, which exists.
    ///
    /// # Errors
    /// [`StoreError::Working`] for a table that cannot be, [`StoreError::MissingDirectory`], and what the
    /// system refused.
    pub fn create(dir: &Path, tables: Vec<WorkingTable>) -> Result<Self, StoreError> {
        let mut placed: Vec<WorkingRows> = Vec::with_capacity(tables.len());
        for (table, wanted) in (0..).map(TableId).zip(tables) {
            let begin = placed.last().map_or(0, WorkingRows::end);
            let rows =
                WorkingRows::new(wanted, begin).map_err(|source| StoreError::Working { table, source })?;
            placed.push(rows);
        }
        let stripes = Stripes::create(dir, placed.last().map_or(0, WorkingRows::end))?;
        let sampled = AtomicUsize::new(*SAMPLED_RUNS.start());
        Ok(Self { dir: dir.to_owned(), stripes, tables: placed, sampled })
    }

    /// The tables, in the order given.
    #[must_use]
    pub fn tables(&self) -> &[WorkingRows] {
        &self.tables
    }

    /// Bytes of memory that grow with the tables: the bits, the orders, and first values that lie in memory of
    /// their own.
    #[must_use]
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.tables.iter().map(WorkingRows::memory_bytes).sum()
    }

    /// Reads the records of these rows, ascending and distinct, over `records`, end to end in the order of
    /// `rows`.
    ///
    /// # Errors
    /// [`StoreError::Working`] for rows that are not of the table or not ascending, and for `records` of another
    /// length; and what the system refused.
    pub fn read(&self, table: TableId, rows: &[u64], records: &mut [f32]) -> Result<(), StoreError> {
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

    /// Reads written rows over their places in `records`; so many bytes between two of them may be read too.
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
        self.ask_for(runs.iter().filter(is_short).map(|run| (of.offset(run[0].place), bytes(run))));
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
            read.map_err(|e| StoreError::at(&self.dir, e))?;
            for row in *run {
                let from = (row.place - first) as usize * width;
                records[row.index * width..][..width].copy_from_slice(&staging[from..from + width]);
            }
        }
        Ok(())
    }

    /// Asks the disk for pieces of the file that are to be loaded, each an offset and bytes, where they seem not to be in memory: it
    /// works on many at once, and whoever touches a page waits for that one alone.
    fn ask_for(&self, pieces: impl Iterator<Item = (u64, usize)> + Clone) {
        // Only a guess, so that it is no matter what other threads make of it meanwhile.
        let sampled = self.sampled.load(Ordering::Relaxed);
        if pieces.clone().step_by(sampled).all(|(offset, _)| self.stripes.in_memory(offset)) {
            self.sampled.store((2 * sampled).min(*SAMPLED_RUNS.end()), Ordering::Relaxed);
            return;
        }
        self.sampled.store(*SAMPLED_RUNS.start(), Ordering::Relaxed);
        pieces.for_each(|(offset, bytes)| self.stripes.ask_for(offset, bytes));
    }

    /// Writes the records of these rows, ascending and distinct: they lie end to end in the order of `rows`.
    /// No other row is touched. When the disk is full, each of these is what it was or what it was to be. A row that has a place
    /// of its own needs no more room once it is there, on a file system that writes in place; in a log each writing may.
    ///
    /// # Errors
    /// Those of [`Self::read`]; [`StoreError::DiskFull`] when there is no room.
    pub fn write(&self, table: TableId, rows: &[u64], records: &[f32]) -> Result<(), StoreError> {
        let of = self.checked(table, rows, records.len())?;
        let written = match of.layout() {
            Layout::Log(log) => log.write(&self.stripes, rows, records),
            Layout::Placed { order, written } => {
                let placed = (0..).zip(rows);
                let placed =
                    placed.map(|(index, &row)| Placed { place: place_in(order.as_ref(), row), index });
                let mut placed: Vec<_> = placed.collect();
                self.write_placed(of, (written, rows), &mut placed, records)
            }
        };
        written.map_err(|e| StoreError::at(&self.dir, e))
    }

    /// Writes records over their rows' places.
    fn write_placed(
        &self,
        of: &WorkingRows,
        (written, rows): (&Bitmap, &[u64]),
        placed: &mut [Placed],
        records: &[f32],
    ) -> io::Result<()> {
        let (width, mut staging) = (of.width(), Vec::new());
        for run in of.runs(placed, WRITE_BYTES, 0) {
            if run.iter().all(|row| written.has(rows[row.index])) {
                for row in run {
                    self.stripes.store(&records[row.index * width..][..width], of.offset(row.place));
                }
                continue;
            }
            staging.clear();
            run.iter().for_each(|row| staging.extend_from_slice(&records[row.index * width..][..width]));
            self.stripes.write(bytemuck::cast_slice(&staging), of.offset(run[0].place))?;
            // Only now: who finds a row marked takes it from the file.
            run.iter().for_each(|row| written.mark(rows[row.index]));
        }
        Ok(())
    }

    /// The table of this number.
    pub(crate) fn table(&self, table: TableId) -> Result<&WorkingRows, StoreError> {
        let none = WorkingError::Table { tables: self.tables.len() };
        self.tables.get(table.index()).ok_or(StoreError::Working { table, source: none })
    }

    /// The table, if these are rows of it, and as many records.
    fn checked(&self, table: TableId, rows: &[u64], elements: usize) -> Result<&WorkingRows, StoreError> {
        let of = self.table(table)?;
        let refused = |source| Err(StoreError::Working { table, source });
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
