//! The trainer: a sequential reference trainer, and a pipeline that trains the same bytes when the rows do
//! not fit in memory.
//!
//! **[`ReferenceTrainer`]** is simple and exact, and every faster trainer is tested against it. It keeps all
//! rows in memory and takes one step at a time ([`ReferenceTrainer::step`]). [`run_in_memory`] trains on a
//! data set while another thread reads and encodes the next batches and builds their casted indices
//! ([`casting`]). [`evaluate`] scores a data set. Equal seed, data and settings give equal bytes on any
//! number of threads.
//!
//! **[`Pipeline`]** keeps all rows in a working file on disk ([`crate::rowlog`]), and the rows of the coming
//! batches in a scratchpad in memory. A [`Verifier`] compares its bytes with the reference trainer's.
//! `replicas` trains with several data-parallel workers.

pub mod casting;
mod checkpoint;
pub(crate) mod cursor;
pub(crate) mod eval;
#[cfg(test)]
#[cfg(not(flechette_loom))]
mod fuzz;
mod in_memory;
pub mod optim;
pub(crate) mod pipeline;
pub(crate) mod progressive;
pub(crate) mod publish;
mod read_ahead;
mod reference;
mod replicas;
mod row_set;
pub mod schedule;
mod start;
mod train_state;
pub mod update;

pub(crate) use checkpoint::VersionParts;
pub use in_memory::run_in_memory;
pub use pipeline::clocks::StageName;
pub use pipeline::plan::PlanStats;
pub use pipeline::policy::ScratchpadPolicy;
pub use pipeline::scratchpad::ScratchpadSize;
pub(crate) use pipeline::scratchpad::{Sizes, largest_sample};
pub(crate) use pipeline::verify::{Difference, Verifier};
pub use pipeline::{Data, Pipeline, PipelineRows, PipelineSettings, RowFrequency};
pub use reference::ReferenceTrainer;
pub use start::{WorkingFileOptions, initialise, initialise_on_disk};
pub(crate) use start::{check_optimizer, check_optimizer_notes, is_exact, resume, resume_on_disk};
pub use train_state::TrainState;

use std::error::Error;
use std::fmt;
use std::path::PathBuf;

use crate::dataset::{DatasetError, FileRun, Reader, in_line};
use crate::mem::OutOfHostMemory;
use crate::model::WeightsError;
use crate::predict::PredictError;
use crate::schema::{EncodeError, Schema};
use crate::store::StoreError;
use crate::trainer::pipeline::gpu::ScratchError;
use crate::trainer::pipeline::slots::ClaimError;
use crate::types::Batch;
use eval::Quality;
use pipeline::item::PreparedBatch;
use read_ahead::{ReadAhead, WAITING_GROUPS};

#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages document the variants
pub enum TrainError {
    #[error(transparent)]
    Dataset(#[from] DatasetError),
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error(transparent)]
    Batch(#[from] PredictError),
    #[error("data: training needs labels, and sample {sample} has none")]
    NoLabels { sample: u64 },
    #[error("loss: not finite at step {step}{place}; a smaller lr than {lr} may help")]
    Diverged {
        step: u64,
        lr: f64,
        /// The files and the samples of the batch.
        place: String,
    },
    #[error("{what} is not finite after step {steps}; a smaller lr than {lr} may help")]
    NotFinite { what: String, steps: u64, lr: f64 },
    #[error(transparent)]
    Memory(#[from] OutOfHostMemory),
    #[error(
        "table {table:?}: {source}; all tables with their optimizer state take {total} bytes \
         (--scratchpad trains with the rows on disk)"
    )]
    TableMemory { table: String, total: u64, source: OutOfHostMemory },
    #[error("{source}; the scratchpad's slots ({slots}) take {total} bytes (--scratchpad sets the size)")]
    ScratchpadMemory { slots: String, total: u64, source: Box<dyn Error + Send + Sync> },
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("version: {0}: optimizer state is missing or misshapen")]
    State(String),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(
        "scratchpad: a sample needs {needed} rows of {words} f32 (with optimizer state) at the same time, \
         but there are only {slots} slots of that size"
    )]
    Scratchpad { words: usize, needed: usize, slots: usize },
    #[error("lookahead: expected 1 to {most} batches, got {got}")]
    Lookahead { got: usize, most: usize },
    #[error("replicas: expected 1 to {most}, got {got}")]
    Replicas { got: usize, most: usize },
    #[error("lambda: expected at least 1 step, got {got}")]
    Lambda { got: u64 },
    #[error("threads: {reason}")]
    Threads { reason: String },
    #[error("scratchpad: {0}")]
    Hazard(#[from] ClaimError),
    #[error(transparent)]
    Device(#[from] ScratchError),
    #[error(
        "{}: no answer from the disk: a version was not written within {seconds} s; what was trained after \
         step {steps} is not published, and --resume continues from version {version}", path.display()
    )]
    StillWriting { path: PathBuf, seconds: u64, steps: u64, version: u64 },
    #[error("training has stopped")]
    Stopped,
}

