//! Training samples per second on the DLRM-Kaggle shape: 26 tables of 100,000 rows, dim 16, 13 dense values,
//! bottom 512-256-64-16, top 512-256-1. Batches are prepared before the measurement and repeated, so reading
//! data is not measured. A step is one call of [`ReferenceTrainer::step`]. A setting with `full` measures
//! [`run_in_memory`], which also encodes the batches, on another thread.
//!
//! This program prints rates, which vary on a shared machine. `benches/compare_torch.py` computes the ratio
//! to PyTorch: it runs this program (`--paced`) and PyTorch in alternating windows, with the same shape,
//! distributions and number of threads.
//!
//! `--threads N` (2), `--windows N` (11), `--window-ms N` (500), `--only TEXT`, `--json`.

mod harness;

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::Instant;

use flechette::schema::preset::{ArchKind, criteo};
use flechette::schema::{Architecture, Schema};
use flechette::trainer::optim::{self, Optimizer};
use flechette::trainer::{Data, Progress, ReferenceTrainer, initialise, run_in_memory};
use flechette::types::{Batch, Jagged, RawBatch, RawFeature, RawValues};
use harness::replay::Replay;
use harness::{Draw, Options, Sorted};

const DENSE: usize = 13;
const TABLES: usize = 26;
const ROWS: u64 = 100_000;
const DIM: usize = 16;
/// Number of prepared batches, as in `torch_dlrm.py`.
const POOL: usize = 64;

/// An optimizer, a batch size, and a distribution of the ids.
struct Setting {
    optimizer: String,
    batch: usize,
    skew: String,
}

impl Setting {
    fn reference(&self) -> anyhow::Result<ReferenceTrainer> {
        let kind: optim::OptimizerKind = self.optimizer.parse()?;
        let lr = if kind == optim::OptimizerKind::Sgd { 0.1 } else { 0.02 };
        Ok(initialise(&kaggle(), Optimizer::new(kind, lr), 0)?)
    }

    fn name(&self) -> String {
        format!("{} batch {} {}", self.optimizer, self.batch, self.skew)
    }
}

fn main() -> anyhow::Result<()> {
    let options = Options::read(500);
    let threads = options.number("--threads", 2);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    if let Some(setting) = options.value("--paced") {
        return pool.install(|| paced(&setting, options));
    }
    pool.install(|| rates(&options, threads))
}

/// Measures the rates of all settings.
fn rates(options: &Options, threads: usize) -> anyhow::Result<()> {
    println!("train_dlrm: samples/s, {threads} threads; for the ratio run benches/compare_torch.py");
    println!("{}", harness::place());
    println!("{:<28} {:>10} {:>10} {:>10}", "setting", "median", "least", "most");
    let windows = options.number("--windows", 11);
    let mut rows = Vec::new();
    for optimizer in ["sgd", "adagrad"] {
        for batch in [128, 2048] {
            for skew in ["uniform", "criteo"] {
                let setting = Setting { optimizer: optimizer.into(), batch, skew: skew.into() };
                if !options.wants(&setting.name()) {
                    continue;
                }
                let mut run = Run::new(&setting)?;
                run.window(options)?;
                let found = (0..windows).map(|_| run.window(options)).collect::<anyhow::Result<Vec<_>>>()?;
                let found = Sorted::of(found.into_iter());
                let (median, least, most) = (found.at(0.5), found.at(0.0), found.at(1.0));
                println!("{:<28} {median:>10.0} {least:>10.0} {most:>10.0}", setting.name());
                let name = setting.name();
                rows.push(
                    serde_json::json!({ "setting": name, "median": median, "least": least, "most": most }),
                );
            }
        }
    }
    println!("load {} at the end", harness::load());
    if options.json {
        let place = harness::place();
        let report = serde_json::json!({ "bench": "train_dlrm", "unit": "samples/s", "threads": threads,
            "place": place, "rows": rows });
        println!("{report}");
    }
    Ok(())
}

