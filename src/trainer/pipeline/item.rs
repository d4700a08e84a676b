//! The data that stages pass on: batches with their casted indices, and items. An item has rows to move and
//! the work of Train.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use super::super::casting::Casting;
use super::super::train_state::Labelled;
use super::super::{BatchPosition, TrainError};
use super::scratchpad::SlotLayout;
use crate::schema::{Lookup, Schema};
use crate::sync::EvenPoisoned;
use crate::trainer::pipeline::gpu::StagingBuffer;
use crate::trainer::pipeline::slot_flags::ClaimError;
use crate::types::{Batch, RowId, TableId};

/// A batch and the rows that it needs.
#[derive(Default)]
pub(crate) struct PreparedBatch {
    pub batch: Batch,
    /// One label per sample; empty if the data has no labels.
    pub labels: Vec<f32>,
    /// Where the batch is in the data.
    pub position: BatchPosition,
    /// The batch's distinct rows, and the sources of their gradients.
    pub casting: Casting,
    /// The slot of each row that Plan has found so far, else `NO_SLOT`. Empty before Plan looks them up.
    /// The slots of table `t` begin at `starts[t]`.
    pub slots: Vec<u32>,
    /// For each table, the index in `slots` of its first row; then the number of rows of all tables.
    pub starts: Vec<usize>,
}

/// The rows of one table within a selection of a batch's rows.
pub(crate) struct TablePart {
    /// Index of the table.
    pub table: usize,
    /// Indices among all rows of this table in the batch.
    pub of_table: Range<usize>,
    /// Indices among the selected rows.
    pub of_selection: Range<usize>,
}

impl PreparedBatch {
    /// Checks and casts the batch: finds its distinct rows and the sources of their gradients.
    pub(crate) fn prepare(&mut self, schema: &Schema, lookups: &[Lookup]) -> Result<(), TrainError> {
        Labelled { batch: &self.batch, labels: &self.labels }.check(schema)?;
        self.casting.fill_alone(schema, lookups, &self.batch)?;
        self.slots.clear();
        self.starts.clear();
        self.starts.push(0);
        for casted in self.casting.tables() {
            self.starts.push(self.starts[self.starts.len() - 1] + casted.rows().len());
        }
        Ok(())
    }

    /// Splits a range of the batch's rows by table. The range counts rows over all tables.
    pub(crate) fn parts(&self, rows: Range<usize>) -> impl Iterator<Item = TablePart> + '_ {
        let bounds = self.starts.windows(2).enumerate();
        bounds.filter_map(move |(table, bounds)| {
            let part = rows.start.max(bounds[0])..rows.end.min(bounds[1]);
            let shifted = |by: usize| part.start - by..part.end - by;
            (!part.is_empty()).then(|| TablePart {
                table,
                of_table: shifted(bounds[0]),
                of_selection: shifted(rows.start),
            })
        })
    }

    /// The distinct rows, ascending.
    pub(crate) fn rows(&self) -> impl Iterator<Item = RowId> + '_ {
        let tables = self.casting.tables().iter().zip(0..);
        tables.flat_map(|(casted, t)| casted.rows().iter().map(move |&row| RowId::new(TableId(t), row)))
    }

    /// The slots of each table's rows.
    pub(crate) fn table_slots(&self) -> impl Iterator<Item = &[u32]> {
        self.starts.windows(2).map(|bounds| &self.slots[bounds[0]..bounds[1]])
    }

    /// Claims the slots of all rows, table by table. `tables` has the slot layout of each table, and `claim`
    /// claims slots of a size.
    pub(crate) fn claim<'c, C>(
        &'c self,
        tables: &[SlotLayout],
        claim: impl Fn(usize, &'c [u32]) -> Result<C, ClaimError>,
    ) -> Result<Vec<C>, ClaimError> {
        self.table_slots().zip(tables).map(|(slots, layout)| claim(layout.size, slots)).collect()
    }

    /// The number of distinct rows.
    pub(crate) fn row_count(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }
}

/// Some samples of a batch that was split.
#[derive(Clone, Copy)]
pub(crate) struct SampleGroup<'b> {
    /// The samples, as a batch.
    pub part: &'b PreparedBatch,
    /// Index of the first sample in the whole batch.
    pub at: usize,
    pub whole: &'b PreparedBatch,
}

