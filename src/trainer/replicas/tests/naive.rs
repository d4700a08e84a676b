//! Replicas as simply as can be: each is a whole trainer with all rows in memory, gradients are added up
//! sample by sample in a map, and averages are taken over every row there is.

use std::collections::{BTreeMap, BTreeSet};

use crate::dataset::Reader;
use crate::model::check_length;
use crate::schema::Pooling;
use crate::store::rows_of;
use crate::trainer::optim::Optimizer;
use crate::trainer::pipeline::scratchpad::Sizes;
use crate::trainer::pipeline::tests::{Case, schema};
use crate::trainer::train_state::Labelled;
use crate::trainer::update::{Records, TableRows};
use crate::trainer::{ReferenceTrainer, initialise};
use crate::types::{Batch, RawBatch};

/// A row's table, its number, and its gradient.
type Grads = BTreeMap<(usize, u64), Vec<f32>>;

/// The batches of a case, with their labels.
pub(crate) fn batches(case: &Case) -> Vec<(Batch, Vec<f32>)> {
    let (schema, mut data, mut raw, mut all) = (schema(), case.data(), RawBatch::default(), Vec::new());
    while data.read(case.batch, &mut raw).unwrap() > 0 {
        let mut batch = Batch::default();
        schema.encode(&raw, &mut batch).unwrap();
        all.push((batch, raw.labels.clone().unwrap()));
    }
    all
}

/// What replicas make of a case, and all they say. A window is of as many batches as the scratchpad holds, up
/// to `lookahead`; a batch that it does not hold is for one worker.
pub(crate) fn trained(case: &Case) -> (ReferenceTrainer, Vec<f32>) {
    let (sizes, lookahead) = (Sizes::of(&schema(), case.kind).unwrap(), case.settings.lookahead);
    let counts = sizes.counts(&case.settings.scratchpad);
    let fits = |batches: &[(Batch, Vec<f32>)]| {
        let mut needed = vec![BTreeSet::new(); counts.len()];
        for row in batches.iter().flat_map(|(batch, _)| rows_in(batch)) {
            needed[sizes.tables[row.0].0].insert(row);
        }
        needed.iter().zip(&counts).all(|(needed, &count)| needed.len() <= count)
    };
    let fresh = |_| initialise(&schema(), case.optimizer(), 7).unwrap();
    let learners = (0..case.settings.replicas).map(fresh).collect();
    let mut naive = Naive { learners, lambda: case.settings.lambda, said: Vec::new() };
    let (all, mut at) = (batches(case), 0);
    while at < all.len() {
        let most = lookahead.min(all.len() - at);
        let count = (1..=most).rev().find(|&count| fits(&all[at..at + count]));
        match count {
            Some(count) => {
                all[at..at + count].iter().for_each(|(batch, labels)| naive.step(batch, labels));
                naive.average();
            }
            None => naive.joined_step(&all[at].0, &all[at].1),
        }
        at += count.unwrap_or(1);
    }
    (naive.learners.swap_remove(0), naive.said)
}

/// Every row that a batch asks for.
fn rows_in(batch: &Batch) -> impl Iterator<Item = (usize, u64)> {
    let (schema, mut rows) = (schema(), Vec::new());
    for lookup in schema.lookups() {
        let (t, ids) = (lookup.table.index(), &batch.features[lookup.feature].ids);
        rows.extend(ids.iter().filter_map(|&id| Some((t, schema.tables[t].row_of(id)?))));
    }
    rows.into_iter()
}

struct Naive {
    learners: Vec<ReferenceTrainer>,
    lambda: u64,
    said: Vec<f32>,
}

impl Naive {
    /// The same step by everyone.
    fn joined_step(&mut self, batch: &Batch, labels: &[f32]) {
        let mut said = Vec::new();
        self.learners.iter_mut().for_each(|learner| {
            learner.step(batch, labels, &mut said).unwrap();
        });
        self.said.extend(said);
    }

    fn step(&mut self, batch: &Batch, labels: &[f32]) {
        check_length("labels", batch.samples, labels.len()).unwrap();
        let (mut dense, mut rows, mut from) = (Vec::<f32>::new(), Vec::new(), 0);
        let count = self.learners.len();
        for (r, learner) in self.learners.iter_mut().enumerate() {
            let upto = from + batch.samples / count + usize::from(r < batch.samples % count);
            let part = batch.part(from..upto);
            let labels = &labels[from..upto];
            from = upto;
            let (grads, row_grads) = learn(learner, Labelled { batch: &part, labels }, batch.samples);
            learner.network.add_probabilities(&mut self.said);
            rows.push(row_grads);
            if r == 0 {
                dense = grads;
            } else {
                dense.iter_mut().zip(&grads).for_each(|(sum, g)| *sum += g);
            }
        }
        if self.lambda == 1 {
            let joined = sum(&rows);
            rows.fill(joined);
        } else {
            rows.iter_mut().flat_map(Grads::values_mut).flatten().for_each(|g| *g *= count as f32);
        }
        for (learner, rows) in self.learners.iter_mut().zip(&rows) {
            update(learner, &dense, rows);
        }
        if self.learners[0].steps().is_multiple_of(self.lambda) {
            self.average();
        }
    }

