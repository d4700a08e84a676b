//! A trainer in plain loops and f64. It pools explicitly, expands gradients to one entry per occurrence,
//! coalesces them in a map, and uses the optimizers' formulas from their papers. Dense layers are those of
//! the library in f64, which other tests compare with finite differences and with PyTorch.

use std::collections::BTreeMap;

use crate::model::{Model, Tape, View, loss};
use crate::schema::{AbsentDefault, Pooling, Schema};
use crate::trainer::ReferenceTrainer;
use crate::trainer::optim::{Optimizer, OptimizerKind};
use crate::types::Batch;

/// Samples per tape: another number than in the trainer, because the result must not depend on it.
const TAPE: usize = 7;

/// A dense tensor or one row: its weights, its states, and its gradient in the current step.
#[derive(Clone, Debug)]
struct Values {
    weights: Vec<f64>,
    states: Vec<Vec<f64>>,
    gradient: Option<Vec<f64>>,
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

pub(crate) struct Naive {
    schema: Schema,
    model: Model<f64>,
    optimizer: Optimizer,
    steps: u64,
    dense: BTreeMap<String, Values>,
    tables: Vec<Vec<Values>>,
    before: Vec<Vec<u32>>,
}

impl Naive {
    /// Copies the current weights and states of a trainer.
    pub(crate) fn of(reference: &ReferenceTrainer) -> Self {
        let dense = reference.model().parameters().iter().map(|p| {
            let states = reference.dense_states().iter().map(|state| wide(&p.read(state))).collect();
            let weights = wide(&p.read(&reference.weights().values));
            (p.name.clone(), Values { weights, states, gradient: None })
        });
        let tables = reference.tables().iter().map(|table| {
            let row = |r: u64| {
                let state =
                    |s: &crate::store::State| wide(&s.as_slice()[r as usize * s.width()..][..s.width()]);
                let states = table.states().iter().map(state).collect();
                Values { weights: wide(table.row_values(r).unwrap()), states, gradient: None }
            };
            (0..table.rows()).map(row).collect()
        });
        Self {
            schema: reference.schema().clone(),
            model: Model::new(reference.schema()),
            optimizer: reference.optimizer(),
            steps: reference.steps(),
            dense: dense.collect(),
            tables: tables.collect(),
            before: table_bits(reference),
        }
    }

    fn row_of(&self, table: usize, id: u64) -> Option<u64> {
        let table = &self.schema.tables[table];
        match table.default {
            _ if id < table.rows => Some(id),
            AbsentDefault::Row(row) => Some(row),
            AbsentDefault::Zeros => None,
            AbsentDefault::Error => panic!("refused before"),
        }
    }

    fn input(&self, batch: &Batch, s: usize, row: &mut [f64]) {
        let width = self.schema.dense_width();
        row[..width].copy_from_slice(&wide(&batch.dense[s * width..][..width]));
        for lookup in self.schema.lookups() {
            let bag = batch.features[lookup.feature].sample(s);
            let mut sum = vec![0.0; lookup.dim];
            for &id in bag {
                let Some(from) = self.row_of(lookup.table.index(), id) else { continue };
                let from = &self.tables[lookup.table.index()][from as usize].weights;
                sum.iter_mut().zip(from).for_each(|(s, x)| *s += x);
            }
            if lookup.pooling == Pooling::Mean && !bag.is_empty() {
                sum.iter_mut().for_each(|s| *s /= bag.len() as f64);
            }
            row[lookup.column..][..lookup.dim].copy_from_slice(&sum);
        }
    }

    /// Takes a step. Returns the summed loss before the step.
    pub(crate) fn step(&mut self, batch: &Batch, labels: &[f32]) -> f64 {
        let shapes: BTreeMap<_, _> =
            self.model.parameters().iter().map(|p| (p.name.clone(), p.shape.clone())).collect();
        let tensor = |name: &str| Some((shapes[name].clone(), self.dense[name].weights.clone()));
        let mut weights = self.model.read_tensors(tensor).unwrap();
        self.model.transpose(&mut weights);
        let all = View { buffer: 0, column: 0, width: self.schema.input_width() };
        let (mut tapes, mut loss, share): (Vec<Tape<f64>>, _, _) =
            (Vec::new(), 0.0, 1.0 / batch.samples as f64);
        for first in (0..batch.samples).step_by(TAPE) {
            let mut tape = self.model.training_tape();
            tape.samples = TAPE.min(batch.samples - first);
            for s in 0..tape.samples {
                self.input(batch, first + s, tape.values[0].row_mut(s, all));
            }
            self.model.forward(&weights, &mut tape);
            let label = |s: usize| f64::from(labels[first + s]);
            for s in 0..tape.samples {
                loss += loss::binary_cross_entropy(self.model.logit(&tape, s), label(s));
            }
            self.model
                .backward(&weights, &mut tape, |s, z| loss::binary_cross_entropy_slope(z, label(s)) * share);
            tapes.push(tape);
        }
        self.steps += 1;
        self.step_dense(&tapes);
        self.step_rows(batch, &tapes);
        loss
    }

    fn step_dense(&mut self, tapes: &[Tape<f64>]) {
        let mut gradients = Vec::new();
        for (i, len) in self.model.pieces().enumerate() {
            let mut out = vec![0.0; len];
            self.model.gradient(i, tapes, &mut out);
            gradients.extend(out);
        }
        let optimizer = Optimizer { kind: self.optimizer.kind.dense(), ..self.optimizer };
        for p in self.model.parameters() {
            let values = self.dense.get_mut(&p.name).unwrap();
            values.gradient = Some(p.read(&gradients));
            values.take_step(optimizer, self.steps, false);
        }
    }

