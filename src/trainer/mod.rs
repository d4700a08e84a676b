//! The trainer: sequential, simple and exact; and the pipeline, which trains the same bytes where rows do not fit memory.
//!
//! **The sequential trainer** is the oracle of every faster one. A [`ReferenceTrainer`] holds the model and takes one step at a time ([`ReferenceTrainer::step`]);
//! [`run_epoch`] drives it over a data set, with the next batches read and encoded by one thread
//! beside it, and [`evaluate`] scores a data set with the weights as they are, or with the rows of the
//! version that was made of them. The same seed, data
//! and settings give the same bytes on any number of threads. [`run_in_memory`] takes the same steps with
//! the next batches casted ahead too.
//!
//! **The [`Pipeline`]** has the rows in a working file, and in a scratchpad those that coming batches need (`plan`); a
//! [`Verifier`] compares it with the oracle byte by byte. Data-parallel `replicas` are a part of it.

pub mod casting;
mod checkpoint;
pub mod eval;
mod in_memory;
pub mod optim;
pub mod pipeline;
mod read_ahead;
mod reference;
mod replicas;
mod train_state;
pub mod update;

pub use checkpoint::{initialise, initialise_on_disk, resume};
pub use in_memory::run_in_memory;
pub use pipeline::clocks::StageName;
pub use pipeline::plan::PlanStats;
pub use pipeline::policy::{Policy, UnknownPolicy};
pub use pipeline::scratchpad::{ScratchpadSize, Sizes, largest_sample};
pub(crate) use pipeline::train::StepObserver;
pub use pipeline::verify::{Difference, Verifier};
pub use pipeline::{Data, Frequencies, Pipeline, PipelineSettings};
pub use reference::ReferenceTrainer;
pub(crate) use replicas::MOST_REPLICAS;
pub use train_state::TrainState;

use crate::dataset::{DatasetError, Reader};
use crate::mem::OutOfHostMemory;
use crate::model::WeightsError;
use crate::predict::PredictError;
use crate::schema::{EncodeError, Schema};
use crate::store::StoreError;
use crate::trainer::pipeline::gpu::ScratchError;
use crate::trainer::pipeline::slots::ClaimError;
use crate::types::Batch;
use eval::Quality;
use read_ahead::{ReadAhead, WAITING_GROUPS};

