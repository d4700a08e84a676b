//! One training step, and scoring with the weights as they are.
//!
//! The step runs in three parallel loops, none of which shares anything between threads: over
//! chunks of samples (gather-pool, forward, loss, backward), over tables and pieces of dense weights
//! (gradient and update, in `update`), over panels (transposes). Every sum has an order that the batch alone
//! decides, so any number of threads gives the same bytes.

use rayon::prelude::*;

use super::casting::Casted;
use super::optim::Optimizer;
use crate::model::loss::{binary_cross_entropy, binary_cross_entropy_slope, sigmoid};
use crate::model::{InputRows, Model, Tape, Weights, check_length, check_shape};
use crate::schema::{Lookup, Schema};
use crate::store::{EmbeddingStore, Table, rows_of};
use crate::types::{Batch, Element, PredictError, TableId};

/// All that a step reads and writes.
pub struct Learner {
    pub(super) schema: Schema,
    pub(super) lookups: Vec<Lookup>,
    pub(super) model: Model<f32>,
    pub(super) weights: Weights<f32>,
    /// In the order of the dense optimizer's states, each laid out as the weights are.
    pub(super) dense_states: Vec<Vec<f32>>,
    pub(super) grads: Vec<f32>,
    pub(super) tables: Vec<Table>,
    pub(super) casted: Vec<Casted>,
    pub(super) tapes: Vec<Tape<f32>>,
    pub(super) optimizer: Optimizer,
    pub(super) steps: u64,
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
        // Whatever a version's rows are stored in, those of a learner are f32.
        let in_f32 = |lookup| Lookup { element: Element::F32, ..lookup };
        Self {
            lookups: schema.lookups().into_iter().map(in_f32).collect(),
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
    /// written over `probabilities`. Gives the summed loss. There is no step on a batch of no samples,
    /// nor where the loss is not finite.
    ///
    /// # Errors
    /// [`PredictError`] when the batch is not of the schema's shape, has an id past a table whose
    /// default is `error`, or looks up more than 2^32 - 1 ids in one table; nothing has changed then.
    pub fn step(
        &mut self,
        batch: &Batch,
        labels: &[f32],
        probabilities: &mut Vec<f32>,
    ) -> Result<f64, PredictError> {
        check_shape(&self.schema, batch)?;
        check_length("labels", batch.samples, labels.len())?;
        self.schema.check_absent(batch)?;
        self.cast(batch)?;
        let loss = self.forward_backward(batch, labels);
        self.read_probabilities(probabilities);
        if batch.samples > 0 && loss.is_finite() {
            self.steps += 1;
            self.update();
            self.model.turn(&mut self.weights);
        }
        Ok(loss)
    }

    /// Writes the probability of every sample over `probabilities`.
    ///
    /// # Errors
    /// As [`Learner::step`].
    pub fn score(&mut self, batch: &Batch, probabilities: &mut Vec<f32>) -> Result<(), PredictError> {
        self.prepare_scoring(batch)?;
        let Self { schema, lookups, model, weights, tables, tapes, .. } = self;
        let inputs = InputRows { dense_width: schema.dense_width(), lookups, batch };
        forward(model, weights, tapes, &inputs, |l| rows_of(tables, schema, &lookups[l], batch));
        self.read_probabilities(probabilities);
        Ok(())
    }

    /// [`Learner::score`] with the rows of a version that this learner wrote, as they are stored.
    ///
    /// # Errors
    /// As [`Learner::step`].
    ///
    /// # Panics
    /// When the version is of another schema.
    pub fn score_rows_of(
        &mut self,
        version: &EmbeddingStore,
        batch: &Batch,
        probabilities: &mut Vec<f32>,
    ) -> Result<(), PredictError> {
        self.prepare_scoring(batch)?;
        let Self { schema, model, weights, tapes, .. } = self;
        let lookups = &schema.lookups()[..];
        let inputs = InputRows { dense_width: schema.dense_width(), lookups, batch };
        let tables = version.tables();
        forward(model, weights, tapes, &inputs, |l| rows_of(tables, schema, &lookups[l], batch));
        self.read_probabilities(probabilities);
        Ok(())
    }

    fn prepare_scoring(&mut self, batch: &Batch) -> Result<(), PredictError> {
        check_shape(&self.schema, batch)?;
        self.schema.check_absent(batch)?;
        self.fill_tapes(batch.samples);
        Ok(())
    }

    /// The casted index of every table.
    fn cast(&mut self, batch: &Batch) -> Result<(), PredictError> {
        let (schema, lookups) = (&self.schema, &self.lookups);
        for t in 0..self.casted.len() {
            let of_table = lookups.iter().filter(|l| l.table.index() == t);
            let needed = of_table.map(|l| batch.features[l.feature].ids.len() as u64).sum();
            let limit = u64::from(u32::MAX);
            if needed > limit {
                return Err(PredictError::Capacity { field: "ids of one table in a batch", needed, limit });
            }
        }
        self.casted.par_iter_mut().enumerate().for_each(|(t, casted)| {
            casted.fill(schema, lookups, TableId(t as u32), batch);
        });
        Ok(())
    }

    fn fill_tapes(&mut self, samples: usize) {
        let size = self.model.chunk();
        let chunks = samples.div_ceil(size);
        while self.tapes.len() < chunks {
            self.tapes.push(self.model.tape(true));
        }
        self.tapes.truncate(chunks);
        for (chunk, tape) in self.tapes.iter_mut().enumerate() {
            tape.samples = (samples - chunk * size).min(size);
        }
    }

    fn forward_backward(&mut self, batch: &Batch, labels: &[f32]) -> f64 {
        self.fill_tapes(batch.samples);
        let Self { schema, lookups, model, weights, tables, tapes, .. } = self;
        let inputs = InputRows { dense_width: schema.dense_width(), lookups, batch };
        let share = 1.0 / batch.samples as f32;
        let losses: Vec<f64> = tapes
            .par_iter_mut()
            .zip(labels.par_chunks(model.chunk()))
            .enumerate()
            .map(|(chunk, (tape, labels))| {
                inputs.write(chunk * tape.rows, tape, |l| rows_of(tables, schema, &lookups[l], batch));
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
}

/// Fills every tape's input rows and runs the network on them. `rows` as in [`InputRows::write`].
fn forward<'r, R>(
    model: &Model<f32>,
    weights: &Weights<f32>,
    tapes: &mut [Tape<f32>],
    inputs: &InputRows<'_>,
    rows: impl Fn(usize) -> R + Sync,
) where
    R: Fn(usize) -> Option<&'r [u8]>,
{
    tapes.par_iter_mut().enumerate().for_each(|(chunk, tape)| {
        inputs.write(chunk * tape.rows, tape, &rows);
        model.forward(weights, tape);
    });
}
