//! What goes through the pipeline: batches that were read and casted, and items of rows to move and work to do.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::TrainError;
use super::super::casting::Casting;
use super::super::train_state::Labelled;
use super::key::Key;
use crate::schema::{Lookup, Schema};
use crate::trainer::pipeline::gpu::StagingBuffer;
use crate::types::{Batch, TableId};

/// A batch that was read, and which rows it needs.
#[derive(Default)]
pub(crate) struct PreparedBatch {
    /// The samples.
    pub batch: Batch,
    /// A label a sample.
    pub labels: Vec<f32>,
    /// Its rows and their gradients.
    pub casting: Casting,
    /// Its rows' slots, as far as Plan has found them: those of table `t` from `starts[t]` on.
    pub slots: Vec<u32>,
    /// A table's first place in `slots`, and a last entry where they end.
    pub starts: Vec<usize>,
}

impl PreparedBatch {
    /// Casts the batch.
    pub(crate) fn cast(&mut self, schema: &Schema, lookups: &[Lookup]) -> Result<(), TrainError> {
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

    /// Some of its rows, counted over all tables, table by table: which table, which of its rows, and their places among
    /// `rows`.
    pub(crate) fn parts(
        &self,
        rows: Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> + '_ {
        let bounds = self.starts.windows(2).enumerate();
        bounds.filter_map(move |(t, bounds)| {
            let mine = rows.start.max(bounds[0])..rows.end.min(bounds[1]);
            let shifted = |by: usize| mine.start - by..mine.end - by;
            (!mine.is_empty()).then(|| (t, shifted(bounds[0]), shifted(rows.start)))
        })
    }

    /// Its rows, by table and ascending.
    pub(crate) fn keys(&self) -> impl Iterator<Item = Key> + '_ {
        let tables = self.casting.tables().iter().zip(0..);
        tables.flat_map(|(casted, t)| casted.rows().iter().map(move |&row| Key::new(TableId(t), row)))
    }
}

/// Rows on their way between store and scratchpad.
#[derive(Default)]
pub(crate) struct Transfers {
    /// Which part of the lists below is of which table, in the order of tables.
    pub runs: Vec<(TableId, Range<usize>)>,
    /// The rows, ascending within a table.
    pub rows: Vec<u64>,
    /// Each row's slot.
    pub slots: Vec<u32>,
    /// Words of their records.
    pub words: usize,
    /// Their records, end to end, from Collect on, and room for more; on a device they are at the item's berth instead.
    pub records: Vec<f32>,
}

impl Transfers {
    /// Makes it of these rows and their slots. Records of table `t` have `width(t)` words.
    pub(crate) fn set(&mut self, rows: &mut [(Key, u32)], width: impl Fn(TableId) -> usize) {
        rows.sort_unstable_by_key(|(key, _)| *key);
        self.runs.clear();
        self.rows.clear();
        self.slots.clear();
        self.words = 0;
        for run in rows.chunk_by(|a, b| a.0.table() == b.0.table()) {
            let (table, first) = (run[0].0.table(), self.rows.len());
            self.rows.extend(run.iter().map(|(key, _)| key.row()));
            self.slots.extend(run.iter().map(|(_, slot)| *slot));
            self.runs.push((table, first..self.rows.len()));
            self.words += run.len() * width(table);
        }
    }

    /// Makes room for the records. What is in it is of no meaning, so that none is zeroed or moved that was used before.
    pub(crate) fn make_room(&mut self) {
        if self.records.len() < self.words {
            // Most batches need about as much. What is left over takes no memory before it is used, and all of them together
            // use no more than the bytes that were given for staging.
            self.records = vec![0.0; self.words + self.words / 8];
        }
    }
}

/// Buffers that were used and may be again, also by the next run of the pipeline.
#[derive(Default)]
pub(crate) struct Spare<T>(Mutex<Vec<T>>);

impl<T: Default> Spare<T> {
    /// The one that was used last, which is nearest, or a new one.
    pub(crate) fn take(&self) -> T {
        self.all().pop().unwrap_or_default()
    }

    /// This one is used no more.
    pub(crate) fn give(&self, used: T) {
        self.all().push(used);
    }

    fn all(&self) -> MutexGuard<'_, Vec<T>> {
        // Whoever panicked did not do so between a half and another of these calls.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What goes through the pipeline.
#[derive(Default)]
pub(crate) struct Item {
    /// Counted from 1.
    pub number: u64,
    /// Rows that come in.
    pub fills: Transfers,
    /// Rows that leave, for the slots that the ones above take.
    pub evictions: Transfers,
    /// From Collect to Insert, where the scratchpad is a device's: where both are staged.
    pub berth: Option<Box<dyn StagingBuffer>>,
    /// What Train does when they are there.
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
    /// The input rows of some samples of a batch that was split.
    Gather {
        /// The samples, as a batch of their own.
        part: Box<PreparedBatch>,
        /// The first one's place in the whole batch.
        at: usize,
        /// The batch.
        whole: Arc<PreparedBatch>,
    },
    /// The updates of some rows of a batch that was split.
    Update {
        /// The batch.
        whole: Arc<PreparedBatch>,
        /// Which of its rows, counted over all tables.
        rows: Range<usize>,
        /// Their slots.
        slots: Vec<u32>,
    },
}