    fn step_rows(&mut self, batch: &Batch, tapes: &[Tape<f64>]) {
        let mut gradients: BTreeMap<(usize, u64), Vec<f64>> = BTreeMap::new();
        for lookup in self.schema.lookups() {
            let view = View { buffer: 0, column: lookup.column, width: lookup.dim };
            for s in 0..batch.samples {
                let bag = batch.features[lookup.feature].sample(s);
                for row in bag.iter().filter_map(|&id| self.row_of(lookup.table.index(), id)) {
                    let sum =
                        gradients.entry((lookup.table.index(), row)).or_insert_with(|| vec![0.0; lookup.dim]);
                    for (sum, g) in sum.iter_mut().zip(tapes[s / TAPE].grads[0].row(s % TAPE, view)) {
                        *sum += if lookup.pooling == Pooling::Mean { g / bag.len() as f64 } else { *g };
                    }
                }
            }
        }
        for ((table, row), gradient) in gradients {
            let values = &mut self.tables[table][row as usize];
            values.gradient = Some(gradient);
            values.take_step(self.optimizer, self.steps, true);
        }
    }

    /// Asserts that the trainer has the same weights and states.
    pub(crate) fn assert_matches(&self, reference: &ReferenceTrainer, what: &str) {
        let dense = Optimizer { kind: self.optimizer.kind.dense(), ..self.optimizer };
        for p in reference.model().parameters() {
            let states: Vec<_> = reference.dense_states().iter().map(|state| p.read(state)).collect();
            let got = p.read(&reference.weights().values);
            self.dense[&p.name].assert_near(dense, &got, &states, &format!("{what}: {}", p.name));
        }
        let after = table_bits(reference);
        for (t, (table, rows)) in reference.tables().iter().zip(&self.tables).enumerate() {
            for (r, values) in rows.iter().enumerate() {
                let what = format!("{what}: {}, row {r}", self.schema.tables[t].name);
                if values.gradient.is_none() {
                    let row = |bits: &[Vec<u32>]| bits[t][r * table.dim()..][..table.dim()].to_vec();
                    assert_eq!(row(&self.before), row(&after), "{what}: not touched");
                }
                let state = |s: &crate::store::State| s.as_slice()[r * s.width()..][..s.width()].to_vec();
                let states: Vec<_> = table.states().iter().map(state).collect();
                values.assert_near(self.optimizer, table.row_values(r as u64).unwrap(), &states, &what);
            }
        }
    }
}

fn table_bits(reference: &ReferenceTrainer) -> Vec<Vec<u32>> {
    reference.tables().iter().map(|t| t.values().unwrap().iter().map(|x| x.to_bits()).collect()).collect()
}

impl Values {
    fn take_step(&mut self, o: Optimizer, steps: u64, sparse: bool) {
        let Self { weights, states, gradient } = self;
        let gradient = gradient.as_ref().unwrap();
        let mean_square = gradient.iter().map(|g| g * g).sum::<f64>() / gradient.len().max(1) as f64;
        if o.kind == OptimizerKind::RowwiseAdagrad {
            states[0][0] += mean_square;
        }
        for (i, (w, g)) in weights.iter_mut().zip(gradient).enumerate() {
            *w -= match o.kind {
                OptimizerKind::Sgd => o.lr * g,
                OptimizerKind::Adagrad => {
                    states[0][i] += g * g;
                    o.lr * g / (states[0][i].sqrt() + o.eps)
                }
                OptimizerKind::RowwiseAdagrad => o.lr * g / (states[0][0].sqrt() + o.eps),
                OptimizerKind::Adam => {
                    states[0][i] = 0.9 * states[0][i] + 0.1 * g;
                    states[1][i] = 0.999 * states[1][i] + 0.001 * g * g;
                    let (m, v) = (states[0][i], states[1][i]);
                    let (one, two) = (1.0 - 0.9f64.powf(steps as f64), 1.0 - 0.999f64.powf(steps as f64));
                    if sparse {
                        o.lr * two.sqrt() / one * m / (v.sqrt() + o.eps)
                    } else {
                        o.lr * (m / one) / ((v / two).sqrt() + o.eps)
                    }
                }
            };
        }
    }

    /// Asserts equality within f32 precision. If the sum of a gradient nearly cancels, the first steps of
    /// all optimizers except SGD depend on its last bits, even on its sign. Then only the size of the step
    /// is checked.
    fn assert_near(&self, o: Optimizer, weights: &[f32], states: &[Vec<f32>], what: &str) {
        let mut firm = vec![true; weights.len()];
        if let (Some(gradient), true) = (&self.gradient, o.kind != OptimizerKind::Sgd) {
            firm = gradient.iter().map(|g| g.abs() > 1e-4).collect();
        }
        for (i, (got, expected)) in weights.iter().zip(&self.weights).enumerate() {
            let tolerance = if firm[i] { 4e-6 + 1e-5 * expected.abs() } else { 8.0 * o.lr };
            let difference = (f64::from(*got) - expected).abs();
            assert!(difference <= tolerance, "{what} [{i}]: expected {expected}, got {got}, {self:?}");
        }
        assert_eq!(states.len(), self.states.len(), "{what}");
        for (got, expected) in states.iter().zip(&self.states) {
            for (got, expected) in got.iter().zip(expected) {
                let difference = (f64::from(*got) - expected).abs();
                assert!(difference <= 1e-3 * expected.abs() + 1e-7, "{what}: state {expected}, got {got}");
            }
        }
    }
}
