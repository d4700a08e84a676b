//! What the pipeline passes along: batches that were read and cast, and items of rows to move and work to do.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::TrainError;
use super::super::casting::Casting;
use super::super::train_state::Labelled;
use super::scratchpad::SlotLayout;
use crate::schema::{Lookup, Schema};
use crate::trainer::pipeline::gpu::StagingBuffer;
use crate::types::{Batch, RowId, TableId};

/// A batch that was read, and the rows that it needs.
#[derive(Default)]
pub(crate) struct PreparedBatch {
    pub batch: Batch,
    /// A label a sample; empty where the data has none.
    pub labels: Vec<f32>,
    /// Its distinct rows, and the sources of their gradients.
    pub casting: Casting,
    /// The slots of its rows that Plan has found so far: those of table `t` begin at `starts[t]`.
    pub slots: Vec<u32>,
    /// Each table's first index into `slots`, and the end of the last table's.
    pub starts: Vec<usize>,
}

/// Some rows of one table of a batch.
pub(crate) struct TablePart {
    /// Index of the table.
    pub table: usize,
    /// Indices among the table's rows of the batch.
    pub of_table: Range<usize>,
    /// Indices among the rows that were selected.
    pub of_selection: Range<usize>,
}

impl PreparedBatch {
    /// Casts the batch: lists its distinct rows and where their gradients come from.
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

    /// The parts, table by table, of a range of its rows. Rows are counted over all tables.
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

    /// Its distinct rows, ascending.
    pub(crate) fn rows(&self) -> impl Iterator<Item = RowId> + '_ {
        let tables = self.casting.tables().iter().zip(0..);
        tables.flat_map(|(casted, t)| casted.rows().iter().map(move |&row| RowId::new(TableId(t), row)))
    }

    /// How many distinct rows.
    pub(crate) fn row_count(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }
}

/// A row and its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RowSlot {
    pub row: RowId,
    pub slot: u32,
}

/// A range of transferred rows that are of one table.
pub(crate) struct TableRun {
    pub table: TableId,
    pub range: Range<usize>,
}

/// Rows on their way between store and scratchpad.
#[derive(Default)]
pub(crate) struct Transfers {
    /// The ranges of `rows` and `slots`, ascending by table.
    pub runs: Vec<TableRun>,
    /// The rows, ascending within a table.
    pub rows: Vec<u64>,
    /// Each row's slot.
    pub slots: Vec<u32>,
    /// Words of all records.
    pub words: usize,
    /// The records, end to end, once Collect has read them; there may be room for more. On a device they are
    /// in the item's staging buffer instead.
    pub records: Vec<f32>,
}

impl Transfers {
    /// Sets the rows and slots, which it sorts. `tables` has each table's slot layout.
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

    /// Makes room for the records. It keeps the content, which is meaningless, so that no buffer is zeroed or
    /// moved twice.
    pub(crate) fn make_room(&mut self) {
        if self.records.len() < self.words {
            // Most batches need about as much. The reserve takes no memory before it is used, and all buffers
            // together use no more than the bytes for staging.
            self.records = vec![0.0; self.words + self.words / 8];
        }
    }
}

/// The rows that an item brings in, and those that it evicts.
#[derive(Default)]
pub(crate) struct ItemTransfers {
    pub fills: Transfers,
    pub evictions: Transfers,
}

/// Buffers to reuse, within a run and in later runs of the pipeline.
#[derive(Default)]
pub(crate) struct BufferPool<T>(Mutex<Vec<T>>);

impl<T: Default> BufferPool<T> {
    /// The buffer that was given last, which is most likely cached, or a new one.
    pub(crate) fn take(&self) -> T {
        self.all().pop().unwrap_or_default()
    }

    /// Gives a buffer back.
    pub(crate) fn give(&self, used: T) {
        self.all().push(used);
    }

    fn all(&self) -> MutexGuard<'_, Vec<T>> {
        // A panic cannot leave the list half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A unit of work that passes through all stages.
#[derive(Default)]
pub(crate) struct Item {
    /// Counted from 1.
    pub number: u64,
    /// Rows that come in.
    pub fills: Transfers,
    /// Rows that are evicted from the slots that `fills` take.
    pub evictions: Transfers,
    /// On a device, from Collect to Insert: where both are staged.
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
