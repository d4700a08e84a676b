//! Train on a device's scratchpad. The device pools and updates rows. Dense layers run on the host, so they
//! give the same bits for every device.
//!
//! A step has the same order as in `pipeline::train`. The device pools the batch's input rows. The
//! host writes them to the tapes, next to the dense values, and runs the forward and backward pass. Then the
//! device gets the gradients of the input rows, sums them by the casted index and updates the rows, and the
//! host updates the dense weights. Each call waits for the device.

use std::ops::Range;

use rayon::prelude::*;

use super::super::item::{PreparedBatch, SampleGroup, TablePart};
use super::super::scratchpad::SlotLayout;
use super::super::train::{Train, UpdatedRows};
use crate::model::{Tape, View};
use crate::schema::{Lookup, Schema};
use crate::trainer::TrainError;
use crate::trainer::casting::Casting;
use crate::trainer::pipeline::gpu::{
    Gather, GatherLookup, Scratch, ScratchError, SlotRun, Stepper, TableSlots, Update, UpdateRows,
};
use crate::trainer::pipeline::slot_flags::HeldSlots;
use crate::trainer::train_state::TrainState;
use crate::trainer::update::RowUpdate;
use crate::types::{Batch, TableId};

/// The shape of a model.
struct ModelShape<'a> {
    schema: &'a Schema,
    lookups: &'a [Lookup],
    /// The slot layout of each table.
    tables: &'a [SlotLayout],
}

/// Rows of some tables to update.
#[derive(Clone, Copy)]
struct TableUpdates<'u> {
    tables: &'u [UpdateRows<'u>],
    /// The samples of the batch that have gradients.
    samples: usize,
}

/// A part of a table's rows, claimed.
struct ClaimedPart<'s> {
    /// Index of the table.
    table: usize,
    /// Indices among all rows of this table in the batch.
    of_table: Range<usize>,
    held: HeldSlots<'s>,
}

impl Train<'_> {
    /// Takes a step.
    pub(crate) fn step_on(
        &mut self,
        scratch: &dyn Scratch,
        prepared: &PreparedBatch,
    ) -> Result<(), TrainError> {
        let held = prepared.claim(self.tables, |size, list| scratch.flags(size).claim(list))?;
        let loss = self.with_device(|train_state, stepper, shape| {
            let pooled = shape.gather(stepper, &held, &prepared.casting, &prepared.batch)?;
            Ok(train_state.learn_pooled(&prepared.batch, &prepared.labels, pooled))
        })?;
        self.train_state.read_logits(&mut self.logits);
        self.learnt(prepared, loss)?;
        self.with_device(|train_state, stepper, shape| {
            let tables = shape.tables(&held);
            let parts = tables.iter().zip(prepared.casting.tables());
            let tables: Vec<_> = parts
                .map(|(&rows, casted)| {
                    let (sources, ends, first) = casted.part(0..casted.rows().len());
                    UpdateRows { rows, sources, ends, first }
                })
                .collect();
            let mut updated = Ok(());
            train_state.update(|update| {
                let updates = TableUpdates { tables: &tables, samples: prepared.batch.samples };
                updated = shape.update(stepper, update, updates);
            });
            updated
        })?;
        drop(held);
        for ((slots, casted), t) in prepared.table_slots().zip(prepared.casting.tables()).zip(0..) {
            self.show_on(TableId(t), casted.rows(), slots)?;
        }
        self.observer.stepped(self.train_state)
    }

    /// Writes the input rows of some samples of a split batch.
    pub(crate) fn gather_on(
        &mut self,
        scratch: &dyn Scratch,
        SampleGroup { part, at, whole }: SampleGroup<'_>,
    ) -> Result<(), TrainError> {
        let held = part.claim(self.tables, |size, list| scratch.flags(size).claim(list))?;
        self.with_device(|train_state, stepper, shape| {
            let pooled = shape.gather(stepper, &held, &part.casting, &part.batch)?;
            train_state.place_pooled(&part.batch, at, pooled);
            Ok(())
        })?;
        self.gathered(at + part.batch.samples, whole)
    }

    /// Updates some rows of a split batch.
    pub(crate) fn update_on(
        &mut self,
        scratch: &dyn Scratch,
        whole: &PreparedBatch,
        rows: Range<usize>,
        slots: &[u32],
    ) -> Result<(), TrainError> {
        let mut parts = Vec::new();
        for TablePart { table, of_table, of_selection } in whole.parts(rows.clone()) {
            let held = scratch.flags(self.tables[table].size).claim(&slots[of_selection])?;
            parts.push(ClaimedPart { table, of_table, held });
        }
        self.with_device(|train_state, stepper, shape| {
            let tables: Vec<UpdateRows<'_>> = parts
                .iter()
                .map(|ClaimedPart { table, of_table, held }| {
                    let (sources, ends, first) = whole.casting.tables()[*table].part(of_table.clone());
                    UpdateRows { rows: shape.rows(*table, held), sources, ends, first }
                })
                .collect();
            let updates = TableUpdates { tables: &tables, samples: whole.batch.samples };
            shape.update(stepper, &train_state.row_update(), updates)
        })?;
        drop(parts);
        for TablePart { table, of_table, of_selection } in whole.parts(rows.clone()) {
            let rows = &whole.casting.tables()[table].rows()[of_table];
            self.show_on(TableId(table as u32), rows, &slots[of_selection])?;
        }
        if whole.starts.last() == Some(&rows.end) {
            self.observer.stepped(self.train_state)?;
        }
        Ok(())
    }

    /// Shows rows to the observer, if it wants to see them. The caller has dropped its claims on their slots.
    /// No other stage claims them yet, because the item is still in the past window.
    fn show_on(&mut self, table: TableId, rows: &[u64], list: &[u32]) -> Result<(), TrainError> {
        let Some(observer) = self.observer.row_observer() else { return Ok(()) };
        let SlotLayout { size, words } = self.tables[table.index()];
        let records = self.scratchpad.read(size, list)?;
        let record = Box::new(|k: usize| &records[k * words..][..words]);
        observer.rows(&[UpdatedRows { table, rows, record }]);
        Ok(())
    }

    fn with_device<T>(
        &mut self,
        work: impl FnOnce(&mut TrainState, &mut dyn Stepper, &ModelShape<'_>) -> Result<T, ScratchError>,
    ) -> Result<T, TrainError> {
        let (schema, lookups) = (self.train_state.schema.clone(), self.train_state.lookups.clone());
        let shape = ModelShape { schema: &schema, lookups: &lookups, tables: self.tables };
        // On a device there is always a stepper.
        let stepper = self.stepper.as_mut().ok_or(TrainError::Stopped)?;
        Ok(work(self.train_state, &mut **stepper, &shape)?)
    }
}

