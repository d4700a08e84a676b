//! The backward pass of the embeddings: Tensor Casting, with a gather-reduce that also runs the optimizer,
//! compared with expand and coalesce, which frameworks use (Tensor Casting, sections III-B and IV; figures 12
//! and 13), on the paper's models RM1 to RM4.
//!
//! Expand makes a copy of each pooled gradient for every row that was gathered for it. Coalesce sorts the
//! copies by row and sums those of each row. Then the optimizer updates the rows. Casting also sorts, but
//! only pairs of row and sample; the gather-reduce then reads the gradients in place. Both sides start from
//! the batch and the gradients of the pooled vectors, and end with the same updated rows, to the bit; this
//! is checked before measuring.
//!
//! "casted before" measures the gather-reduce without casting, because the pipeline's Plan casts a batch
//! during an earlier step. "whole step" (figure 13) adds the rest of a training step to both sides, with the
//! same code: gather and pool, forward, loss, backward and dense gradients.
//!
//! Options: `--rows N` per table (100,000), `--batch N` (1024), `--threads N` (2), `--skew
//! uniform|low|medium|high`, `--only RM1`, `--json`.

mod harness;

use rayon::prelude::*;

use flechette::model::loss::binary_cross_entropy_slope;
use flechette::model::{InputRows, Model, Tape, Weights};
use flechette::schema::preset::{ArchKind, SyntheticShape, synthetic};
use flechette::schema::{Architecture, Lookup, Schema};
use flechette::store::Table;
use flechette::trainer::casting::{Casting, RadixSort, RowOccurrence};
use flechette::trainer::optim::{self, Optimizer};
use flechette::trainer::update::{RowUpdate, RowsInMemory};
use flechette::types::Batch;
use harness::replay;
use harness::{Draw, Options, Report};

/// A model of table II in the Tensor Casting paper.
struct Rm {
    name: &'static str,
    tables: usize,
    /// Ids per sample and table.
    gathers: usize,
    /// Hidden sizes, without the last layers (to the dim, and to one logit).
    bottom: &'static [usize],
    top: &'static [usize],
}

const MODELS: [Rm; 4] = [
    Rm { name: "RM1", tables: 10, gathers: 80, bottom: &[256, 128], top: &[256, 64] },
    Rm { name: "RM2", tables: 40, gathers: 80, bottom: &[256, 128], top: &[512, 128] },
    Rm { name: "RM3", tables: 10, gathers: 20, bottom: &[2560, 512], top: &[512, 128] },
    Rm { name: "RM4", tables: 10, gathers: 20, bottom: &[2560, 1024], top: &[2048, 2048, 1024] },
];
const DIM: usize = 64;

/// The part of a step that is measured; the module comment describes them.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Backward,
    CastedBefore,
    WholeStep,
}

