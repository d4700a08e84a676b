//! Train on a device's scratchpad: rows are pooled and updated there, and dense layers run on the host, so
//! that every bit is the same on every device.
//!
//! A step is `train`'s, in the same order: the device pools the batch's input rows, which are written to the
//! tapes beside the dense values; the tapes are learnt; then the device gets the gradients of the input rows,
//! sums them by the casted index and updates the rows, while the host updates dense weights. Each call waits
//! for the device, so a step that is taken is taken there too.

use std::ops::Range;

use rayon::prelude::*;

use super::super::item::PreparedBatch;
use super::super::train::Train;
use crate::model::{Tape, View};
use crate::schema::{Lookup, Pooling, Schema};
use crate::trainer::TrainError;
use crate::trainer::casting::Casting;
use crate::trainer::pipeline::gpu::{
    Gather, GatherLookup, Run, Scratch, ScratchError, Stepper, TableSlots, Update, UpdateRows,
};
use crate::trainer::pipeline::slot_flags::{Held, NotClaimed};
use crate::trainer::train_state::TrainState;
use crate::trainer::update::RowUpdate;
use crate::types::{Batch, TableId};

/// What a device needs to know of a network.
struct Shape<'a> {
    schema: &'a Schema,
    lookups: &'a [Lookup],
    /// Of each table: which size of slots, and words of a record.
    tables: &'a [(usize, usize)],
}

impl Train<'_> {
    /// Takes a step.
    pub(crate) fn step_on(&mut self, scratch: &dyn Scratch, cast: &PreparedBatch) -> Result<(), TrainError> {
        let held = claim(scratch, self.tables, cast)?;
        let loss = self.with_device(|network, stepper, shape| {
            let pooled = shape.gather(stepper, &held, &cast.casting, &cast.batch)?;
            Ok(network.learn_pooled(&cast.batch, &cast.labels, pooled))
        })?;
        self.network.read_probabilities(&mut self.probabilities);
        self.learnt(cast, loss)?;
        self.with_device(|network, stepper, shape| {
            let tables = shape.tables(&held);
            let parts = tables.iter().zip(cast.casting.tables());
            let tables: Vec<_> = parts
                .map(|(&rows, casted)| {
                    let (sources, ends, first) = casted.part(0..casted.rows().len());
                    UpdateRows { rows, sources, ends, first }
                })
                .collect();
            let mut updated = Ok(());
            network.update(|update| {
                updated = shape.update(stepper, update, (&tables, cast.batch.samples));
            });
            updated
        })?;
        drop(held);
        if self.watch.wants_rows() {
            for ((bounds, casted), t) in cast.starts.windows(2).zip(cast.casting.tables()).zip(0..) {
                self.show_on(TableId(t), casted.rows(), &cast.slots[bounds[0]..bounds[1]])?;
            }
        }
        self.watch.stepped(self.network);
        Ok(())
    }

    /// Writes the input rows of a part of a batch's samples, of which `at` come before.
    pub(crate) fn gather_on(
        &mut self,
        scratch: &dyn Scratch,
        (part, at): (&PreparedBatch, usize),
        whole: &PreparedBatch,
    ) -> Result<(), TrainError> {
        let held = claim(scratch, self.tables, part)?;
        self.with_device(|network, stepper, shape| {
            let pooled = shape.gather(stepper, &held, &part.casting, &part.batch)?;
            network.place_pooled(&part.batch, at, pooled);
            Ok(())
        })?;
        self.gathered(at + part.batch.samples, whole)
    }

    /// Updates some of the rows of a batch that was split.
    pub(crate) fn update_on(
        &mut self,
        scratch: &dyn Scratch,
        whole: &PreparedBatch,
        rows: Range<usize>,
        slots: &[u32],
    ) -> Result<(), TrainError> {
        let mut parts = Vec::new();
        for (t, of_table, places) in whole.parts(rows.clone()) {
            let held = scratch.flags(self.tables[t].0).claim(&slots[places])?;
            parts.push((t, of_table, held));
        }
        self.with_device(|network, stepper, shape| {
            let tables: Vec<UpdateRows<'_>> = parts
                .iter()
                .map(|(t, mine, held)| {
                    let (sources, ends, first) = whole.casting.tables()[*t].part(mine.clone());
                    UpdateRows { rows: shape.rows(*t, held), sources, ends, first }
                })
                .collect();
            shape.update(stepper, &network.row_update(), (&tables, whole.batch.samples))
        })?;
        let shown: Vec<_> = parts.into_iter().map(|(t, mine, held)| (t, mine, held.list())).collect();
        if self.watch.wants_rows() {
            for (t, mine, list) in shown {
                self.show_on(TableId(t as u32), &whole.casting.tables()[t].rows()[mine], list)?;
            }
        }
        if whole.starts.last() == Some(&rows.end) {
            self.watch.stepped(self.network);
        }
        Ok(())
    }

    /// Tells of rows that lie in these slots, which nobody has: a step is over, and no later item moves them
    /// yet.
    fn show_on(&mut self, table: TableId, rows: &[u64], list: &[u32]) -> Result<(), TrainError> {
        let (size, words) = self.tables[table.index()];
        let records = self.pad.read(size, list)?;
        rows.iter()
            .zip(records.chunks_exact(words))
            .for_each(|(&row, record)| self.watch.row(table, row, record));
        Ok(())
    }

    fn with_device<T>(
        &mut self,
        work: impl FnOnce(&mut TrainState, &mut dyn Stepper, &Shape<'_>) -> Result<T, ScratchError>,
    ) -> Result<T, TrainError> {
        let (schema, lookups) = (self.network.schema.clone(), self.network.lookups.clone());
        let shape = Shape { schema: &schema, lookups: &lookups, tables: self.tables };
        // The pipeline gives a stepper where the scratchpad is a device's.
        let stepper = self.stepper.as_mut().ok_or(TrainError::Stopped)?;
        Ok(work(self.network, &mut **stepper, &shape)?)
    }
}