impl ModelShape<'_> {
    /// The claimed rows of table `t`.
    fn rows<'h>(&self, t: usize, held: &'h HeldSlots<'h>) -> TableSlots<'h> {
        TableSlots { run: SlotRun { size: self.tables[t].size, held }, dim: self.schema.tables[t].dim }
    }

    /// The claimed rows of all tables.
    fn tables<'h>(&self, held: &'h [HeldSlots<'h>]) -> Vec<TableSlots<'h>> {
        held.iter().enumerate().map(|(t, held)| self.rows(t, held)).collect()
    }

    /// Pools the batch's input rows. The result has all columns except the dense values.
    fn gather<'s>(
        &self,
        stepper: &'s mut dyn Stepper,
        held: &[HeldSlots<'_>],
        casting: &Casting,
        batch: &Batch,
    ) -> Result<&'s [f32], ScratchError> {
        let lookups = self.lookups.iter().enumerate().map(|(l, lookup)| GatherLookup {
            table: lookup.table.index(),
            pooling: lookup.pooling,
            offsets: &batch.features[lookup.feature].offsets,
            places: casting.places(l, lookup),
        });
        let lookups: Vec<_> = lookups.collect();
        stepper.gather(&Gather { samples: batch.samples, tables: &self.tables(held), lookups: &lookups })
    }

    /// Updates rows from the gradients of a batch.
    fn update(
        &self,
        stepper: &mut dyn Stepper,
        update: &RowUpdate<'_>,
        TableUpdates { tables, samples }: TableUpdates<'_>,
    ) -> Result<(), ScratchError> {
        let first_column = self.schema.dense_width();
        let stride = self.schema.input_width() - first_column;
        let rule = update.step.rule();
        stepper.update(&Update { samples, stride, first_column, tables, rule }, &mut |out| {
            let rows = update.tapes.first().map_or(1, |tape| tape.rows);
            let view = View { buffer: 0, column: first_column, width: stride };
            out.par_chunks_mut((rows * stride).max(1)).zip(update.tapes).for_each(|(out, tape)| {
                for (s, out) in out.chunks_exact_mut(stride).enumerate() {
                    out.copy_from_slice(tape.grads[0].row(s, view));
                }
            });
        })
    }
}

impl TrainState {
    /// [`TrainState::gather_and_learn`] with input rows that are already pooled. `pooled` has all columns
    /// except the dense values.
    fn learn_pooled(&mut self, batch: &Batch, labels: &[f32], pooled: &[f32]) -> f64 {
        self.begin(batch.samples);
        let input = self.pooled_input(batch, pooled);
        self.each_chunk(labels, labels.len(), |chunk, tape| {
            let first = chunk * tape.rows;
            input.write(tape, 0, first..first + tape.samples);
        })
    }

    /// [`TrainState::gather`] with input rows that are already pooled, as in [`Self::learn_pooled`].
    fn place_pooled(&mut self, batch: &Batch, at: usize, pooled: &[f32]) {
        let (input, mut begins) = (self.pooled_input(batch, pooled), 0);
        for tape in &mut self.tapes {
            let mine = at.max(begins)..(at + batch.samples).min(begins + tape.samples);
            let row = mine.start.saturating_sub(begins);
            begins += tape.rows;
            if !mine.is_empty() {
                input.write(tape, row, mine.start - at..mine.end - at);
            }
        }
    }

    fn pooled_input<'p>(&self, batch: &'p Batch, pooled: &'p [f32]) -> PooledInput<'p> {
        let (dense_width, width) = (self.schema.dense_width(), self.schema.input_width());
        PooledInput { batch, pooled, dense_width, width }
    }
}

/// The input rows of a batch: each has the dense values and then the pooled vectors.
#[derive(Clone, Copy)]
struct PooledInput<'p> {
    batch: &'p Batch,
    /// All columns except the dense values.
    pooled: &'p [f32],
    /// Columns of the dense values.
    dense_width: usize,
    /// All columns of an input row.
    width: usize,
}

impl PooledInput<'_> {
    /// Writes the input rows of these samples of the batch into a tape, from its row `at` on.
    fn write(self, tape: &mut Tape<f32>, at: usize, samples: Range<usize>) {
        let Self { batch, pooled, dense_width: dense, width } = self;
        let view = View { buffer: 0, column: 0, width };
        for (s, row) in samples.zip(at..) {
            let (left, right) = tape.values[0].row_mut(row, view).split_at_mut(dense);
            left.copy_from_slice(&batch.dense[s * dense..][..dense]);
            right.copy_from_slice(&pooled[s * (width - dense)..][..width - dense]);
        }
    }
}