impl Part {
    const ALL: [(Self, &'static str); 3] =
        [(Self::Backward, ""), (Self::CastedBefore, ", casted before"), (Self::WholeStep, ", whole step")];
}

fn main() -> anyhow::Result<()> {
    let options = Options::read(1500);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(options.number("--threads", 2)).build()?;
    pool.install(|| run(&options))
}

fn run(options: &Options) -> anyhow::Result<()> {
    let mut report = Report::new("embedding_backward", "lookups", "expand and coalesce", options);
    for rm in MODELS {
        for kind in [optim::OptimizerKind::Sgd, optim::OptimizerKind::Adagrad] {
            for (part, name) in Part::ALL {
                let setting = format!("{} {kind}{name}", rm.name);
                if options.wants(&setting) {
                    let mut case = Case::new(&rm, kind, options)?;
                    case.check()?;
                    let pairs = case.measure(part, options);
                    // The paper reports ratios of 1.6 to 2.1 on its CPU. Our goal is only to be faster.
                    report.add(setting, &pairs, Some(1.0));
                }
            }
        }
    }
    report.finish();
    Ok(())
}

/// One model and optimizer: a batch, its gradients, and the tables of both sides.
struct Case {
    schema: Schema,
    lookups: Vec<Lookup>,
    batch: Batch,
    model: Model<f32>,
    weights: Weights<f32>,
    /// Gradients of the dense weights.
    dense: Vec<f32>,
    tapes: Vec<Tape<f32>>,
    optimizer: Optimizer,
    ours: Vec<Table>,
    theirs: Vec<Table>,
    casting: Casting,
    expanded: Vec<Expanded>,
}

impl Case {
    fn new(rm: &Rm, kind: optim::OptimizerKind, options: &Options) -> anyhow::Result<Self> {
        let Rm { tables, gathers, bottom, top, .. } = *rm;
        let (rows, samples) = (options.number("--rows", 100_000) as u64, options.number("--batch", 1024));
        let shape = |multi_hot| SyntheticShape { tables, rows, dense: 13, multi_hot };
        let mut schema = synthetic(ArchKind::Dlrm, DIM, shape(Some(gathers as u32)));
        schema.architecture = Architecture::Dlrm { bottom: bottom.to_vec(), top: top.to_vec() };
        let batch =
            batch(&schema, &synthetic(ArchKind::Dlrm, DIM, shape(None)), (samples, gathers), options)?;
        let optimizer = Optimizer::new(kind, 0.01);
        let learner = || flechette::trainer::initialise(&schema, optimizer, 0);
        let (ours, theirs) = (learner()?, learner()?.into_tables());
        let (weights, ours) = (ours.weights().clone(), ours.into_tables());
        let model = Model::new(&schema);
        let (tapes, dense) = (gradients(&model, samples), vec![0.0; model.weights_len()]);
        let (lookups, expanded) =
            (schema.lookups(), schema.tables.iter().map(|_| Expanded::default()).collect());
        Ok(Self {
            lookups,
            batch,
            model,
            weights,
            dense,
            tapes,
            optimizer,
            ours,
            theirs,
            casting: Casting::default(),
            expanded,
            schema,
        })
    }

    fn cast(&mut self) -> anyhow::Result<()> {
        Ok(self.casting.fill(&self.schema, &self.lookups, &self.batch)?)
    }

    fn gather_reduce(&mut self) {
        let update = RowUpdate { tapes: &self.tapes, step: self.optimizer.step(1) };
        update.tables(self.ours.iter_mut().map(RowsInMemory::of), &self.casting);
    }

    fn expand_coalesce(&mut self) {
        let Self { lookups, batch, tapes, optimizer, theirs, expanded, .. } = self;
        let step = optimizer.step::<f32>(1);
        theirs.par_iter_mut().zip(expanded).zip(lookups).for_each(|((table, expanded), lookup)| {
            expanded.expand(batch, lookup, tapes);
            expanded.coalesce();
            // A table in owned memory has mutable parts. `check` would report rows that are not updated.
            let Some((weights, states)) = table.parts_mut() else { return };
            let mut states: Vec<&mut [f32]> = states.iter_mut().filter_map(|s| s.rows_mut()).collect();
            for (&row, grad) in expanded.rows.iter().zip(expanded.sums.chunks_exact(DIM)) {
                let at = row as usize * DIM..(row as usize + 1) * DIM;
                let mut of_row: Vec<&mut [f32]> = states.iter_mut().map(|s| &mut s[at.clone()]).collect();
                step.update_row(&mut weights[at.clone()], grad, &mut of_row);
            }
        });
    }

    /// Takes a step on both sides and checks that their tables are equal to the bit.
    fn check(&mut self) -> anyhow::Result<()> {
        self.cast()?;
        self.gather_reduce();
        self.expand_coalesce();
        for (ours, theirs) in self.ours.iter().zip(&self.theirs) {
            anyhow::ensure!(ours.as_bytes() == theirs.as_bytes(), "the two sides differ");
        }
        Ok(())
    }

    /// The rest of a step, without the dense optimizer: gather and pool, forward, loss, backward, dense
    /// gradients.
    fn rest_of_step(&mut self, theirs: bool) {
        let Self { schema, lookups, batch, model, weights, dense, tapes, .. } = self;
        let tables = if theirs { &self.theirs } else { &self.ours };
        let inputs = InputRows { dense_width: schema.dense_width(), lookups, batch };
        let rows = |l: usize| {
            let (table, ids) = (&tables[lookups[l].table.index()], &batch.features[lookups[l].feature].ids);
            move |occurrence: usize| table.row(ids[occurrence])
        };
        let (chunk, share) = (model.chunk(), 1.0 / batch.samples as f32);
        tapes.par_iter_mut().with_max_len(1).enumerate().for_each(|(at, tape)| {
            inputs.write(at * chunk, tape, rows);
            model.forward(weights, tape);
            model.backward(weights, tape, |s, z| binary_cross_entropy_slope(z, (s % 4 / 3) as f32) * share);
        });
        let mut rest = &mut dense[..];
        let pieces: Vec<_> =
            model.pieces().map(|len| rest.split_off_mut(..len).unwrap_or_default()).collect();
        let pieces = pieces.into_par_iter().with_max_len(1).enumerate();
        pieces.for_each(|(piece, out)| model.gradient(piece, tapes, out));
    }

    fn measure(&mut self, part: Part, options: &Options) -> harness::Pairs {
        let lookups: u64 = self.batch.features.iter().map(|f| f.ids.len() as u64).sum();
        let whole = part == Part::WholeStep;
        let case = std::cell::RefCell::new(self);
        let ours = || {
            options.rate(|| {
                let mut case = case.borrow_mut();
                // Cannot fail: `check` has casted this batch.
                if part != Part::CastedBefore && case.cast().is_err() {
                    return 0;
                }
                if whole {
                    case.rest_of_step(false);
                }
                case.gather_reduce();
                lookups
            })
        };
        let theirs = || {
            options.rate(|| {
                let mut case = case.borrow_mut();
                if whole {
                    case.rest_of_step(true);
                }
                case.expand_coalesce();
                lookups
            })
        };
        options.compare(ours, theirs)
    }
}

/// The buffers of the baseline for one table.
#[derive(Default)]
struct Expanded {
    /// For each occurrence of a row, a copy of the gradient of its sample.
    copies: Vec<f32>,
    /// The row of each copy, and the copy's index.
    of: Vec<RowOccurrence>,
    sort: RadixSort,
    rows: Vec<u64>,
    sums: Vec<f32>,
}

impl Expanded {
    fn expand(&mut self, batch: &Batch, lookup: &Lookup, tapes: &[Tape<f32>]) {
        self.copies.clear();
        self.of.clear();
        let column = &batch.features[lookup.feature];
        for s in 0..batch.samples {
            let tape = &tapes[s / tapes[0].rows];
            let grad = &tape.grads[0].from(s % tapes[0].rows, lookup.column)[..DIM];
            for &row in column.sample(s) {
                self.of.push(RowOccurrence { row, occurrence: self.of.len() as u32 });
                self.copies.extend_from_slice(grad);
            }
        }
    }

    fn coalesce(&mut self) {
        self.sort.sort(&mut self.of);
        self.rows.clear();
        self.sums.clear();
        for run in self.of.chunk_by(|a, b| a.row == b.row) {
            let first = self.sums.len();
            self.rows.push(run[0].row);
            self.sums.extend_from_slice(&self.copies[run[0].occurrence as usize * DIM..][..DIM]);
            for pair in &run[1..] {
                let copy = &self.copies[pair.occurrence as usize * DIM..][..DIM];
                self.sums[first..].iter_mut().zip(copy).for_each(|(sum, g)| *sum += g);
            }
        }
    }
}

/// A batch of `shape`: samples, and ids per sample and table.
fn batch(
    schema: &Schema,
    one_hot: &Schema,
    shape: (usize, usize),
    options: &Options,
) -> anyhow::Result<Batch> {
    let skew = options.value("--skew").unwrap_or("uniform".into());
    let raw = &replay::draw(one_hot, &skew, shape, 1)?[0];
    let mut batch = Batch::empty(schema.features.len());
    schema.encode(raw, &mut batch)?;
    Ok(batch)
}

/// Random gradients of the input rows of this many samples.
fn gradients(model: &Model<f32>, samples: usize) -> Vec<Tape<f32>> {
    let mut draw = Draw::new(7);
    let width = model.training_tape().grads[0].stride();
    (0..samples.div_ceil(model.chunk()))
        .map(|chunk| {
            let mut tape = model.training_tape();
            tape.samples = (samples - chunk * tape.rows).min(tape.rows);
            for s in 0..tape.samples {
                let row = tape.grads[0].from_mut(s, 0);
                let len = row.len().min(width);
                row[..len].iter_mut().for_each(|g| *g = draw.uniform() as f32 - 0.5);
            }
            tape
        })
        .collect()
}
