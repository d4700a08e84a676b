//! The second half of a step: it computes the gradients of rows and dense weights and runs the optimizer.

use std::ops::Range;

use rayon::prelude::*;

use super::casting::{CastedIndex, Casting, GradientSource};
use super::optim::{Optimizer, Step};
use super::publish::{KeptRows, RecordParts};
use super::train_state::TrainState;
use crate::compute::{Wide, vectorise};
use crate::model::{Model, Tape};
use crate::pace::give_way;
use crate::store::Table;

impl TrainState {
    /// Updates dense weights, one piece per job. At the same time it calls `rows`, which updates the rows.
    pub(crate) fn update(&mut self, rows: impl FnOnce(&RowUpdate<'_>) + Send) {
        let (step, dense) = (self.row_step(), self.dense_step());
        let Self { model, weights, dense_states, grads, tapes, .. } = self;
        let tapes = &tapes[..];
        let pieces = split_pieces(model, &mut weights.values, grads, dense_states);
        rayon::join(
            || {
                pieces.into_par_iter().with_max_len(1).enumerate().for_each(|(i, mut piece)| {
                    give_way();
                    model.gradient(i, tapes, piece.grads);
                    dense.update_dense(piece.weights, piece.grads, &mut piece.states);
                });
            },
            || rows(&RowUpdate { tapes, step }),
        );
        model.transpose(weights);
    }

    /// The factors of the last counted step for the optimizer of dense weights.
    fn dense_step(&self) -> Step<f32> {
        let kind = self.optimizer.kind.dense();
        Optimizer { kind, ..self.optimizer }.step(self.steps)
    }

    /// Computes the dense gradients of the last backward pass into `grads`: the first half of
    /// [`Self::update`], for replicas, which sum their gradients before the second half.
    pub(crate) fn sum_gradients(&mut self) {
        let Self { model, grads, tapes, .. } = self;
        let mut rest = &mut grads[..];
        let pieces = model.pieces().map(|len| rest.split_off_mut(..len).unwrap_or_default());
        let pieces: Vec<_> = pieces.collect();
        pieces.into_par_iter().with_max_len(1).enumerate().for_each(|(i, piece)| {
            give_way();
            model.gradient(i, tapes, piece);
        });
    }

    /// Updates dense weights with the gradients in `grads`: the second half of [`Self::update`].
    pub(crate) fn update_dense(&mut self) {
        let dense = self.dense_step();
        let Self { model, weights, dense_states, grads, .. } = self;
        let pieces = split_pieces(model, &mut weights.values, grads, dense_states);
        pieces.into_par_iter().with_max_len(1).for_each(|mut piece| {
            give_way();
            dense.update_dense(piece.weights, piece.grads, &mut piece.states);
        });
        model.transpose(weights);
    }

    /// The row update of the last counted step.
    pub(crate) fn row_update(&self) -> RowUpdate<'_> {
        RowUpdate { tapes: &self.tapes, step: self.row_step() }
    }
}

/// The update of rows in one step: the gradients of its input rows, and the optimizer's factors.
pub struct RowUpdate<'a> {
    /// The gradients are in buffer 0 of each. All tapes except the last are full.
    pub tapes: &'a [Tape<f32>],
    /// The factors of this step.
    pub step: Step<f32>,
}

impl RowUpdate<'_> {
    /// Updates all rows of all tables, one table per job. `records` has the tables in the schema's order.
    pub fn tables<R: Records>(&self, records: impl Iterator<Item = R>, casting: &Casting) {
        let records: Vec<R> = records.collect();
        records.into_par_iter().with_max_len(1).zip(casting.tables()).for_each(|(records, casted)| {
            give_way();
            self.rows(records, casted, 0..casted.rows().len());
        });
    }

    /// Updates rows `range` of the casted index by the gather-reduce of Tensor Casting (section IV), fused
    /// with the optimizer.
    pub(crate) fn rows<R: Records>(&self, records: R, casted: &CastedIndex, range: Range<usize>) {
        let count = range.len();
        let records = vectorise(UpdateRows { records, casted, range, tapes: self.tapes, step: &self.step });
        records.after_updates(count);
    }

    /// Writes the gradients of all rows of the casted index to `out`, end to end, `dim` elements each. This
    /// is the gather-reduce without the optimizer.
    pub(crate) fn coalesce(&self, casted: &CastedIndex, dim: usize, out: &mut [f32]) {
        vectorise(|| {
            for (k, grad) in out.chunks_exact_mut(dim.max(1)).enumerate() {
                sum_sources(self.tapes, casted.sources(k), grad);
            }
        });
    }
}

