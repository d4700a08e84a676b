//! Data-parallel replicas: several workers take each step together, each on its own cache of the rows of a
//! window of batches (cDLRM, section 6).
//!
//! One scratchpad prefetches for all replicas, as rank 0 does in the paper. When a window of batches begins,
//! each replica gets a copy of the window's rows and their state (the broadcast of section 6.1). A batch is
//! split into one run of consecutive samples per replica, as equal in length as possible. If a batch has
//! fewer samples than there are replicas, the last replicas get none. Each replica computes the forward and
//! backward pass of its run, with the gradients of the mean loss of the whole batch. When the window ends,
//! all copies are equal, and the copy of the first replica is written back to the scratchpad.
//!
//! **Dense weights**: gradients are summed over the replicas in their order. Each is already divided by the
//! size of the whole batch, so the sum is the average of section 6.1. All replicas take the same step on the
//! same weights, so their weights stay equal to the bit.
//!
//! **Rows at lambda = 1**: each replica coalesces its own row gradients. These are summed row by row in the
//! order of the replicas, and each replica updates its copies with the sums. So copies stay equal, and the
//! step is that of one worker with the whole batch, except for rounding: a sum over samples is split where
//! the batch is split. The paper does not sum row gradients, because PyTorch would need two collective calls
//! for it (section 6.1). Here the sum is one merge of sorted lists.
//!
//! **Rows at lambda > 1**: each replica updates its copies with its own gradients. Copies are averaged after
//! every step whose number is a multiple of lambda (line 12 of Algorithm 3), and at the end of a window. As
//! in the paper:
//!
//! - The average is over all replicas, including those that did not use the row: their update is zero ("all
//!   other GPUs produce a zero gradient update"). Rows that no replica used are equal already and are
//!   skipped.
//! - The row gradient of a replica is multiplied by the number of replicas. It is then the gradient of the
//!   mean loss of its own samples, which is what a rank computes by itself (the paper gives no scale). So
//!   one step of SGD followed by an average equals the step on the whole batch.
//! - Optimizer state is averaged like the row; the paper names no optimizer. Adam's step count is the number
//!   of steps of the run, so it is the same in all replicas.
//!
//! Training is then not exact: between averages a replica does not see the updates of the others, and an
//! optimizer with state scales each replica's gradient by that replica's own state. A row that only one of K
//! replicas uses can move up to K times less than with one worker.
//!
//! **A batch that exceeds the scratchpad** is split (`pipeline::plan::split`). The first replica trains it
//! alone, and the others copy its dense weights. So it is trained exactly as by one worker.
//!
//! All sums and averages have a fixed order, so equal numbers of replicas and equal lambda give equal bytes
//! on any number of threads.

mod rows;
mod window;

use std::ops::Range;

use rayon::prelude::*;

use super::TrainError;
use super::casting::Casting;
use super::pipeline::item::PreparedBatch;
use super::pipeline::train::{RowObserver, UpdatedRows};
use super::train_state::{Labelled, TrainState};
use super::update::RecordShape;
use crate::model::Model;
use crate::trainer::pipeline::slots::Claim;
use crate::types::{Batch, TableId};
use rows::RowGradients;
use window::RecordSpan;
pub(crate) use window::Window;

pub(crate) const MOST_REPLICAS: usize = 64;

/// Gradients that one thread sums at a time.
const SUMMED: usize = 4096;

/// Rows that one thread averages at a time.
const AVERAGED: usize = 256;

/// The replicas of a run.
pub(crate) struct Replicas {
    lambda: u64,
    /// The record shape of each table.
    shapes: Vec<RecordShape>,
    /// The states of all replicas except the first, which uses the state of the run.
    others: Vec<TrainState>,
    replicas: Vec<Replica>,
    /// The places (see `window`) of the rows of the whole batch. At lambda = 1 also the gradients of these
    /// rows, summed over the replicas.
    whole: RowGradients,
    /// Records that a replica may have updated since the last average.
    apart: Vec<RecordSpan>,
}

/// The data of a replica, except its [`TrainState`].
#[derive(Default)]
struct Replica {
    /// The records of the rows of the window.
    cache: Vec<f32>,
    /// The replica's part of the batch.
    batch: Batch,
    casting: Casting,
    /// The gradients of the rows that the part uses.
    rows: RowGradients,
}

/// The part of a step that is the same for all replicas.
#[derive(Clone, Copy)]
struct Task<'a> {
    window: &'a Window,
    prepared: &'a PreparedBatch,
    shapes: &'a [RecordShape],
    /// The factor of row gradients.
    scale: f32,
}

