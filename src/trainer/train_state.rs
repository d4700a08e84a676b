//! The state of a model in training except its rows, and the part of a training step that does not depend on
//! where rows are stored.
//!
//! A step has three parallel loops with independent iterations: over chunks of samples (gather and pool,
//! forward, loss, backward), over tables and pieces of dense weights (gradient and update, in `update`), and
//! over panels of dense weights (transposes). The order of every sum depends on the batch alone, so any
//! number of threads gives the same bytes. Each chunk, table and piece is a separate job (`with_max_len`),
//! because it takes long: when another stage of the pipeline delays a thread, other threads run its
//! remaining jobs.
//!
//! Gathering works sample by sample, and updating works row by row. So the bytes do not depend on how
//! samples or rows are grouped, and a scratchpad may hold only part of the rows of a batch at a time.

use std::sync::Arc;

use rayon::prelude::*;

use super::TrainError;
use super::optim::{Optimizer, Step};
use crate::model::loss::{binary_cross_entropy, binary_cross_entropy_slope, sigmoid};
use crate::model::{InputRows, Model, Tape, Weights, check_length, check_shape};
use crate::pace::give_way;
use crate::predict::PredictError;
use crate::schema::{Lookup, Schema};
use crate::types::{Batch, Element, unix_ms};

/// The data that a step reads and writes, except rows.
pub struct TrainState {
    pub(crate) schema: Arc<Schema>,
    pub(crate) lookups: Arc<[Lookup]>,
    pub(crate) model: Model<f32>,
    pub(crate) weights: Weights<f32>,
    /// One vector per state of the dense optimizer, in its order. Each has the layout of `weights.values`.
    pub(crate) dense_states: Vec<Vec<f32>>,
    pub(crate) grads: Vec<f32>,
    pub(crate) tapes: Vec<Tape<f32>>,
    pub(crate) optimizer: Optimizer,
    pub(crate) steps: u64,
    /// Samples trained, in this run and before the version that it continues from.
    pub(crate) samples: u64,
    /// When the last step was taken, or the model initialised.
    pub(crate) last_batch_unix_ms: u64,
}

/// The parts of a new [`TrainState`].
pub(crate) struct TrainStateParts {
    pub schema: Schema,
    pub model: Model<f32>,
    pub weights: Weights<f32>,
    pub dense_states: Vec<Vec<f32>>,
    pub optimizer: Optimizer,
    pub steps: u64,
    pub samples: u64,
    pub last_batch_unix_ms: u64,
}

impl TrainState {
    pub(crate) fn new(parts: TrainStateParts) -> Self {
        let TrainStateParts { schema, model, mut weights, dense_states, optimizer, .. } = parts;
        model.transpose(&mut weights);
        // The trainer's rows are f32, whatever element type versions store.
        let in_f32 = |lookup| Lookup { element: Element::F32, ..lookup };
        Self {
            lookups: schema.lookups().into_iter().map(in_f32).collect(),
            grads: vec![0.0; weights.values.len()],
            tapes: Vec::new(),
            schema: schema.into(),
            model,
            weights,
            dense_states,
            optimizer,
            steps: parts.steps,
            samples: parts.samples,
            last_batch_unix_ms: parts.last_batch_unix_ms,
        }
    }

    /// Replaces the dense weights by those of a version. `tensor` finds a tensor's shape and values by its
    /// name.
    ///
    /// # Errors
    /// [`TrainError::Weights`] for a tensor that is missing or has another shape.
    pub(crate) fn read_dense(
        &mut self,
        tensor: impl Fn(&str) -> Option<(Vec<usize>, Vec<f32>)>,
    ) -> Result<(), TrainError> {
        self.weights = self.model.read_tensors(tensor)?;
        self.model.transpose(&mut self.weights);
        Ok(())
    }

    /// Prepares the tapes for `samples` samples.
    pub(crate) fn begin(&mut self, samples: usize) {
        let size = self.model.chunk();
        let chunks = samples.div_ceil(size);
        while self.tapes.len() < chunks {
            self.tapes.push(self.model.training_tape());
        }
        self.tapes.truncate(chunks);
        for (chunk, tape) in self.tapes.iter_mut().enumerate() {
            tape.samples = (samples - chunk * size).min(size);
        }
    }

    /// Writes the input rows of a batch to the tapes. Its first sample is number `at` of the samples that
    /// [`Self::begin`] prepared the tapes for. `rows` is as in [`InputRows::write`].
    pub(crate) fn gather<'r, R>(&mut self, batch: &Batch, at: usize, rows: impl Fn(usize) -> R + Sync)
    where
        R: Fn(usize) -> Option<&'r [u8]>,
    {
        let Self { schema, lookups, tapes, .. } = self;
        let inputs = InputRows { dense_width: schema.dense_width(), lookups, batch };
        let (mut parts, mut begins, end) = (Vec::new(), 0, at + batch.samples);
        for tape in tapes {
            let mine = at.max(begins)..end.min(begins + tape.samples);
            let row = mine.start.saturating_sub(begins);
            begins += tape.rows;
            if !mine.is_empty() {
                parts.push((tape, mine.start - at..mine.end - at, row));
            }
        }
        let parts = parts.into_par_iter().with_max_len(1);
        parts.for_each(|(tape, samples, row)| {
            give_way();
            inputs.write_at(samples, tape, row, &rows);
        });
    }

