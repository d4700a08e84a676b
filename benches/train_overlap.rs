//! Training with every row in memory, without a scratchpad: samples per second with reading and casting on
//! another thread, compared with the sequential trainer. The model is the DLRM-Kaggle shape (26 tables of
//! 100,000 rows, dim 16, bottom 512-256-64-16, top 512-256-1). Both read the same batches from memory with
//! the same reader. The goal is at least 0.98: the second thread must not cost time.
//!
//! `--threads N` (2), `--steps N` per window (12 at batch 2,048; 16 times as many at 128), `--pairs N` (11),
//! `--only TEXT`, `--json`.

mod harness;

use std::sync::Arc;
use std::time::Instant;

use flechette::schema::preset::{ArchKind, SyntheticShape, synthetic};
use flechette::schema::{Architecture, Schema};
use flechette::trainer::optim::{self, Optimizer};
use flechette::trainer::{self, Data, Progress, ReferenceTrainer};
use flechette::types::RawBatch;
use harness::replay::{self, Replay};
use harness::{Options, Report};

const POOL: usize = 64;

fn main() -> anyhow::Result<()> {
    let options = Options::read(0);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(options.number("--threads", 2)).build()?;
    pool.install(|| run(&options))
}

fn run(options: &Options) -> anyhow::Result<()> {
    let mut report = Report::new("train_overlap", "samples", "the sequential trainer", options);
    for (batch, times) in [(2048, 1), (128, 16)] {
        for kind in [optim::OptimizerKind::Sgd, optim::OptimizerKind::Adagrad] {
            let setting = format!("{kind} batch {batch}");
            if !options.wants(&setting) {
                continue;
            }
            let steps = options.number("--steps", 12) * times;
            let batches = Arc::new(replay::draw(&kaggle(), "medium", (batch, 1), POOL)?);
            let (mut ours, mut theirs) = (Side::new(kind, &batches)?, Side::new(kind, &batches)?);
            let pairs = options.compare(
                || {
                    ours.window(steps, |reference, reader| {
                        let data = Data { reader, batch, steps: steps as u64 };
                        trainer::run_in_memory(reference, data, |_: &Progress<'_>| ())
                    })
                },
                || {
                    theirs.window(steps, |reference, reader| {
                        reference.train_sequentially(reader, batch, |_| ())
                    })
                },
            );
            report.add(setting, &pairs, Some(0.98));
        }
    }
    report.finish();
    Ok(())
}

struct Side {
    reference: ReferenceTrainer,
    replay: Replay,
}

impl Side {
    fn new(kind: optim::OptimizerKind, batches: &Arc<Vec<RawBatch>>) -> anyhow::Result<Self> {
        let reference = trainer::initialise(&kaggle(), Optimizer::new(kind, 0.02), 0)?;
        Ok(Self { reference, replay: Replay::of(batches) })
    }

    fn window<E>(
        &mut self,
        steps: usize,
        train: impl FnOnce(&mut ReferenceTrainer, &mut Replay) -> Result<u64, E>,
    ) -> f64 {
        self.replay.end_after(steps);
        let began = Instant::now();
        let samples = train(&mut self.reference, &mut self.replay).unwrap_or(0);
        samples as f64 / began.elapsed().as_secs_f64()
    }
}

/// The model in the Kaggle script of facebookresearch/dlrm.
fn kaggle() -> Schema {
    let shape = SyntheticShape { tables: 26, rows: 100_000, dense: 13, multi_hot: None };
    let mut schema = synthetic(ArchKind::Dlrm, 16, shape);
    schema.architecture = Architecture::Dlrm { bottom: vec![512, 256, 64], top: vec![512, 256] };
    schema
}
