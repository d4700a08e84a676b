//! Replicas in the simplest form: each is a complete trainer with all rows in memory, gradients are summed
//! sample by sample in a map, and averages are over all rows.

use std::collections::{BTreeMap, BTreeSet};

use crate::dataset::Reader;
use crate::model::check_length;
use crate::schema::Pooling;
use crate::store::rows_of;
use crate::trainer::optim::Optimizer;
use crate::trainer::pipeline::scratchpad::Sizes;
use crate::trainer::pipeline::tests::{Case, schema};
use crate::trainer::train_state::Labelled;
use crate::trainer::update::{Records, RowsInMemory};
use crate::trainer::{ReferenceTrainer, initialise};
use crate::types::{Batch, RawBatch};

/// Gradients by table and row.
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

/// Trains a case with naive replicas. Returns the first replica and the logits of all samples. A
/// window has as many batches as fit in the scratchpad, up to `lookahead`. If one batch alone does not fit,
/// every replica takes the whole step.
pub(crate) fn trained(case: &Case) -> (ReferenceTrainer, Vec<f32>) {
    let (sizes, lookahead) = (Sizes::of(&schema(), case.kind), case.settings.lookahead);
    let counts = sizes.counts(&case.settings.scratchpad);
    let fits = |batches: &[(Batch, Vec<f32>)]| {
        let mut needed = vec![BTreeSet::new(); counts.len()];
        for row in batches.iter().flat_map(|(batch, _)| rows_in(batch)) {
            needed[sizes.tables[row.0].size].insert(row);
        }
        needed.iter().zip(&counts).all(|(needed, &count)| needed.len() <= count)
    };
    let fresh = |_| initialise(&schema(), case.optimizer(), 7).unwrap();
    let trainers = (0..case.settings.replicas).map(fresh).collect();
    let mut naive = Naive { trainers, lambda: case.settings.lambda, logits: Vec::new() };
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
    (naive.trainers.swap_remove(0), naive.logits)
}

/// Every row that a batch uses.
fn rows_in(batch: &Batch) -> impl Iterator<Item = (usize, u64)> {
    let (schema, mut rows) = (schema(), Vec::new());
    for lookup in schema.lookups() {
        let (t, ids) = (lookup.table.index(), &batch.features[lookup.feature].ids);
        rows.extend(ids.iter().filter_map(|&id| Some((t, schema.tables[t].row_of(id)?))));
    }
    rows.into_iter()
}

struct Naive {
    trainers: Vec<ReferenceTrainer>,
    lambda: u64,
    logits: Vec<f32>,
}

impl Naive {
    /// Takes the step on the whole batch in every replica.
    fn joined_step(&mut self, batch: &Batch, labels: &[f32]) {
        let mut logits = Vec::new();
        self.trainers.iter_mut().for_each(|reference| {
            reference.step(batch, labels, &mut logits).unwrap();
        });
        self.logits.extend(logits);
    }

    fn step(&mut self, batch: &Batch, labels: &[f32]) {
        check_length("labels", batch.samples, labels.len()).unwrap();
        let (mut dense, mut rows, mut from) = (Vec::<f32>::new(), Vec::new(), 0);
        let count = self.trainers.len();
        for (r, reference) in self.trainers.iter_mut().enumerate() {
            let upto = from + batch.samples / count + usize::from(r < batch.samples % count);
            let part = batch.part(from..upto);
            let labels = &labels[from..upto];
            from = upto;
            let (grads, row_grads) = learn(reference, Labelled { batch: &part, labels }, batch.samples);
            reference.state.add_logits(&mut self.logits);
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
        for (reference, rows) in self.trainers.iter_mut().zip(&rows) {
            update(reference, &dense, rows);
        }
        if self.trainers[0].steps().is_multiple_of(self.lambda) {
            self.average();
        }
    }

    /// Averages every row and state.
    fn average(&mut self) {
        if self.lambda == 1 {
            return;
        }
        for t in 0..self.trainers[0].tables.len() {
            let copies: Vec<Vec<f32>> = self.trainers.iter().map(|l| numbers(l, t)).collect();
            let mean = |i: usize| {
                let sum =
                    copies[1..].iter().fold(f64::from(copies[0][i]), |sum, copy| sum + f64::from(copy[i]));
                (sum / copies.len() as f64) as f32
            };
            let means: Vec<f32> = (0..copies[0].len()).map(mean).collect();
            for reference in &mut self.trainers {
                let (rows, states) = reference.tables[t].parts_mut().unwrap();
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
fn numbers(reference: &ReferenceTrainer, t: usize) -> Vec<f32> {
    let table = &reference.tables[t];
    let mut all = table.values().unwrap().to_vec();
    table.states().iter().for_each(|state| all.extend_from_slice(state.as_slice()));
    all
}

/// Dense and row gradients of a part of a batch. The whole batch has `of` samples.
fn learn(reference: &mut ReferenceTrainer, labelled: Labelled<'_>, of: usize) -> (Vec<f32>, Grads) {
    let ReferenceTrainer { state, tables, .. } = reference;
    let (schema, lookups, batch) = (state.schema.clone(), state.lookups.clone(), labelled.batch);
    state.gather_and_learn(labelled, of, |l| rows_of(tables, &schema, &lookups[l], batch));
    let mut dense = Vec::new();
    for (i, len) in state.model.pieces().enumerate() {
        let mut piece = vec![0.0; len];
        state.model.gradient(i, &state.tapes, &mut piece);
        dense.extend(piece);
    }
    let mut rows = Grads::new();
    for lookup in &*lookups {
        for s in 0..batch.samples {
            let bag = batch.features[lookup.feature].sample(s);
            let divisor = if lookup.pooling == Pooling::Mean { bag.len() as f32 } else { 1.0 };
            let (tape, at) = (s / state.model.chunk(), s % state.model.chunk());
            let grad = &state.tapes[tape].grads[0].from(at, lookup.column)[..lookup.dim];
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

fn update(reference: &mut ReferenceTrainer, dense: &[f32], rows: &Grads) {
    let ReferenceTrainer { state, tables, .. } = reference;
    state.steps += 1;
    let step = Optimizer { kind: state.optimizer.kind.dense(), ..state.optimizer }.step(state.steps);
    let mut states: Vec<&mut [f32]> = state.dense_states.iter_mut().map(|state| &mut state[..]).collect();
    step.update_dense(&mut state.weights.values, dense, &mut states);
    state.model.transpose(&mut state.weights);
    let step = state.optimizer.step(state.steps);
    for ((t, row), grad) in rows {
        RowsInMemory::of(&mut tables[*t]).record(0, *row).update(&step, grad);
    }
}