/// A row and its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RowSlot {
    pub row: RowId,
    pub slot: u32,
}

/// A range of transferred rows, all of one table.
pub(crate) struct TableRun {
    pub table: TableId,
    pub range: Range<usize>,
}

/// Rows that move in one direction between the working file and the scratchpad.
#[derive(Default)]
pub(crate) struct Transfers {
    /// The ranges of `rows` and `slots`, ascending by table.
    pub runs: Vec<TableRun>,
    /// The rows, ascending within a table.
    pub rows: Vec<u64>,
    /// Each row's slot.
    pub slots: Vec<u32>,
    /// Words (f32) of all records together.
    pub words: usize,
    /// The records, end to end, after Collect has read them. The vector may be longer than `words`. With a
    /// scratchpad on a device, records are in the item's staging buffer instead.
    pub records: Vec<f32>,
}

impl Transfers {
    /// Sorts `rows` and sets all lists from them. `tables` has the slot layout of each table.
    pub(crate) fn set(&mut self, rows: &mut [RowSlot], tables: &[SlotLayout]) {
        rows.sort_unstable_by_key(|moved| moved.row);
        self.runs.clear();
        self.rows.clear();
        self.slots.clear();
        self.words = 0;
        for run in rows.chunk_by(|a, b| a.row.table() == b.row.table()) {
            let (table, first) = (run[0].row.table(), self.rows.len());
            self.rows.extend(run.iter().map(|moved| moved.row.row()));
            self.slots.extend(run.iter().map(|moved| moved.slot));
            self.runs.push(TableRun { table, range: first..self.rows.len() });
            self.words += run.len() * tables[table.index()].words;
        }
    }

    /// Makes room for the records. Old content is neither zeroed nor moved, because Collect overwrites it.
    pub(crate) fn make_room(&mut self) {
        if self.records.len() < self.words {
            // Later batches may need a little more. The extra eighth takes no memory before it is used. Plan
            // limits `words`, so that all buffers together use no more than the bytes for staging.
            self.records = vec![0.0; self.words + self.words / 8];
        }
    }
}

/// The rows that an item fetches, and those that it evicts.
#[derive(Default)]
pub(crate) struct ItemTransfers {
    pub fills: Transfers,
    pub evictions: Transfers,
}

/// Buffers to reuse, within a run and in later runs of the pipeline.
#[derive(Default)]
pub(crate) struct BufferPool<T>(Mutex<Vec<T>>);

impl<T: Default> BufferPool<T> {
    /// The buffer that was given back last, which is the most likely to be in the processor's cache. If
    /// there is none, a new one.
    pub(crate) fn take(&self) -> T {
        self.all().pop().unwrap_or_default()
    }

    /// Gives a buffer back.
    pub(crate) fn give(&self, used: T) {
        self.all().push(used);
    }

    fn all(&self) -> MutexGuard<'_, Vec<T>> {
        // A panic cannot leave the list half changed.
        self.0.lock().even_poisoned()
    }
}

/// A unit of work that passes from Plan to Train.
#[derive(Default)]
pub(crate) struct Item {
    /// Counted from 1.
    pub number: u64,
    /// Rows to fetch.
    pub fills: Transfers,
    /// Rows to evict from the slots that `fills` uses.
    pub evictions: Transfers,
    /// On a device: the buffer that stages `fills` and `evictions`, from Collect to Insert.
    pub staging: Option<Box<dyn StagingBuffer>>,
    /// What Train does once the rows are there.
    pub work: Work,
}

/// What Train does with an item.
#[derive(Default)]
pub(crate) enum Work {
    /// Nothing: the item only moves rows.
    #[default]
    Move,
    /// A step on each batch.
    Steps(Vec<PreparedBatch>),
    /// Writes the input rows of some samples of a batch that was split.
    Gather {
        /// The samples, as a batch.
        part: Box<PreparedBatch>,
        /// Index of the first sample in the whole batch.
        at: usize,
        whole: Arc<PreparedBatch>,
    },
    /// Updates some rows of a batch that was split.
    Update {
        whole: Arc<PreparedBatch>,
        /// The rows, counted over all tables.
        rows: Range<usize>,
        /// Their slots.
        slots: Vec<u32>,
    },
}
