//! Training with all rows in memory, without a scratchpad.
//!
//! Of the pipeline's stages only Load and Train remain. One thread reads, encodes and casts batches ahead.
//! The caller's thread takes the sequential trainer's steps on its tables, so the trained bytes are the same.

use super::pipeline::Data;
use super::read_ahead::ReadAhead;
use super::reference::ReferenceTrainer;
use super::train_state::Labelled;
use super::{Progress, TrainError};

/// Samples per group of batches that the reading thread hands over. A group has at least one batch.
const GROUP_SAMPLES: usize = 2048;
/// Groups that may be queued for training.
const WAITING_GROUPS: usize = 2;

/// Trains on every sample of the data, on the threads of the caller's rayon pool. Returns the number of
/// samples.
///
/// # Errors
/// [`TrainError`]. `reference` has taken the steps on earlier batches.
pub fn run_in_memory(
    reference: &mut ReferenceTrainer,
    data: Data<'_>,
    mut on_step: impl FnMut(&Progress<'_>),
) -> Result<u64, TrainError> {
    let train_state = &reference.state;
    let (schema, lookups) = (train_state.schema.clone(), train_state.lookups.clone());
    let group = (GROUP_SAMPLES / data.batch.max(1)).max(1);
    let (mut samples, mut probabilities) = (0, Vec::new());
    ReadAhead::new(&schema, data).casting(&lookups).in_groups(group).for_each(
        WAITING_GROUPS,
        |prepared| {
            let labelled = Labelled { batch: &prepared.batch, labels: &prepared.labels };
            let loss = reference.step_casted(labelled, &prepared.casting, &mut probabilities);
            samples += prepared.labels.len() as u64;
            on_step(&Progress::after(&reference.state, loss, samples, &probabilities, prepared)?);
            Ok(())
        },
    )?;
    Ok(samples)
}