/// Access to the rows of a table and their states during an update.
pub trait Records: Send + Sized {
    /// Row `k` of the casted index, which is row `row` of the table.
    fn record(&mut self, k: usize, row: u64) -> Record<'_>;

    /// Called once, after the last row, with the number of rows.
    fn after_updates(self, _rows: usize) {}
}

/// One row and its state.
#[allow(missing_docs)]
pub struct Record<'a> {
    pub weights: &'a mut [f32],
    /// Unused states are empty.
    pub states: [&'a mut [f32]; 2],
    /// How many of `states` the optimizer has.
    pub count: usize,
}

impl Record<'_> {
    /// Updates the row with this gradient.
    #[inline(always)]
    pub(crate) fn update(self, step: &Step<f32>, grad: &[f32]) {
        let Self { weights, states: [one, two], count } = self;
        match count {
            0 => step.update_row(weights, grad, &mut []),
            1 => step.update_row(weights, grad, &mut [one]),
            _ => step.update_row(weights, grad, &mut [one, two]),
        }
    }
}

/// The sizes of the parts of a record: the weights of a row, and then its states.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordShape {
    pub dim: usize,
    /// Elements of each state.
    widths: [usize; 2],
    /// How many states the optimizer has.
    count: usize,
}

impl RecordShape {
    /// The shapes of all tables of the schema.
    pub(crate) fn of(state: &TrainState) -> Vec<Self> {
        let states = state.optimizer.kind.row_states();
        let shape = |dim: usize| {
            let width = |at: usize| states.get(at).map_or(0, |state| if state.rowwise { 1 } else { dim });
            Self { dim, widths: [width(0), width(1)], count: states.len() }
        };
        state.schema.tables.iter().map(|table| shape(table.dim)).collect()
    }

    /// Splits a record.
    #[inline(always)]
    pub(crate) fn cut(self, record: &mut [f32]) -> Record<'_> {
        let (weights, rest) = record.split_at_mut(self.dim.min(record.len()));
        let (one, two) = rest.split_at_mut(self.widths[0].min(rest.len()));
        Record { weights, states: [one, two], count: self.count }
    }
}

/// A piece of the dense weights, with its gradients and states.
struct Piece<'a> {
    weights: &'a mut [f32],
    grads: &'a mut [f32],
    states: Vec<&'a mut [f32]>,
}

fn split_pieces<'a>(
    model: &Model<f32>,
    mut weights: &'a mut [f32],
    mut grads: &'a mut [f32],
    states: &'a mut [Vec<f32>],
) -> Vec<Piece<'a>> {
    let mut states: Vec<&mut [f32]> = states.iter_mut().map(|state| &mut state[..]).collect();
    let pieces = model.pieces().map(|len| Piece {
        weights: weights.split_off_mut(..len).unwrap_or_default(),
        grads: grads.split_off_mut(..len).unwrap_or_default(),
        states: states.iter_mut().map(|state| state.split_off_mut(..len).unwrap_or_default()).collect(),
    });
    pieces.collect()
}

/// The rows of a table in memory.
pub struct RowsInMemory<'a> {
    rows: AllRows<'a>,
    /// What a version needs of the rows that are updated.
    kept: Option<KeptRows<'a>>,
}