    /// Forward pass, loss and backward pass of all samples, after their input rows were written. Returns the
    /// summed loss.
    pub(crate) fn learn(&mut self, labels: &[f32]) -> f64 {
        self.each_chunk(labels, labels.len(), |_, _| ())
    }

    /// [`Self::begin`], [`Self::gather`] and [`Self::learn`] for a whole batch, chunk by chunk, so that the
    /// input rows of a chunk are still in the processor's cache. Gradients are those of the summed loss
    /// divided by `of`. A replica passes its part of a batch, with the samples of the whole batch as `of`.
    pub(crate) fn gather_and_learn<'r, R>(
        &mut self,
        Labelled { batch, labels }: Labelled<'_>,
        of: usize,
        rows: impl Fn(usize) -> R + Sync,
    ) -> f64
    where
        R: Fn(usize) -> Option<&'r [u8]>,
    {
        self.begin(batch.samples);
        let lookups = &self.lookups.clone();
        let inputs = InputRows { dense_width: self.schema.dense_width(), lookups, batch };
        self.each_chunk(labels, of, |chunk, tape| inputs.write(chunk * tape.rows, tape, &rows))
    }

    pub(crate) fn each_chunk(
        &mut self,
        labels: &[f32],
        of: usize,
        before: impl Fn(usize, &mut Tape<f32>) + Sync,
    ) -> f64 {
        let Self { model, weights, tapes, .. } = self;
        let share = 1.0 / of as f32;
        let chunks = tapes.par_iter_mut().with_max_len(1).zip(labels.par_chunks(model.chunk())).enumerate();
        let losses: Vec<f64> = chunks
            .map(|(chunk, (tape, labels))| {
                give_way();
                before(chunk, tape);
                model.forward(weights, tape);
                let loss = |(s, &y): (usize, &f32)| f64::from(binary_cross_entropy(model.logit(tape, s), y));
                let sum = labels.iter().enumerate().map(loss).sum();
                model.backward(weights, tape, |s, z| binary_cross_entropy_slope(z, labels[s]) * share);
                sum
            })
            .collect();
        losses.iter().sum()
    }

    /// Counts a step if there are samples and their loss is finite. Returns whether it did.
    pub(crate) fn counts_step(&mut self, loss: f64, samples: usize) -> bool {
        let takes = samples > 0 && loss.is_finite();
        if takes {
            self.steps += 1;
            self.samples += samples as u64;
            self.last_batch_unix_ms = unix_ms();
        }
        takes
    }

    /// The factors of the last counted step.
    pub(crate) fn row_step(&self) -> Step<f32> {
        self.optimizer.step(self.steps)
    }

    /// Runs the forward pass of a batch and leaves the logits in the tapes. `rows` is as in
    /// [`InputRows::write`].
    ///
    /// # Errors
    /// As [`Labelled::check`], without the check of labels.
    pub(crate) fn forward<'r, R>(
        &mut self,
        batch: &Batch,
        lookups: &[Lookup],
        rows: impl Fn(usize) -> R + Sync,
    ) -> Result<(), PredictError>
    where
        R: Fn(usize) -> Option<&'r [u8]>,
    {
        check_shape(&self.schema, batch)?;
        self.schema.check_absent(batch)?;
        self.begin(batch.samples);
        let Self { schema, model, weights, tapes, .. } = self;
        let inputs = InputRows { dense_width: schema.dense_width(), lookups, batch };
        tapes.par_iter_mut().with_max_len(1).enumerate().for_each(|(chunk, tape)| {
            give_way();
            inputs.write(chunk * tape.rows, tape, &rows);
            model.forward(weights, tape);
        });
        Ok(())
    }

    /// The logits of the samples of the last forward pass.
    pub(crate) fn read_logits(&self, logits: &mut Vec<f32>) {
        logits.clear();
        self.add_logits(logits);
    }

    /// Appends the logits of the samples of the last forward pass.
    pub(crate) fn add_logits(&self, logits: &mut Vec<f32>) {
        for tape in &self.tapes {
            logits.extend((0..tape.samples).map(|s| self.model.logit(tape, s)));
        }
    }

    /// Writes the probabilities of the samples of the last forward pass.
    pub(crate) fn read_probabilities(&self, probabilities: &mut Vec<f32>) {
        self.read_logits(probabilities);
        probabilities.iter_mut().for_each(|value| *value = sigmoid(*value));
    }
}

/// A batch to train on.
#[derive(Clone, Copy)]
pub(crate) struct Labelled<'a> {
    pub batch: &'a Batch,
    pub labels: &'a [f32],
}

impl Labelled<'_> {
    /// Checks the shape of the batch, the number of labels, and that no id is outside a table with the
    /// default `error`.
    ///
    /// # Errors
    /// [`PredictError`].
    pub(crate) fn check(&self, schema: &Schema) -> Result<(), PredictError> {
        check_shape(schema, self.batch)?;
        check_length("labels", self.batch.samples, self.labels.len())?;
        Ok(schema.check_absent(self.batch)?)
    }
}
