//! The sequential trainer: one step after another on tables in memory. The pipeline is tested against it.

use std::iter;

use super::casting::Casting;
use super::publish::KeptRows;
use super::read_ahead::{ReadAhead, WAITING_GROUPS};
use super::train_state::{Labelled, TrainState, TrainStateParts};
use super::update::RowsInMemory;
use super::{Data, Progress, StepResult, TrainError};
use crate::dataset::Reader;
use crate::model::Weights;
use crate::predict::PredictError;
use crate::schema::Schema;
use crate::store::{EmbeddingStore, Table, rows_of};
use crate::types::Batch;

/// A model in training, with all its rows in memory.
pub struct ReferenceTrainer {
    pub(crate) state: TrainState,
    pub(crate) tables: Vec<Table>,
    casting: Casting,
}

impl ReferenceTrainer {
    pub(crate) fn new(parts: TrainStateParts, tables: Vec<Table>) -> Self {
        Self { state: TrainState::new(parts), tables, casting: Casting::default() }
    }

    /// The schema of the model.
    #[must_use]
    pub(crate) fn schema(&self) -> &Schema {
        &self.state.schema
    }

    /// The dense weights.
    #[must_use]
    pub fn weights(&self) -> &Weights<f32> {
        &self.state.weights
    }

    /// The states of the dense optimizer; of Adam, the first moment and then the second.
    #[must_use]
    pub(crate) fn dense_states(&self) -> &[Vec<f32>] {
        &self.state.dense_states
    }

    /// The tables.
    #[must_use]
    pub(crate) fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// The tables.
    #[must_use]
    pub fn into_tables(self) -> Vec<Table> {
        self.tables
    }

    /// Steps taken.
    #[must_use]
    pub(crate) fn steps(&self) -> u64 {
        self.state.steps
    }

    /// Takes one step on the mean loss of the batch, and writes the logits before the step to `logits`.
    /// Returns the summed loss. No step is taken for an empty batch or a loss that is not finite.
    ///
    /// # Errors
    /// [`PredictError`] when the batch does not have the shape of the schema, has an id outside a table with
    /// the default `error`, or looks up more than 2^32 - 1 ids in one table. The model is unchanged then.
    pub fn step(
        &mut self,
        batch: &Batch,
        labels: &[f32],
        logits: &mut Vec<f32>,
    ) -> Result<f64, PredictError> {
        let mut casting = std::mem::take(&mut self.casting);
        let labelled = Labelled { batch, labels };
        let loss = labelled.check(self.schema()).and_then(|()| {
            casting.fill(self.schema(), &self.state.lookups, batch)?;
            Ok(self.step_casted(labelled, &casting, logits, iter::empty()))
        });
        self.casting = casting;
        loss
    }

    /// [`Self::step`] for a batch that is already checked and casted. `kept` gets the rows that it updates.
    /// It has an item for each table, or none at all.
    pub(crate) fn step_casted<'a>(
        &mut self,
        labelled: Labelled<'_>,
        casting: &Casting,
        logits: &mut Vec<f32>,
        kept: impl Iterator<Item = KeptRows<'a>> + Send,
    ) -> f64 {
        let Self { state, tables, .. } = self;
        let (schema, lookups) = (state.schema.clone(), state.lookups.clone());
        let batch = labelled.batch;
        let rows = |l: usize| rows_of(tables, &schema, &lookups[l], batch);
        let loss = state.gather_and_learn(labelled, batch.samples, rows);
        state.read_logits(logits);
        if state.counts_step(loss, batch.samples) {
            let kept = kept.map(Some).chain(iter::repeat_with(|| None));
            let records = tables.iter_mut().map(RowsInMemory::of).zip(kept);
            let records = records.map(|(records, kept)| records.keeping(kept));
            state.update(|update| update.tables(records, casting));
        }
        loss
    }

    /// Writes the logit of every sample to `logits`.
    ///
    /// # Errors
    /// As [`ReferenceTrainer::step`].
    pub(crate) fn logits(&mut self, batch: &Batch, logits: &mut Vec<f32>) -> Result<(), PredictError> {
        self.forward(batch)?;
        self.state.read_logits(logits);
        Ok(())
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), PredictError> {
        let Self { state, tables, .. } = self;
        let (schema, lookups) = (state.schema.clone(), state.lookups.clone());
        state.forward(batch, &lookups, |l| rows_of(tables, &schema, &lookups[l], batch))
    }
}

impl TrainState {
    /// The forward pass of a batch, with these dense weights and the rows that `version` stores.
    ///
    /// # Errors
    /// As [`ReferenceTrainer::step`].
    ///
    /// # Panics
    /// When the version has another schema.
    pub(crate) fn forward_rows_of(
        &mut self,
        version: &EmbeddingStore,
        batch: &Batch,
    ) -> Result<(), PredictError> {
        let schema = self.schema.clone();
        let lookups = &schema.lookups()[..];
        let tables = version.tables();
        self.forward(batch, lookups, |l| rows_of(tables, &schema, &lookups[l], batch))
    }
}

impl ReferenceTrainer {
    /// Trains on every sample of the data, one step after another; the last batch may be smaller. Returns the
    /// number of samples. It casts each batch in its step: it is the baseline of `benches/train_overlap.rs`,
    /// and what tests compare other trainers with. The program uses [`run_in_memory`](super::run_in_memory).
    ///
    /// # Errors
    /// [`TrainError`]. The steps on earlier batches have been taken.
    pub fn train_sequentially(
        &mut self,
        reader: &mut (dyn Reader + Send),
        batch: usize,
        mut on_step: impl FnMut(&Progress<'_>),
    ) -> Result<u64, TrainError> {
        let schema = self.schema().clone();
        let (mut samples, mut logits) = (0, Vec::new());
        let data = Data { reader, batch, steps: u64::MAX };
        ReadAhead::new(&schema, data).for_each(WAITING_GROUPS, |prepared| {
            let labels = &prepared.labels;
            let loss = self.step(&prepared.batch, labels, &mut logits)?;
            samples += labels.len() as u64;
            let result = StepResult { loss, samples, logits: &logits };
            on_step(&Progress::after(&self.state, result, prepared)?);
            Ok(())
        })?;
        Ok(samples)
    }
}

#[cfg(test)]
impl ReferenceTrainer {
    /// The layers.
    #[must_use]
    pub(crate) fn model(&self) -> &crate::model::Model<f32> {
        &self.state.model
    }

    /// The optimizer.
    #[must_use]
    pub(crate) fn optimizer(&self) -> super::optim::Optimizer {
        self.state.optimizer
    }

    /// Writes the probability of every sample to `probabilities`.
    ///
    /// # Errors
    /// As [`ReferenceTrainer::step`].
    pub(crate) fn score(&mut self, batch: &Batch, probabilities: &mut Vec<f32>) -> Result<(), PredictError> {
        self.forward(batch)?;
        self.state.read_probabilities(probabilities);
        Ok(())
    }

    /// [`ReferenceTrainer::score`] with this trainer's dense weights, but the rows that `version` stores.
    ///
    /// # Errors
    /// As [`ReferenceTrainer::step`].
    ///
    /// # Panics
    /// When the version has another schema.
    pub(crate) fn score_rows_of(
        &mut self,
        version: &EmbeddingStore,
        batch: &Batch,
        probabilities: &mut Vec<f32>,
    ) -> Result<(), PredictError> {
        self.state.forward_rows_of(version, batch)?;
        self.state.read_probabilities(probabilities);
        Ok(())
    }
}
