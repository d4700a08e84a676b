//! Data-parallel replicas: several workers take each step together, on caches of one window's rows (cDLRM,
//! section 6).
//!
//! One scratchpad prefetches for all of them, as rank 0 does in the paper. Where a window of batches begins,
//! each replica gets a copy of the window's rows with their state (the broadcast of section 6.1). A batch is
//! cut into runs of consecutive samples, one a replica, whose lengths differ by at most one; of a batch of
//! fewer samples than replicas the last ones get none. Each replica gathers, learns and backpropagates its
//! run with the gradients of the whole batch's mean loss. Where the window ends, its rows go back to the
//! scratchpad from the first replica, whose copy is everyone's by then.
//!
//! **Dense weights**: gradients are summed over the replicas in their order, which with the scale of the
//! whole batch is the average of section 6.1, and each replica takes the same step on the same weights. They
//! stay equal to the bit.
//!
//! **Rows at lambda = 1**: each replica coalesces its own row gradients, these are summed row by row in the
//! order of replicas, and each replica updates its copies with the sums. So copies stay equal, and the step
//! is the one on the joined batch but for rounding, whatever the optimizer: a sum over samples is cut where
//! the batch is. The paper leaves this out because its framework makes two collective calls of it; here the
//! sums are a merge of sorted lists.
//!
//! **Rows at lambda > 1**: each replica updates its copies with its own gradients, and after every step whose
//! number lambda divides (line 12 of Algorithm 3), and where a window ends, copies are averaged. As the paper
//! has it:
//!
//! - the average is over all replicas, also those that did not touch the row: their update is zero ("all
//!   other GPUs produce a zero gradient update"). Rows that no replica touched are equal already and left
//!   alone;
//! - a replica's row gradient is as many times the joint one as there are replicas. That is the gradient of
//!   its own samples' mean loss, which a rank has by itself (the paper gives no scale). So one step of SGD
//!   and its average is the step on the joined batch;
//! - state is averaged as the row is: the paper names no optimizer and says nothing of state. Adam's step
//!   count is the run's, the same everywhere.
//!
//! It is not exact: between averages a replica does not see the others' updates, and an optimizer with state
//! divides each replica's gradient by its own past. A row that one replica alone uses then moves by up to as
//! many times less than in one worker as there are replicas.
//!
//! **A batch that had to be split** is trained by the first replica, and the others take its dense weights
//! over: so it is to the bit what one worker makes of it.
//!
//! Nothing depends on who is first: all sums and averages are in an order of their own, so the same number of
//! replicas and lambda give the same bytes on any number of threads.

mod rows;
mod window;

use std::ops::Range;

use rayon::prelude::*;

use super::TrainError;
use super::casting::Casting;
use super::pipeline::item::PreparedBatch;
use super::pipeline::train::StepObserver;
use super::train_state::{Labelled, TrainState};
use super::update::RecordShape;
use crate::model::Model;
use crate::trainer::pipeline::slots::Claim;
use crate::types::{Batch, TableId};
use rows::RowGradients;
pub(crate) use window::Window;

/// The most replicas there may be.
pub(crate) const MOST_REPLICAS: usize = 64;

/// Gradients that one thread sums at a time.
const SUMMED: usize = 4096;

/// Rows that one thread averages at a time.
const AVERAGED: usize = 256;

/// The workers of a run.
pub(crate) struct Replicas {
    lambda: u64,
    /// Of each table.
    shapes: Vec<RecordShape>,
    /// The networks of all but the first replica, whose network is the run's.
    others: Vec<TrainState>,
    replicas: Vec<Replica>,
    /// Of the rows of the whole batch: their places, and at lambda = 1 the sums over replicas.
    whole: RowGradients,
    /// Records that some replica may have updated since the last average: the first word in a cache, and how
    /// many.
    apart: Vec<(usize, usize)>,
}

/// What a replica has but for its network.
#[derive(Default)]
struct Replica {
    /// The records of the window's rows.
    cache: Vec<f32>,
    /// Its samples of the batch.
    batch: Batch,
    casting: Casting,
    /// What they make of the rows they touch.
    rows: RowGradients,
}