/// Runs one setting, `optimizer,batch,skew` with an optional `,full`, for another program. That program
/// writes the length of a window in milliseconds to our standard input, one per line. For each line, the
/// window runs and its rate is printed.
fn paced(setting: &str, mut options: Options) -> anyhow::Result<()> {
    let parts: Vec<&str> = setting.split(',').collect();
    let (optimizer, batch, skew, full) = match parts[..] {
        [optimizer, batch, skew] => (optimizer, batch, skew, false),
        [optimizer, batch, skew, "full"] => (optimizer, batch, skew, true),
        _ => anyhow::bail!("--paced: optimizer,batch,skew[,full]"),
    };
    let setting = Setting { optimizer: optimizer.into(), batch: batch.parse()?, skew: skew.into() };
    let mut window: Window = if full {
        let mut full = Full::new(&setting)?;
        Box::new(move |options| full.window(options))
    } else {
        let mut run = Run::new(&setting)?;
        Box::new(move |options| run.window(options))
    };
    for line in std::io::stdin().lock().lines() {
        options.window = std::time::Duration::from_millis(line?.trim().parse()?);
        println!("{}", window(&options)?);
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// Trains for a window and returns its samples per second.
type Window = Box<dyn FnMut(&Options) -> anyhow::Result<f64>>;

/// The sequential trainer and its batches.
struct Run {
    reference: ReferenceTrainer,
    batches: Vec<(Batch, Vec<f32>)>,
    next: usize,
    logits: Vec<f32>,
}

impl Run {
    fn new(setting: &Setting) -> anyhow::Result<Self> {
        let batches = batches(setting.batch, &setting.skew);
        Ok(Self { reference: setting.reference()?, batches, next: 0, logits: Vec::new() })
    }

    /// Samples per second over one window.
    fn window(&mut self, options: &Options) -> anyhow::Result<f64> {
        let mut error = None;
        let rate = options.rate(|| {
            let (batch, labels) = &self.batches[self.next % self.batches.len()];
            self.next += 1;
            if let Err(e) = self.reference.step(batch, labels, &mut self.logits) {
                error = Some(e);
            }
            batch.samples as u64
        });
        error.map_or(Ok(rate), |e| Err(e.into()))
    }
}

/// The trainer with reading and casting on another thread, and its data.
struct Full {
    reference: ReferenceTrainer,
    replay: Replay,
    batch: usize,
    /// Samples per second in the last window.
    rate: f64,
}

impl Full {
    fn new(setting: &Setting) -> anyhow::Result<Self> {
        let raw = |(batch, labels): (Batch, Vec<f32>)| {
            let feature =
                |column: Jagged| RawFeature { offsets: column.offsets, values: RawValues::Ids(column.ids) };
            RawBatch {
                samples: batch.samples,
                dense: batch.dense,
                features: batch.features.into_iter().map(feature).collect(),
                labels: Some(labels),
            }
        };
        let batches = batches(setting.batch, &setting.skew).into_iter().map(raw).collect();
        let replay = Replay::of(&Arc::new(batches));
        Ok(Self { reference: setting.reference()?, replay, batch: setting.batch, rate: 0.0 })
    }

    /// Samples per second over about one window: the last rate gives the number of steps.
    fn window(&mut self, options: &Options) -> anyhow::Result<f64> {
        let steps = (options.window.as_secs_f64() * self.rate) as usize / self.batch;
        self.replay.end_after(steps.max(8));
        let data = Data { reader: &mut self.replay, batch: self.batch, steps: u64::MAX };
        let began = Instant::now();
        let samples = run_in_memory(&mut self.reference, data, |_: &Progress<'_>| ())?;
        self.rate = samples as f64 / began.elapsed().as_secs_f64();
        Ok(self.rate)
    }
}

/// The model in the Kaggle script of facebookresearch/dlrm.
fn kaggle() -> Schema {
    let mut schema = criteo(ArchKind::Dlrm, DIM, ROWS);
    schema.architecture = Architecture::Dlrm { bottom: vec![512, 256, 64], top: vec![512, 256] };
    schema
}

/// Batches whose ids are uniform, or follow a power law of exponent 1 scattered over the rows. These are the
/// distributions of `torch_dlrm.py`, which gives the reasons.
fn batches(samples: usize, skew: &str) -> Vec<(Batch, Vec<f32>)> {
    let mut draw = Draw::new(0);
    let criteo = skew == "criteo";
    let batch = |draw: &mut Draw| {
        let mut batch = Batch::empty(TABLES);
        batch.samples = samples;
        batch.dense = (0..samples * DENSE).map(|_| draw.uniform() as f32 * 3.0).collect();
        for column in &mut batch.features {
            for _ in 0..samples {
                let u = draw.uniform();
                let rank = ((u * (ROWS as f64 + 1.0).ln()).exp() - 1.0) as u64;
                let id = if criteo { rank * 48_271 % ROWS } else { (u * ROWS as f64) as u64 };
                column.push(&[id]);
            }
        }
        let labels = (0..samples).map(|_| f32::from(u8::from(draw.uniform() < 0.25))).collect();
        (batch, labels)
    };
    (0..POOL).map(|_| batch(&mut draw)).collect()
}
