//! One training step, and scoring with the weights as they are.
//!
//! The step runs in three parallel loops, none of which shares anything between threads: over
//! chunks of samples (gather-pool, forward, loss, backward), over tables and pieces of dense weights
//! (gradient and update), over panels (transposes). Every sum has an order that the batch alone
//! decides, so any number of threads gives the same bytes.

use rayon::prelude::*;

use super::casting::Casted;
use super::optim::{Kind, Optimizer, Step};
use crate::device::vectorise;
use crate::model::loss::{binary_cross_entropy, binary_cross_entropy_slope, sigmoid};
use crate::model::{CHUNK, InputRows, Model, Tape, Weights, check_length, check_shape};
use crate::schema::{AbsentDefault, Lookup, Schema};
use crate::store::Table;
use crate::store::table::State;
use crate::types::{Batch, PredictError, TableId};

/// All that a step reads and writes.
pub struct Learner {
    schema: Schema,
    lookups: Vec<Lookup>,
    model: Model<f32>,
    weights: Weights<f32>,
    /// In the order of the dense optimizer's states, each laid out as the weights are.
    dense_states: Vec<Vec<f32>>,
    grads: Vec<f32>,
    tables: Vec<Table>,
    casted: Vec<Casted>,
    tapes: Vec<Tape<f32>>,
    optimizer: Optimizer,
    steps: u64,
}

/// What a learner is made of.
pub(super) struct Parts {
    pub schema: Schema,
    pub model: Model<f32>,
    pub weights: Weights<f32>,
    pub dense_states: Vec<Vec<f32>>,
    pub tables: Vec<Table>,
    pub optimizer: Optimizer,
    pub steps: u64,
}

impl Learner {
    pub(super) fn new(parts: Parts) -> Self {
        let Parts { schema, model, mut weights, dense_states, tables, optimizer, steps } = parts;
        model.turn(&mut weights);
        Self {
            lookups: schema.lookups(),
            grads: vec![0.0; weights.values.len()],
            casted: tables.iter().map(|_| Casted::default()).collect(),
            tapes: Vec::new(),
            schema,
            model,
            weights,
            dense_states,
            tables,
            optimizer,
            steps,
        }
    }

    /// The schema trained for.
    #[must_use]
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// The network.
    #[must_use]
    pub fn model(&self) -> &Model<f32> {
        &self.model
    }

    /// The dense weights.
    #[must_use]
    pub fn weights(&self) -> &Weights<f32> {
        &self.weights
    }

    /// The dense optimizer's states, in the order of its kind.
    #[must_use]
    pub fn dense_states(&self) -> &[Vec<f32>] {
        &self.dense_states
    }

    /// The tables.
    #[must_use]
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// The optimizer.
    #[must_use]
    pub fn optimizer(&self) -> Optimizer {
        self.optimizer
    }

    /// Steps taken.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Takes one step on the mean loss of the batch, whose probabilities before the step are
    /// written over `probabilities`. Gives the summed loss.
    ///
    /// # Errors
    /// [`PredictError`] when the batch is not of the schema's shape or has an id past a table whose
    /// default is `error`; nothing has changed then.
    pub fn step(
        &mut self,
        batch: &Batch,
        labels: &[f32],
        probabilities: &mut Vec<f32>,
    ) -> Result<f64, PredictError> {
        check_shape(&self.schema, batch)?;
        check_length("labels", batch.samples, labels.len())?;
        self.cast(batch)?;
        let losses = self.forward_backward(batch, labels);
        self.read_probabilities(probabilities);
        self.steps += 1;
        self.update();
        self.model.turn(&mut self.weights);
        Ok(losses)
    }

    /// Writes the probability of every sample over `probabilities`.
    ///
    /// # Errors
    /// As [`Learner::step`].
    pub fn score(&mut self, batch: &Batch, probabilities: &mut Vec<f32>) -> Result<(), PredictError> {
        check_shape(&self.schema, batch)?;
        self.schema.check_absent(batch)?;
        self.fill_tapes(batch.samples);
        let Self { schema, lookups, model, weights, tables, tapes, .. } = self;
        let inputs = InputRows { dense_width: schema.dense_width(), lookups, batch };
        let rows = |l: usize| {
            let Lookup { feature, table, .. } = lookups[l];
            row_of(&tables[table.index()], schema.tables[table.index()].default, &batch.features[feature].ids)
        };
        tapes.par_iter_mut().enumerate().for_each(|(chunk, tape)| {
            inputs.write(chunk * CHUNK, tape, rows);
            model.forward(weights, tape);
        });
        self.read_probabilities(probabilities);
        Ok(())
    }

    /// The casted index of every table.
    fn cast(&mut self, batch: &Batch) -> Result<(), PredictError> {
        let (schema, lookups) = (&self.schema, &self.lookups);
        let results = self.casted.par_iter_mut().enumerate().map(|(t, casted)| {
            let table = TableId(t as u32);
            casted.fill(schema, lookups, table, batch).map_err(|(feature, id)| PredictError::AbsentId {
                feature: schema.features[feature].name.clone(),
                table: schema.tables[t].name.clone(),
                id,
                rows: schema.tables[t].rows,
            })
        });
        // The first error in table order, whichever thread was first.
        results.collect::<Vec<_>>().into_iter().collect()
    }

