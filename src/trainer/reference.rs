//! The sequential trainer: one step after the other on tables in memory, and so the oracle of the pipeline.

use super::casting::Casting;
use super::optim::Optimizer;
use super::train_state::{Labelled, Parts, TrainState};
use super::update::TableRows;
use crate::model::{Model, Weights};
use crate::predict::PredictError;
use crate::schema::Schema;
use crate::store::{EmbeddingStore, Table, rows_of};
use crate::types::Batch;

/// A model with all its rows in memory.
pub struct ReferenceTrainer {
    pub(crate) network: TrainState,
    pub(crate) tables: Vec<Table>,
    casting: Casting,
}

impl ReferenceTrainer {
    pub(crate) fn new(parts: Parts, tables: Vec<Table>) -> Self {
        Self { network: TrainState::new(parts), tables, casting: Casting::default() }
    }

    /// All but the rows.
    #[must_use]
    pub(crate) fn network(&self) -> &TrainState {
        &self.network
    }

    /// All but the rows, to score with.
    pub(crate) fn network_mut(&mut self) -> &mut TrainState {
        &mut self.network
    }

    /// The schema trained for.
    #[must_use]
    pub fn schema(&self) -> &Schema {
        self.network.schema()
    }

    /// The layers.
    #[must_use]
    pub fn model(&self) -> &Model<f32> {
        self.network.model()
    }

    /// The dense weights.
    #[must_use]
    pub fn weights(&self) -> &Weights<f32> {
        self.network.weights()
    }

    /// The dense optimizer's states, in the order of its kind.
    #[must_use]
    pub fn dense_states(&self) -> &[Vec<f32>] {
        self.network.dense_states()
    }

    /// The tables.
    #[must_use]
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// The tables, without the rest.
    #[must_use]
    pub fn into_tables(self) -> Vec<Table> {
        self.tables
    }

    /// The optimizer.
    #[must_use]
    pub fn optimizer(&self) -> Optimizer {
        self.network.optimizer()
    }

    /// Steps taken.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.network.steps()
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
        let mut casting = std::mem::take(&mut self.casting);
        let labelled = Labelled { batch, labels };
        let loss = labelled.check(self.schema()).and_then(|()| {
            casting.fill(self.schema(), &self.network.lookups, batch)?;
            Ok(self.step_casted(labelled, &casting, probabilities))
        });
        self.casting = casting;
        loss
    }

    /// [`Self::step`] on a batch that was checked and casted before.
    pub(crate) fn step_casted(
        &mut self,
        labelled: Labelled<'_>,
        casting: &Casting,
        probabilities: &mut Vec<f32>,
    ) -> f64 {
        let Self { network, tables, .. } = self;
        let (schema, lookups) = (network.schema.clone(), network.lookups.clone());
        let batch = labelled.batch;
        let rows = |l: usize| rows_of(tables, &schema, &lookups[l], batch);
        let loss = network.gather_and_learn(labelled, batch.samples, rows);
        network.read_probabilities(probabilities);
        if network.counts_step(loss, batch.samples) {
            network.update(|update| update.tables(tables.iter_mut().map(TableRows::of), casting));
        }
        loss
    }

    /// Writes the probability of every sample over `probabilities`.
    ///
    /// # Errors
    /// As [`ReferenceTrainer::step`].
    pub fn score(&mut self, batch: &Batch, probabilities: &mut Vec<f32>) -> Result<(), PredictError> {
        let Self { network, tables, .. } = self;
        let (schema, lookups) = (network.schema.clone(), network.lookups.clone());
        network.score(batch, &lookups, |l| rows_of(tables, &schema, &lookups[l], batch), probabilities)
    }

    /// [`ReferenceTrainer::score`] with the rows of a version that this learner wrote, as they are stored.
    ///
    /// # Errors
    /// As [`ReferenceTrainer::step`].
    ///
    /// # Panics
    /// When the version is of another schema.
    pub fn score_rows_of(
        &mut self,
        version: &EmbeddingStore,
        batch: &Batch,
        probabilities: &mut Vec<f32>,
    ) -> Result<(), PredictError> {
        self.network.score_rows_of(version, batch, probabilities)
    }
}

impl TrainState {
    /// Writes the probability of every sample over `probabilities`, by these dense weights and the rows of a version
    /// as they are stored.
    ///
    /// # Errors
    /// As [`ReferenceTrainer::step`].
    ///
    /// # Panics
    /// When the version is of another schema.
    pub(crate) fn score_rows_of(
        &mut self,
        version: &EmbeddingStore,
        batch: &Batch,
        probabilities: &mut Vec<f32>,
    ) -> Result<(), PredictError> {
        let schema = self.schema.clone();
        let lookups = &schema.lookups()[..];
        let tables = version.tables();
        self.score(batch, lookups, |l| rows_of(tables, &schema, &lookups[l], batch), probabilities)
    }
}
