//! Training with every row in memory: the scratchpad would hold all of them, so there is none.
//!
//! Of the pipeline three stages are left. Load reads and encodes, Plan casts, Train takes the sequential trainer's steps on its
//! own tables: the same calls with the same numbers, with reading and casting on other threads.

use std::sync::mpsc::{channel, sync_channel};
use std::thread;

use super::jitter::Jitter;
use super::learner::Learner;
use super::network::Labelled;
use super::pipeline::{Data, Load, READ_AHEAD, start};
use super::plan::Cast;
use super::{Progress, TrainError};

/// Casted batches that may wait for Train.
const CAST_AHEAD: usize = 2;

/// Trains on every sample of the data. Gives the number of samples. It computes on the threads of the caller's rayon pool.
///
/// # Errors
/// [`TrainError`]; the learner then holds the steps taken before it.
pub fn run_in_memory(
    learner: &mut Learner,
    data: Data<'_>,
    mut on_step: impl FnMut(&Progress<'_>),
) -> Result<u64, TrainError> {
    let (schema, lookups) = (learner.network.schema.clone(), learner.network.lookups.clone());
    let (loaded, batches) = sync_channel(READ_AHEAD);
    let (casted, casts) = sync_channel::<Result<Cast, TrainError>>(CAST_AHEAD);
    let (used, spare) = channel();
    thread::scope(|scope| {
        let load = Load { schema: schema.clone(), data, loaded, spare, jitter: Jitter::new(None, 0) };
        start(scope, "load", || load.run())?;
        start(scope, "plan", move || {
            for batch in batches {
                let cast = batch.and_then(|mut cast: Cast| {
                    cast.cast(&schema, &lookups)?;
                    Ok(cast)
                });
                let last = cast.is_err();
                // Nobody waits when training failed first.
                if casted.send(cast).is_err() || last {
                    return;
                }
            }
        })?;
        let (mut samples, mut probabilities) = (0, Vec::new());
        for cast in casts {
            let cast = cast?;
            let labelled = Labelled { batch: &cast.batch, labels: &cast.labels };
            let loss = learner.step_casted(labelled, &cast.casting, &mut probabilities);
            samples += cast.labels.len() as u64;
            on_step(&Progress::after(learner.network(), loss, samples, (&probabilities, &cast.labels))?);
            // Load may have ended already.
            let _ = used.send(cast);
        }
        Ok(samples)
    })
}