impl Replicas {
    /// `replicas` replicas that start from `state`. `replicas` and `lambda` are at least 1.
    pub(crate) fn new(state: &TrainState, replicas: usize, lambda: u64) -> Self {
        Self {
            lambda,
            shapes: RecordShape::of(state),
            others: (1..replicas).map(|_| state.replica()).collect(),
            replicas: (0..replicas.max(1)).map(|_| Replica::default()).collect(),
            whole: RowGradients::default(),
            apart: Vec::new(),
        }
    }

    /// Copies the dense weights and their optimizer state from the first replica to the others. For use
    /// after a step that the first replica took alone.
    pub(crate) fn follow(&mut self, first: &TrainState) {
        self.others.par_iter_mut().for_each(|state| state.follow(first));
    }

    /// Copies the rows of the window to each replica. `claims` are the claims on their slots in the
    /// scratchpad.
    pub(crate) fn broadcast(&mut self, window: &Window, claims: &[Claim<'_>]) {
        let Some((first, others)) = self.replicas.split_first_mut() else { return };
        window.read(claims, &mut first.cache);
        others.par_iter_mut().for_each(|replica| replica.cache.clone_from(&first.cache));
    }

    /// Forward, loss and backward pass of a batch of the window, and the gradients of each replica. Returns
    /// the summed loss.
    ///
    /// # Errors
    /// [`TrainError::Batch`] when a part of the batch cannot be casted.
    pub(crate) fn learn(
        &mut self,
        state: &mut TrainState,
        window: &Window,
        prepared: &PreparedBatch,
    ) -> Result<f64, TrainError> {
        let Self { lambda, shapes, others, replicas, whole, .. } = self;
        whole.place(window, &prepared.casting, shapes);
        let count = replicas.len();
        let scale = if *lambda == 1 { 1.0 } else { count as f32 };
        let task = Task { window, prepared, shapes, scale };
        let losses = workers(state, others, replicas).into_par_iter().enumerate();
        let losses = losses
            .map(|(r, (state, replica))| replica.learn(state, task, shard(prepared.batch.samples, count, r)));
        let losses: Vec<f64> = losses.collect::<Result<_, TrainError>>()?;
        Ok(losses.iter().sum())
    }

    /// Writes the logits of the last batch to `logits`.
    pub(crate) fn read_logits(&self, state: &TrainState, logits: &mut Vec<f32>) {
        state.read_logits(logits);
        self.others.iter().for_each(|state| state.add_logits(logits));
    }

    /// Updates the dense weights and rows of all replicas, for the step that `state` has counted.
    pub(crate) fn update(&mut self, state: &mut TrainState, window: &Window) {
        let Self { lambda, shapes, others, replicas, whole, apart } = self;
        reduce(state, others);
        let exchanges = *lambda == 1;
        if exchanges {
            whole.sum(&replicas.iter().map(|replica| &replica.rows).collect::<Vec<_>>());
        } else {
            apart.extend(whole.records(window));
        }
        let (shapes, whole) = (&shapes[..], &*whole);
        workers(state, others, replicas).into_par_iter().for_each(|(state, Replica { cache, rows, .. })| {
            state.update_dense();
            let rows = if exchanges { whole } else { &*rows };
            rows.update(window.tables_of(cache), shapes, &state.row_step());
        });
    }

    /// Whether copies are averaged after this step, counted from 1.
    pub(crate) fn average_after(&self, step: u64) -> bool {
        step.is_multiple_of(self.lambda)
    }

    /// Averages all rows that may differ between replicas, with their state. Sums are f64 and rounded once,
    /// so copies that are equal do not change.
    pub(crate) fn average(&mut self) {
        let Self { replicas, apart, .. } = self;
        apart.sort_unstable();
        apart.dedup();
        let blocks = || apart.par_chunks(AVERAGED);
        let means: Vec<Vec<f32>> = blocks().map(|records| means(replicas, records)).collect();
        replicas.par_iter_mut().for_each(|Replica { cache, .. }| {
            for (records, mut means) in apart.chunks(AVERAGED).zip(means.iter().map(|means| &means[..])) {
                for record in records {
                    let range = record.range();
                    let mean = means.split_off(..range.len()).unwrap_or_default();
                    cache[range].copy_from_slice(mean);
                }
            }
        });
        apart.clear();
    }

    /// Shows the first replica's copies of the rows of the last batch to the observer.
    pub(crate) fn show(&self, window: &Window, prepared: &PreparedBatch, observer: &mut dyn RowObserver) {
        let tables = prepared.casting.tables().iter().zip(0..);
        let updated = tables.map(|(casted, t)| {
            let places = self.whole.places(t);
            let record = move |k: usize| &self.first_cache()[window.record(t, places[k]).range()];
            UpdatedRows { table: TableId(t as u32), rows: casted.rows(), record: Box::new(record) }
        });
        observer.rows(&updated.collect::<Vec<_>>());
    }

    pub(crate) fn first_cache(&self) -> &[f32] {
        self.replicas.first().map_or(&[], |replica| &replica.cache)
    }
}

impl Replica {
    /// Forward, loss and backward pass of this replica's samples.
    fn learn(
        &mut self,
        state: &mut TrainState,
        Task { window, prepared, shapes, scale }: Task<'_>,
        samples: Range<usize>,
    ) -> Result<f64, TrainError> {
        let Self { cache, batch, casting, rows } = self;
        *batch = prepared.batch.part(samples.clone());
        casting.fill(&state.schema, &state.lookups, batch)?;
        rows.place(window, casting, shapes);
        let (lookups, labelled) =
            (state.lookups.clone(), Labelled { batch, labels: &prepared.labels[samples] });
        let loss = state.gather_and_learn(labelled, prepared.batch.samples, |l: usize| {
            let lookup = &lookups[l];
            let (occurrences, places) = (casting.places(l, lookup), rows.places(lookup.table.index()));
            let cached = window.table_of(lookup.table.index(), cache);
            // `ABSENT` is past the end of `places`, so an absent id gives no row. A record begins with its
            // weights.
            move |occurrence: usize| {
                let place = *places.get(occurrences[occurrence] as usize)?;
                Some(bytemuck::cast_slice(&cached.record(place)[..lookup.dim]))
            }
        });
        state.sum_gradients();
        rows.coalesce(&state.row_update(), casting, scale);
        Ok(loss)
    }
}

/// The samples of replica number `r` of `count` replicas.
fn shard(samples: usize, count: usize, r: usize) -> Range<usize> {
    let (each, more) = (samples / count, samples % count);
    let start = |r: usize| r * each + r.min(more);
    start(r)..start(r + 1)
}

/// Each replica with its state.
fn workers<'a>(
    first: &'a mut TrainState,
    others: &'a mut [TrainState],
    replicas: &'a mut [Replica],
) -> Vec<(&'a mut TrainState, &'a mut Replica)> {
    std::iter::once(first).chain(others).zip(replicas).collect()
}