/// A step, as every replica gets it.
#[derive(Clone, Copy)]
struct Task<'a> {
    window: &'a Window,
    cast: &'a PreparedBatch,
    shapes: &'a [RecordShape],
    /// What row gradients are multiplied by.
    scale: f32,
}

impl Replicas {
    /// So many, with the weights of this network; at least one, and `lambda` at least 1.
    pub(crate) fn new(network: &TrainState, replicas: usize, lambda: u64) -> Self {
        Self {
            lambda,
            shapes: RecordShape::of(network),
            others: (1..replicas).map(|_| network.replica()).collect(),
            replicas: (0..replicas.max(1)).map(|_| Replica::default()).collect(),
            whole: RowGradients::default(),
            apart: Vec::new(),
        }
    }

    /// The first replica has taken a step by itself: the others take its dense weights over.
    pub(crate) fn follow(&mut self, first: &TrainState) {
        self.others.par_iter_mut().for_each(|network| network.follow(first));
    }

    /// Gives each replica the rows of the window, whose `claims` in the scratchpad these are.
    pub(crate) fn broadcast(&mut self, window: &Window, claims: &[Claim<'_>]) {
        let Some((first, others)) = self.replicas.split_first_mut() else { return };
        window.read(claims, &mut first.cache);
        others.par_iter_mut().for_each(|replica| replica.cache.clone_from(&first.cache));
    }

    /// Forward, loss and backward of one of the window's batches, and each replica's gradients. Gives the
    /// summed loss.
    ///
    /// # Errors
    /// [`TrainError::Batch`] where a shard cannot be casted.
    pub(crate) fn learn(
        &mut self,
        network: &mut TrainState,
        window: &Window,
        cast: &PreparedBatch,
    ) -> Result<f64, TrainError> {
        let Self { lambda, shapes, others, replicas, whole, .. } = self;
        whole.place(window, &cast.casting, shapes);
        let count = replicas.len();
        let scale = if *lambda == 1 { 1.0 } else { count as f32 };
        let task = Task { window, cast, shapes, scale };
        let losses = workers(network, others, replicas).into_par_iter().enumerate();
        let losses = losses
            .map(|(r, (network, replica))| replica.learn(network, task, shard(cast.batch.samples, count, r)));
        let losses: Vec<f64> = losses.collect::<Result<_, TrainError>>()?;
        Ok(losses.iter().sum())
    }

    /// Writes the probabilities of the batch that was learnt last over `probabilities`.
    pub(crate) fn read_probabilities(&self, network: &TrainState, probabilities: &mut Vec<f32>) {
        network.read_probabilities(probabilities);
        self.others.iter().for_each(|network| network.add_probabilities(probabilities));
    }

    /// Takes the step that `network` has counted, on dense weights and on rows.
    pub(crate) fn update(&mut self, network: &mut TrainState, window: &Window) {
        let Self { lambda, shapes, others, replicas, whole, apart } = self;
        reduce(network, others);
        let exchanges = *lambda == 1;
        if exchanges {
            whole.sum(&replicas.iter().map(|replica| &replica.rows).collect::<Vec<_>>());
        } else {
            apart.extend(whole.records(window));
        }
        let (shapes, whole) = (&shapes[..], &*whole);
        workers(network, others, replicas).into_par_iter().for_each(
            |(network, Replica { cache, rows, .. })| {
                network.update_dense();
                let rows = if exchanges { whole } else { &*rows };
                rows.update(window.tables_of(cache), shapes, &network.row_step());
            },
        );
    }

    /// Whether copies are to be averaged after this step, counted from 1.
    pub(crate) fn average_after(&self, step: u64) -> bool {
        step.is_multiple_of(self.lambda)
    }

    /// Averages the copies of every row that may differ, and their state. Sums are of f64 and rounded once,
    /// so what is equal stays as it is.
    pub(crate) fn average(&mut self) {
        let Self { replicas, apart, .. } = self;
        apart.sort_unstable();
        apart.dedup();
        let blocks = || apart.par_chunks(AVERAGED);
        let means: Vec<Vec<f32>> = blocks().map(|records| means(replicas, records)).collect();
        replicas.par_iter_mut().for_each(|Replica { cache, .. }| {
            for (records, mut means) in apart.chunks(AVERAGED).zip(means.iter().map(|means| &means[..])) {
                for &(at, words) in records {
                    let mean = means.split_off(..words).unwrap_or_default();
                    cache[at..at + words].copy_from_slice(mean);
                }
            }
        });
        apart.clear();
    }

    /// Tells of the rows of the batch that was learnt last, as the first replica has them.
    pub(crate) fn show(&self, window: &Window, cast: &PreparedBatch, watch: &mut dyn StepObserver) {
        for (casted, t) in cast.casting.tables().iter().zip(0..) {
            for (&row, &place) in casted.rows().iter().zip(self.whole.places(t)) {
                let (at, words) = window.record(t, place);
                watch.row(TableId(t as u32), row, &self.first_cache()[at..at + words]);
            }
        }
    }

    /// The first replica's cache.
    pub(crate) fn first_cache(&self) -> &[f32] {
        self.replicas.first().map_or(&[], |replica| &replica.cache)
    }
}

impl Replica {
    /// Learns its samples of the batch.
    fn learn(
        &mut self,
        network: &mut TrainState,
        Task { window, cast, shapes, scale }: Task<'_>,
        samples: Range<usize>,
    ) -> Result<f64, TrainError> {
        let Self { cache, batch, casting, rows } = self;
        *batch = cast.batch.part(samples.clone());
        casting.fill(&network.schema, &network.lookups, batch)?;
        rows.place(window, casting, shapes);
        let (lookups, labelled) =
            (network.lookups.clone(), Labelled { batch, labels: &cast.labels[samples] });
        let loss = network.gather_and_learn(labelled, cast.batch.samples, |l: usize| {
            let lookup = &lookups[l];
            let (occurrences, places) = (casting.places(l, lookup), rows.places(lookup.table.index()));
            let cached = window.table_of(lookup.table.index(), cache);
            // The place of an absent occurrence is past all; a record begins with its weights.
            move |occurrence: usize| {
                let place = *places.get(occurrences[occurrence] as usize)?;
                Some(bytemuck::cast_slice(&cached.record(place)[..lookup.dim]))
            }
        });
        network.sum_gradients();
        rows.coalesce(&network.row_update(), casting, scale);
        Ok(loss)
    }
}

/// The samples of replica `r` of `count`.
fn shard(samples: usize, count: usize, r: usize) -> Range<usize> {
    let (each, more) = (samples / count, samples % count);
    let start = |r: usize| r * each + r.min(more);
    start(r)..start(r + 1)
}

/// Each replica with its network.
fn workers<'a>(
    first: &'a mut TrainState,
    others: &'a mut [TrainState],
    replicas: &'a mut [Replica],
) -> Vec<(&'a mut TrainState, &'a mut Replica)> {
    std::iter::once(first).chain(others).zip(replicas).collect()
}

/// Sums the dense gradients of all replicas, for each of them, and tells them the step.
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
fn means(replicas: &[Replica], records: &[(usize, usize)]) -> Vec<f32> {
    let words = records.iter().flat_map(|&(at, words)| at..at + words);
    let mean = |at: usize| {
        let copies = replicas.iter().map(|replica| f64::from(replica.cache[at]));
        (copies.reduce(|sum, copy| sum + copy).unwrap_or_default() / replicas.len() as f64) as f32
    };
    words.map(mean).collect()
}

impl TrainState {
    /// Another worker with the same weights and state.
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
        }
    }

    /// Takes weights, state and step over from a worker of the same model.
    fn follow(&mut self, other: &Self) {
        self.weights.clone_from(&other.weights);
        self.dense_states.clone_from(&other.dense_states);
        self.steps = other.steps;
    }
}

#[cfg(test)]
mod tests;