/// All rows of a table, and their states.
struct AllRows<'a> {
    dim: usize,
    weights: &'a mut [f32],
    /// For each state, its elements per row and its values for all rows.
    states: [(usize, &'a mut [f32]); 2],
    count: usize,
}

impl<'a> RowsInMemory<'a> {
    /// All rows of a trainer's table, which must be f32 in owned memory. Any other table gives no rows.
    pub fn of(table: &'a mut Table) -> Self {
        let dim = table.dim();
        let Some((weights, all)) = table.parts_mut() else {
            debug_assert!(false, "a trainer's tables are f32 in owned memory");
            let rows = AllRows { dim, weights: &mut [], states: Default::default(), count: 0 };
            return Self { rows, kept: None };
        };
        let (mut states, count): ([_; 2], _) = (Default::default(), all.len());
        for (to, state) in states.iter_mut().zip(all) {
            *to = (state.width(), state.rows_mut().unwrap_or_default());
        }
        Self { rows: AllRows { dim, weights, states, count }, kept: None }
    }

    /// Also keeps what a version needs of the rows that are updated. Marks and rows are all over memory, so
    /// another loop over them would wait for each again: to mark rows in a loop of its own took 5 % of a
    /// step, and takes 2 % in this one (26 tables of 700,000 rows, Xeon, 2026-11-29).
    pub(crate) fn keeping(self, kept: Option<KeptRows<'a>>) -> Self {
        Self { kept, ..self }
    }
}

impl AllRows<'_> {
    #[inline(always)]
    fn parts(&self, row: u64) -> RecordParts<'_> {
        let at = |width: usize| row as usize * width..(row as usize + 1) * width;
        let [one, two] = self.states.each_ref().map(|(width, rows)| &rows[at(*width)]);
        [&self.weights[at(self.dim)], one, two]
    }
}

impl Records for RowsInMemory<'_> {
    #[inline(always)]
    fn record(&mut self, _: usize, row: u64) -> Record<'_> {
        if let Some(kept) = &mut self.kept {
            kept.before_update(row, || self.rows.parts(row));
        }
        let AllRows { dim, weights, states, count } = &mut self.rows;
        let row = row as usize;
        let weights = &mut weights[row * *dim..][..*dim];
        let states = states.each_mut().map(|(width, rows)| match *width {
            0 => Default::default(),
            width => &mut rows[row * width..][..width],
        });
        Record { weights, states, count: *count }
    }

    fn after_updates(self, rows: usize) {
        if let Some(kept) = self.kept {
            kept.after_updates(rows, |row| self.rows.parts(row));
        }
    }
}

struct UpdateRows<'a, R> {
    records: R,
    casted: &'a CastedIndex,
    range: Range<usize>,
    tapes: &'a [Tape<f32>],
    step: &'a Step<f32>,
}

impl<R: Records> Wide for UpdateRows<'_, R> {
    type Output = R;
    #[inline(always)]
    fn run(self) -> R {
        let Self { mut records, casted, range, tapes, step } = self;
        let mut grad = Vec::new();
        for k in range {
            let record = records.record(k, casted.rows()[k]);
            grad.resize(record.weights.len(), 0.0f32);
            sum_sources(tapes, casted.sources(k), &mut grad);
            record.update(step, &grad);
        }
        records
    }
}

/// Writes the gradient of a row to `sum`: the sum over its sources. There is at least one source.
#[inline(always)]
fn sum_sources(tapes: &[Tape<f32>], sources: &[GradientSource], sum: &mut [f32]) {
    let chunk = tapes.first().map_or(1, |tape| tape.rows as u32);
    for (i, source) in sources.iter().enumerate() {
        let (tape, s) = (source.sample / chunk, source.sample % chunk);
        let from = &tapes[tape as usize].grads[0].from(s as usize, source.column as usize)[..sum.len()];
        if i == 0 {
            sum.iter_mut().zip(from).for_each(|(sum, g)| *sum = *g / source.divisor);
        } else {
            sum.iter_mut().zip(from).for_each(|(sum, g)| *sum += *g / source.divisor);
        }
    }
}