/// Sums the dense gradients of all replicas, and gives each replica the sums and the step number.
fn reduce(first: &mut TrainState, others: &mut [TrainState]) {
    first.grads.par_chunks_mut(SUMMED).enumerate().for_each(|(chunk, sums)| {
        for other in &*others {
            let more = &other.grads[chunk * SUMMED..][..sums.len()];
            sums.iter_mut().zip(more).for_each(|(sum, g)| *sum += *g);
        }
    });
    others.par_iter_mut().for_each(|other| {
        other.grads.copy_from_slice(&first.grads);
        other.steps = first.steps;
    });
}

/// The means of these records over all replicas, end to end.
fn means(replicas: &[Replica], records: &[RecordSpan]) -> Vec<f32> {
    let words = records.iter().flat_map(|record| record.range());
    let mean = |at: usize| {
        let copies = replicas.iter().map(|replica| f64::from(replica.cache[at]));
        (copies.reduce(|sum, copy| sum + copy).unwrap_or_default() / replicas.len() as f64) as f32
    };
    words.map(mean).collect()
}

impl TrainState {
    /// A replica with the same weights and optimizer state.
    fn replica(&self) -> Self {
        Self {
            schema: self.schema.clone(),
            lookups: self.lookups.clone(),
            model: Model::new(&self.schema),
            weights: self.weights.clone(),
            dense_states: self.dense_states.clone(),
            grads: vec![0.0; self.grads.len()],
            tapes: Vec::new(),
            optimizer: self.optimizer,
            steps: self.steps,
            samples: self.samples,
            last_batch_unix_ms: self.last_batch_unix_ms,
        }
    }

    /// Copies weights, optimizer state and step number from another replica.
    fn follow(&mut self, other: &Self) {
        self.weights.clone_from(&other.weights);
        self.dense_states.clone_from(&other.dense_states);
        self.steps = other.steps;
        self.samples = other.samples;
        self.last_batch_unix_ms = other.last_batch_unix_ms;
    }
}

#[cfg(test)]
mod tests;