/// Claims all rows of a batch, table by table.
fn claim<'c>(
    scratch: &'c dyn Scratch,
    tables: &[(usize, usize)],
    cast: &'c PreparedBatch,
) -> Result<Vec<Held<'c>>, NotClaimed> {
    let claim = |(bounds, (size, _)): (&[usize], &(usize, usize))| {
        scratch.flags(*size).claim(&cast.slots[bounds[0]..bounds[1]])
    };
    cast.starts.windows(2).zip(tables).map(claim).collect()
}

impl Shape<'_> {
    /// A table's rows that are held.
    fn rows<'h>(&self, t: usize, held: &'h Held<'h>) -> TableSlots<'h> {
        TableSlots { run: Run { size: self.tables[t].0, held }, dim: self.schema.tables[t].dim }
    }

    /// All tables' rows.
    fn tables<'h>(&self, held: &'h [Held<'h>]) -> Vec<TableSlots<'h>> {
        held.iter().enumerate().map(|(t, held)| self.rows(t, held)).collect()
    }

    /// The pooled part of the batch's input rows.
    fn gather<'s>(
        &self,
        stepper: &'s mut dyn Stepper,
        held: &[Held<'_>],
        casting: &Casting,
        batch: &Batch,
    ) -> Result<&'s [f32], ScratchError> {
        let lookups = self.lookups.iter().enumerate().map(|(l, lookup)| GatherLookup {
            table: lookup.table.index(),
            mean: lookup.pooling == Pooling::Mean,
            offsets: &batch.features[lookup.feature].offsets,
            places: casting.places(l, lookup),
        });
        let lookups: Vec<_> = lookups.collect();
        stepper.gather(&Gather { samples: batch.samples, tables: &self.tables(held), lookups: &lookups })
    }

    /// Updates these rows from the gradients of so many samples.
    fn update(
        &self,
        stepper: &mut dyn Stepper,
        update: &RowUpdate<'_>,
        (tables, samples): (&[UpdateRows<'_>], usize),
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
    /// [`TrainState::gather_and_learn`] with input rows that are pooled: `pooled` has all but the dense values
    /// of each.
    fn learn_pooled(&mut self, batch: &Batch, labels: &[f32], pooled: &[f32]) -> f64 {
        self.begin(batch.samples);
        let widths = self.widths();
        self.each_chunk(labels, labels.len(), |chunk, tape| {
            let first = chunk * tape.rows;
            write_pooled(tape, 0, (batch, pooled, widths), first..first + tape.samples);
        })
    }

    /// [`TrainState::gather`] with input rows that are pooled.
    fn place_pooled(&mut self, batch: &Batch, at: usize, pooled: &[f32]) {
        let (widths, mut begins) = (self.widths(), 0);
        for tape in &mut self.tapes {
            let mine = at.max(begins)..(at + batch.samples).min(begins + tape.samples);
            let row = mine.start.saturating_sub(begins);
            begins += tape.rows;
            if !mine.is_empty() {
                write_pooled(tape, row, (batch, pooled, widths), mine.start - at..mine.end - at);
            }
        }
    }

    /// Columns of dense values, and of all.
    fn widths(&self) -> (usize, usize) {
        (self.schema.dense_width(), self.schema.input_width())
    }
}

/// Writes the input rows of these samples of the batch into a tape, from its row `at` on.
fn write_pooled(
    tape: &mut Tape<f32>,
    at: usize,
    (batch, pooled, (dense, width)): (&Batch, &[f32], (usize, usize)),
    samples: Range<usize>,
) {
    let view = View { buffer: 0, column: 0, width };
    for (s, row) in samples.zip(at..) {
        let (left, right) = tape.values[0].row_mut(row, view).split_at_mut(dense);
        left.copy_from_slice(&batch.dense[s * dense..][..dense]);
        right.copy_from_slice(&pooled[s * (width - dense)..][..width - dense]);
    }
}