impl TrainError {
    /// Whether a version could not be made, and training can go on without it.
    #[must_use]
    pub(crate) fn is_of_version(&self) -> bool {
        matches!(self, Self::Store(_) | Self::Memory(_))
    }
}

/// Where a batch is in the data. It travels with the batch, because readers run ahead of training.
#[derive(Clone, Debug, Default)]
pub struct BatchPosition {
    /// The files of the samples of the batch (see [`Reader::runs`]).
    pub runs: Vec<FileRun>,
    /// The share of the input that was read (see [`Reader::share`]).
    pub share: Option<f64>,
}

impl fmt::Display for BatchPosition {
    /// The files of the batch with the numbers of their samples, counted from 1; nothing without files.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, FileRun { file, samples, of_file, .. }) in self.runs.iter().enumerate() {
            let first = (of_file + 1).saturating_sub(*samples as u64);
            let before = if n == 0 { " in " } else { ", " };
            write!(f, "{before}{}, samples {first} to {of_file}", in_line(&file.name))?;
        }
        Ok(())
    }
}

/// What a step reports.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Samples trained in this call so far, including this batch. So this many samples of the reader were
    /// trained on, whatever was read ahead.
    pub samples: u64,
    /// Where the batch is in the data.
    pub position: &'a BatchPosition,
    /// Mean loss of the batch before the step.
    pub loss: f64,
    /// Logits of the batch before the step. A probability would be rounded to 1 for a logit above 17, and a
    /// sample without a click would then have an infinite loss.
    pub logits: &'a [f32],
    /// Labels of the batch.
    pub labels: &'a [f32],
    /// The rows that the step updates; empty if the trainer casts batches itself.
    pub(crate) casting: &'a casting::Casting,
}

/// What a step computed.
struct StepResult<'a> {
    /// Summed loss of the batch before the step.
    loss: f64,
    /// Samples trained so far, including the batch.
    samples: u64,
    /// Logits of the batch before the step.
    logits: &'a [f32],
}

impl<'a> Progress<'a> {
    /// # Errors
    /// [`TrainError::Diverged`] when the loss is not finite. No step was taken for this batch.
    fn after(
        state: &TrainState,
        StepResult { loss, samples, logits }: StepResult<'a>,
        PreparedBatch { labels, position, casting, .. }: &'a PreparedBatch,
    ) -> Result<Self, TrainError> {
        if !loss.is_finite() {
            let (step, lr) = (state.steps + 1, state.optimizer.lr);
            return Err(TrainError::Diverged { step, lr, place: position.to_string() });
        }
        Ok(Self { samples, position, loss: loss / labels.len() as f64, logits, labels, casting })
    }
}

/// Scores every sample of `reader` and compares the scores with the labels. `score` writes the logits of a
/// batch, as `ReferenceTrainer::logits` does. Returns `None` if any batch has no labels.
///
/// # Errors
/// [`TrainError`].
pub(crate) fn evaluate<E: Into<TrainError>>(
    schema: &Schema,
    reader: &mut (dyn Reader + Send),
    batch: usize,
    mut score: impl FnMut(&Batch, &mut Vec<f32>) -> Result<(), E>,
) -> Result<Option<Quality>, TrainError> {
    let (mut all, mut labels, mut logits) = (Vec::new(), Some(Vec::new()), Vec::new());
    let data = Data { reader, batch, steps: u64::MAX };
    ReadAhead::new(schema, data).unlabelled_too().for_each(WAITING_GROUPS, |prepared| {
        score(&prepared.batch, &mut logits).map_err(Into::into)?;
        all.extend_from_slice(&logits);
        match &mut labels {
            Some(labels) if !prepared.labels.is_empty() => labels.extend_from_slice(&prepared.labels),
            _ => labels = None,
        }
        Ok(())
    })?;
    Ok(labels.map(|labels| Quality::of_logits(&all, &labels)))
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
pub(crate) mod tests;