    /// Averages every row and state.
    fn average(&mut self) {
        if self.lambda == 1 {
            return;
        }
        for t in 0..self.learners[0].tables.len() {
            let copies: Vec<Vec<f32>> = self.learners.iter().map(|l| numbers(l, t)).collect();
            let mean = |i: usize| {
                let sum =
                    copies[1..].iter().fold(f64::from(copies[0][i]), |sum, copy| sum + f64::from(copy[i]));
                (sum / copies.len() as f64) as f32
            };
            let means: Vec<f32> = (0..copies[0].len()).map(mean).collect();
            for learner in &mut self.learners {
                let (rows, states) = learner.tables[t].parts_mut().unwrap();
                let mut means = means.iter();
                rows.iter_mut().zip(&mut means).for_each(|(x, mean)| *x = *mean);
                for state in states {
                    state.rows_mut().unwrap().iter_mut().zip(&mut means).for_each(|(x, mean)| *x = *mean);
                }
            }
        }
    }
}

/// All rows of a table, and then all state.
fn numbers(learner: &ReferenceTrainer, t: usize) -> Vec<f32> {
    let table = &learner.tables[t];
    let mut all = table.values().unwrap().to_vec();
    table.states().iter().for_each(|state| all.extend_from_slice(state.as_slice()));
    all
}

/// Dense and row gradients of a part of a batch of `of` samples.
fn learn(learner: &mut ReferenceTrainer, labelled: Labelled<'_>, of: usize) -> (Vec<f32>, Grads) {
    let ReferenceTrainer { network, tables, .. } = learner;
    let (schema, lookups, batch) = (network.schema.clone(), network.lookups.clone(), labelled.batch);
    network.gather_and_learn(labelled, of, |l| rows_of(tables, &schema, &lookups[l], batch));
    let mut dense = Vec::new();
    for (i, len) in network.model.pieces().enumerate() {
        let mut piece = vec![0.0; len];
        network.model.gradient(i, &network.tapes, &mut piece);
        dense.extend(piece);
    }
    let mut rows = Grads::new();
    for lookup in &*lookups {
        for s in 0..batch.samples {
            let bag = batch.features[lookup.feature].sample(s);
            let divisor = if lookup.pooling == Pooling::Mean { bag.len() as f32 } else { 1.0 };
            let (tape, at) = (s / network.model.chunk(), s % network.model.chunk());
            let grad = &network.tapes[tape].grads[0].from(at, lookup.column)[..lookup.dim];
            let t = lookup.table.index();
            for row in bag.iter().filter_map(|&id| schema.tables[t].row_of(id)) {
                let grad = grad.iter().map(|g| g / divisor).collect();
                add(&mut rows, (t, row), grad);
            }
        }
    }
    (dense, rows)
}

fn add(to: &mut Grads, row: (usize, u64), grad: Vec<f32>) {
    match to.get_mut(&row) {
        Some(sum) => sum.iter_mut().zip(grad).for_each(|(sum, g)| *sum += g),
        None => drop(to.insert(row, grad)),
    }
}

fn sum(parts: &[Grads]) -> Grads {
    let mut joined = Grads::new();
    parts.iter().flatten().for_each(|(row, grad)| add(&mut joined, *row, grad.clone()));
    joined
}

fn update(learner: &mut ReferenceTrainer, dense: &[f32], rows: &Grads) {
    let ReferenceTrainer { network, tables, .. } = learner;
    network.steps += 1;
    let step = Optimizer { kind: network.optimizer.kind.dense(), ..network.optimizer }.step(network.steps);
    let mut states: Vec<&mut [f32]> = network.dense_states.iter_mut().map(|state| &mut state[..]).collect();
    step.update_dense(&mut network.weights.values, dense, &mut states);
    network.model.transpose(&mut network.weights);
    let step = network.optimizer.step(network.steps);
    for ((t, row), grad) in rows {
        TableRows::of(&mut tables[*t]).record(0, *row).update(&step, grad);
    }
}
