//! Training with all rows in memory, without a scratchpad.
//!
//! Of the pipeline's stages only Load and Train remain. One thread reads, encodes and casts batches ahead.
//! The caller's thread takes the sequential trainer's steps on its tables, so the trained bytes are the same.

use std::iter;

use super::pipeline::Data;
use super::publish::KeptRows;
use super::read_ahead::ReadAhead;
use super::reference::ReferenceTrainer;
use super::train_state::Labelled;
use super::{Progress, StepResult, TrainError};

/// Samples per group of batches that the reading thread hands over. A group has at least one batch.
const GROUP_SAMPLES: usize = 512;
/// Groups that may be queued for training.
const GROUPS_AHEAD: usize = 8;
/// The same for data that may come late, whose groups are single batches. The reader says when a log of
/// learned samples is full, and each batch that is still queued then is published by itself.
const BATCHES_AHEAD: usize = 2;

/// Trains on every sample of the data, on the threads of the caller's rayon pool. Returns the number of
/// samples.
///
/// # Errors
/// [`TrainError`]. `reference` has taken the steps on earlier batches.
pub fn run_in_memory(
    reference: &mut ReferenceTrainer,
    data: Data<'_>,
    on_step: impl FnMut(&Progress<'_>),
) -> Result<u64, TrainError> {
    run_around(reference, data, &mut AfterStep(on_step))
}

/// What happens in and after each step.
pub(crate) trait AroundSteps {
    /// What a step keeps of the rows that it updates: an item for each table, or none at all.
    fn kept(&mut self) -> impl Iterator<Item = KeptRows<'_>> + Send {
        iter::empty()
    }

    /// After the step.
    ///
    /// # Errors
    /// An error ends the training.
    fn after(&mut self, reference: &ReferenceTrainer, progress: &Progress<'_>) -> Result<(), TrainError>;
}

struct AfterStep<F>(F);

impl<F: FnMut(&Progress<'_>)> AroundSteps for AfterStep<F> {
    fn after(&mut self, _: &ReferenceTrainer, progress: &Progress<'_>) -> Result<(), TrainError> {
        (self.0)(progress);
        Ok(())
    }
}

/// [`run_in_memory`] with work in and after each step.
///
/// # Errors
/// As [`run_in_memory`], and those of `around`.
pub(crate) fn run_around(
    reference: &mut ReferenceTrainer,
    data: Data<'_>,
    around: &mut impl AroundSteps,
) -> Result<u64, TrainError> {
    let train_state = &reference.state;
    let (schema, lookups) = (train_state.schema.clone(), train_state.lookups.clone());
    let group = (GROUP_SAMPLES / data.batch.max(1)).max(1);
    let ahead = if data.reader.may_wait() { BATCHES_AHEAD } else { GROUPS_AHEAD };
    let (mut samples, mut logits) = (0, Vec::new());
    ReadAhead::new(&schema, data).casting(&lookups).in_groups(group).for_each(ahead, |prepared| {
        let labelled = Labelled { batch: &prepared.batch, labels: &prepared.labels };
        let loss = reference.step_casted(labelled, &prepared.casting, &mut logits, around.kept());
        samples += prepared.labels.len() as u64;
        let result = StepResult { loss, samples, logits: &logits };
        let progress = Progress::after(&reference.state, result, prepared)?;
        around.after(reference, &progress)
    })?;
    Ok(samples)
}