    fn fill_tapes(&mut self, samples: usize) {
        let chunks = samples.div_ceil(CHUNK);
        while self.tapes.len() < chunks {
            self.tapes.push(self.model.tape(true));
        }
        self.tapes.truncate(chunks);
        for (chunk, tape) in self.tapes.iter_mut().enumerate() {
            tape.samples = (samples - chunk * CHUNK).min(CHUNK);
        }
    }

    fn forward_backward(&mut self, batch: &Batch, labels: &[f32]) -> f64 {
        self.fill_tapes(batch.samples);
        let Self { schema, lookups, model, weights, tables, tapes, .. } = self;
        let inputs = InputRows { dense_width: schema.dense_width(), lookups, batch };
        let rows = |l: usize| {
            let Lookup { feature, table, .. } = lookups[l];
            row_of(&tables[table.index()], schema.tables[table.index()].default, &batch.features[feature].ids)
        };
        let share = 1.0 / batch.samples as f32;
        let losses: Vec<f64> = tapes
            .par_iter_mut()
            .zip(labels.par_chunks(CHUNK))
            .enumerate()
            .map(|(chunk, (tape, labels))| {
                inputs.write(chunk * CHUNK, tape, rows);
                model.forward(weights, tape);
                let loss = |(s, &y): (usize, &f32)| f64::from(binary_cross_entropy(model.logit(tape, s), y));
                let sum = labels.iter().enumerate().map(loss).sum();
                model.backward(weights, tape, |s, z| binary_cross_entropy_slope(z, labels[s]) * share);
                sum
            })
            .collect();
        losses.iter().sum()
    }

    fn read_probabilities(&self, probabilities: &mut Vec<f32>) {
        probabilities.clear();
        for tape in &self.tapes {
            probabilities.extend((0..tape.samples).map(|s| sigmoid(self.model.logit(tape, s))));
        }
    }

    /// Gradients and updates of rows, table by table, and of dense weights, piece by piece.
    fn update(&mut self) {
        let Self { model, weights, dense_states, grads, tables, casted, tapes, optimizer, .. } = self;
        let tapes = &tapes[..];
        let dense = Optimizer { kind: optimizer.kind.dense(), ..*optimizer }.step(self.steps);
        let rows = optimizer.step(self.steps);
        let pieces = split_pieces(model, &mut weights.values, grads, dense_states);
        rayon::join(
            || {
                pieces.into_par_iter().enumerate().for_each(|(i, mut piece)| {
                    model.gradient(i, tapes, piece.grads);
                    dense.update_dense(piece.weights, piece.grads, &mut piece.states);
                });
            },
            || {
                tables.par_iter_mut().zip(casted).for_each(|(table, casted)| {
                    update_rows(table, casted, tapes, &rows);
                });
            },
        );
    }
}

/// One piece of the dense weights with all that its update touches.
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

/// The gather-reduce of one table, fused with the optimizer (Tensor Casting, section IV).
fn update_rows(table: &mut Table, casted: &Casted, tapes: &[Tape<f32>], step: &Step<f32>) {
    let dim = table.dim();
    let Some((weights, states)) = table.parts_mut() else {
        debug_assert!(false, "a learner's tables are its own");
        return;
    };
    let widths: Vec<usize> = states.iter().map(State::width).collect();
    let mut states: Vec<&mut [f32]> = states.iter_mut().filter_map(State::rows_mut).collect();
    let mut grad = vec![0.0f32; dim];
    vectorise(|| {
        for (row, sources) in casted.rows() {
            for (i, source) in sources.enumerate() {
                let (tape, s) = (&tapes[source.sample as usize / CHUNK], source.sample as usize % CHUNK);
                let input = &tape.grads[0];
                let from = &input.data[s * input.stride + source.column as usize..][..dim];
                if i == 0 {
                    grad.iter_mut().zip(from).for_each(|(sum, g)| *sum = *g / source.divisor);
                } else {
                    grad.iter_mut().zip(from).for_each(|(sum, g)| *sum += *g / source.divisor);
                }
            }
            let row = row as usize;
            let weights = &mut weights[row * dim..][..dim];
            match &mut states[..] {
                [] => step.update_row(weights, &grad, &mut []),
                [one] => step.update_row(weights, &grad, &mut [&mut one[row * widths[0]..][..widths[0]]]),
                [one, two, ..] => {
                    let one = &mut one[row * widths[0]..][..widths[0]];
                    let two = &mut two[row * widths[1]..][..widths[1]];
                    step.update_row(weights, &grad, &mut [one, two]);
                }
            }
        }
    });
}

/// The row of occurrence `i` among `ids`; an absent one is what the table's default says.
fn row_of<'t>(
    table: &'t Table,
    default: AbsentDefault,
    ids: &'t [u64],
) -> impl Fn(usize) -> Option<&'t [f32]> {
    let absent = match default {
        AbsentDefault::Row(row) => table.row(row),
        AbsentDefault::Zeros | AbsentDefault::Error => None,
    };
    let rows = table.view();
    move |i| rows.row(ids[i]).or(absent)
}

/// States of dense weights for an optimizer: zeros.
pub(super) fn zeroed_states(kind: Kind, len: usize) -> Vec<Vec<f32>> {
    kind.dense().row_states().iter().map(|_| vec![0.0; len]).collect()
}