/// Why training stopped.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The data could not be read.
    #[error(transparent)]
    Dataset(#[from] DatasetError),
    /// A sample is not of the schema's shape.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// A batch was refused.
    #[error(transparent)]
    Batch(#[from] PredictError),
    /// The data has no labels.
    #[error("data: training needs labels, and sample {sample} has none")]
    NoLabels {
        /// The first sample without one, counted from 0.
        sample: u64,
    },
    /// The loss is no longer a number.
    #[error("loss: not finite at step {step}; a smaller lr than {lr} may help")]
    Diverged {
        /// The step that was not taken for it.
        step: u64,
        /// The learning rate.
        lr: f64,
    },
    /// The last steps went past what a number holds, so there is nothing worth keeping.
    #[error("weights: {tensor:?} is not finite after step {steps}; a smaller lr than {lr} may help")]
    NotFinite {
        /// The dense tensor or the table.
        tensor: String,
        /// Steps taken.
        steps: u64,
        /// The learning rate.
        lr: f64,
    },
    /// The model does not fit the memory.
    #[error(transparent)]
    Memory(#[from] OutOfHostMemory),
    /// The dense tensors of a version are not its architecture's.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A version that names its optimizer and lacks some of its state.
    #[error("version: {0}: optimizer state is missing or misshapen")]
    State(String),
    /// The version could not be written, or the working file not used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// One sample is too much for the scratchpad.
    #[error(
        "scratchpad: {slots} slots for rows of {words} f32 (state counted), and a sample needs {needed} at a time"
    )]
    Scratchpad {
        /// Words of a record of the size that is short.
        words: usize,
        /// The sample's distinct rows of that size.
        needed: usize,
        /// Its slots.
        slots: usize,
    },
    /// A model of more tables than a scratchpad can name.
    #[error("scratchpad: expected at most {limit} tables, got {got}")]
    TooManyTables {
        /// The model's.
        got: usize,
        /// How many may be.
        limit: usize,
    },
    /// A table of more rows than a scratchpad can name.
    #[error("scratchpad: expected at most {limit} rows of a table, got {got} of {table:?}")]
    TooManyRows {
        /// The table.
        table: String,
        /// Its rows.
        got: u64,
        /// How many may be.
        limit: u64,
    },
    /// A look-ahead window of no batch, or of more than can be kept track of.
    #[error("lookahead: expected 1 to {most} batches, got {got}")]
    Lookahead {
        /// What came.
        got: usize,
        /// The most.
        most: usize,
    },
    /// No replica, or too many.
    #[error("replicas: expected 1 to {most}, got {got}")]
    Replicas {
        /// What came.
        got: usize,
        /// The most.
        most: usize,
    },
    /// Replicas that never average.
    #[error("lambda: expected at least 1 step, got {got}")]
    Lambda {
        /// What came.
        got: u64,
    },
    /// Threads that cannot be started.
    #[error("threads: {reason}")]
    Threads {
        /// The system's word.
        reason: String,
    },
    /// Two stages wanted one slot at a time: a fault of the plan. Nothing was overwritten.
    #[error("scratchpad: {0}")]
    Hazard(#[from] ClaimError),
    /// The device that the scratchpad is on.
    #[error(transparent)]
    Device(#[from] ScratchError),
    /// Another stage has failed, and says why.
    #[error("training has stopped")]
    Stopped,
}

/// What one step showed.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Samples trained in this epoch so far.
    pub samples: u64,
    /// Mean loss of the batch before its step.
    pub loss: f64,
    /// The batch's probabilities before its step.
    pub probabilities: &'a [f32],
    /// Its labels.
    pub labels: &'a [f32],
}

impl<'a> Progress<'a> {
    /// After a batch of this summed loss, with which so many samples are trained.
    ///
    /// # Errors
    /// [`TrainError::Diverged`] where the loss is not finite: no step was taken then.
    fn after(
        network: &TrainState,
        loss: f64,
        samples: u64,
        (probabilities, labels): (&'a [f32], &'a [f32]),
    ) -> Result<Self, TrainError> {
        if !loss.is_finite() {
            return Err(TrainError::Diverged { step: network.steps() + 1, lr: network.optimizer().lr });
        }
        Ok(Self { samples, loss: loss / labels.len() as f64, probabilities, labels })
    }
}

/// Trains on every sample that `reader` gives, in batches of `batch`, the last one smaller. Gives
/// the number of samples.
///
/// # Errors
/// [`TrainError`]; the learner then holds the steps taken before it.
pub fn run_epoch(
    learner: &mut ReferenceTrainer,
    reader: &mut (dyn Reader + Send),
    batch: usize,
    mut on_step: impl FnMut(&Progress<'_>),
) -> Result<u64, TrainError> {
    let schema = learner.schema().clone();
    let (mut samples, mut probabilities) = (0, Vec::new());
    let data = Data { reader, batch, steps: u64::MAX };
    ReadAhead::new(&schema, data).for_each(WAITING_GROUPS, |prepared| {
        let labels = &prepared.labels;
        let loss = learner.step(&prepared.batch, labels, &mut probabilities)?;
        samples += labels.len() as u64;
        on_step(&Progress::after(learner.network(), loss, samples, (&probabilities, labels))?);
        Ok(())
    })?;
    Ok(samples)
}

/// Scores every sample that `reader` gives by `score`, which writes a batch's probabilities: such as
/// [`ReferenceTrainer::score`], or [`ReferenceTrainer::score_rows_of`] a version. The quality is none where labels are
/// missing.
///
/// # Errors
/// [`TrainError`].
pub fn evaluate(
    schema: &Schema,
    reader: &mut (dyn Reader + Send),
    batch: usize,
    mut score: impl FnMut(&Batch, &mut Vec<f32>) -> Result<(), PredictError>,
) -> Result<Option<Quality>, TrainError> {
    let (mut all, mut labels, mut probabilities) = (Vec::new(), Some(Vec::new()), Vec::new());
    let data = Data { reader, batch, steps: u64::MAX };
    ReadAhead::new(schema, data).unlabelled_too().for_each(WAITING_GROUPS, |prepared| {
        score(&prepared.batch, &mut probabilities)?;
        all.extend_from_slice(&probabilities);
        match &mut labels {
            Some(labels) if !prepared.labels.is_empty() => labels.extend_from_slice(&prepared.labels),
            _ => labels = None,
        }
        Ok(())
    })?;
    Ok(labels.map(|labels| Quality::of(&all, &labels)))
}
