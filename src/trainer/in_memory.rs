//! Training with every row in memory: the scratchpad would hold all of them, so there is none.
//!
//! Of the pipeline two stages are left. One thread reads, encodes and casts, and Train takes the sequential trainer's steps on its own
//! tables: the same calls with the same numbers. Small batches are handed over some at a time, because to wake a thread for each costs
//! more than reading beside the steps gains.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use super::pipeline::item::{PreparedBatch, Spare};
use super::pipeline::jitter::Jitter;
use super::pipeline::load::Load;
use super::pipeline::{Data, start};
use super::reference::ReferenceTrainer;
use super::train_state::Labelled;
use super::{Progress, TrainError};
use crate::schema::{Lookup, Schema};

/// Samples that are handed over together, but at least one batch.
const TOGETHER: usize = 2048;
/// How many times that may wait for Train.
const WAITING: usize = 2;

/// Trains on every sample of the data. Gives the number of samples. It computes on the threads of the caller's rayon pool.
///
/// # Errors
/// [`TrainError`]; the learner then holds the steps taken before it.
pub fn run_in_memory(
    learner: &mut ReferenceTrainer,
    data: Data<'_>,
    mut on_step: impl FnMut(&Progress<'_>),
) -> Result<u64, TrainError> {
    let (schema, lookups) = (learner.state.schema.clone(), learner.state.lookups.clone());
    let (casted, casts) = sync_channel(WAITING);
    let spare = &Spare::default();
    thread::scope(|scope| {
        let together = (TOGETHER / data.batch.max(1)).max(1);
        let load = Load::new(schema.clone(), data, Jitter::new(None, 0));
        let ahead = Ahead { load, schema, lookups, together, casted, spare };
        start(scope, "load", || ahead.run())?;
        let (mut samples, mut probabilities) = (0, Vec::new());
        for some in casts {
            for cast in some? {
                let labelled = Labelled { batch: &cast.batch, labels: &cast.labels };
                let loss = learner.step_casted(labelled, &cast.casting, &mut probabilities);
                samples += cast.labels.len() as u64;
                on_step(&Progress::after(learner.state(), loss, samples, (&probabilities, &cast.labels))?);
                spare.give(cast);
            }
        }
        Ok(samples)
    })
}

/// What reads and casts ahead of Train.
struct Ahead<'a, 's> {
    load: Load<'a>,
    schema: Arc<Schema>,
    lookups: Arc<[Lookup]>,
    together: usize,
    casted: SyncSender<Result<Vec<PreparedBatch>, TrainError>>,
    spare: &'s Spare<PreparedBatch>,
}

impl Ahead<'_, '_> {
    fn run(mut self) {
        loop {
            let mut some = Vec::with_capacity(self.together);
            let ended = self.fill(&mut some);
            // Nobody waits when training failed first.
            let sent = some.is_empty() || self.casted.send(Ok(some)).is_ok();
            match ended {
                Ok(false) if sent => {}
                Ok(_) => return,
                Err(error) => return drop(self.casted.send(Err(error))),
            }
        }
    }

    /// Reads and casts as many as are handed over together, and says whether there are no more.
    fn fill(&mut self, some: &mut Vec<PreparedBatch>) -> Result<bool, TrainError> {
        while some.len() < self.together {
            let mut cast = self.spare.take();
            if !self.load.next(&mut cast)? {
                return Ok(true);
            }
            cast.cast(&self.schema, &self.lookups)?;
            some.push(cast);
        }
        Ok(false)
    }
}
