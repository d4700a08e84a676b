//! `flechette train`: trains a model on click logs and writes a new version of it.

mod from;
mod trained;

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use indicatif::{ProgressBar, ProgressStyle};

use crate::cli::flags::whole;
use crate::cli::scratchpad::{PipelineFlags, SizeFlag, training_device};
use crate::cli::training::{TrainingFlags, compute_threads, is_pipe};
use crate::cli::{InputError, print};
use crate::config::{Config, Flags};
use crate::device::cuda::Nvidia;
use crate::schema::Schema;
use crate::store::{self, Opened, Purpose, check_name, check_writable};
use crate::trainer::eval::Quality;
use crate::trainer::{self, Data, PlanStats, Progress};
use crate::types::{RawBatch, Version};
use from::{FromVersion, schema_of};
use trained::Trained;

/// Flags of `train`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The model.toml that `init` wrote. With --from it may be left out, because the version has its own
    #[arg(long, value_name = "FILE", required_unless_present = "from")]
    model_config: Option<PathBuf>,
    /// Continues from a version of the model, by number, or from the latest good one (latest): its rows,
    /// dense weights and optimizer state
    #[arg(long, value_name = "V")]
    from: Option<FromVersion>,
    #[command(flatten)]
    training: TrainingFlags,
    /// File to evaluate on after training
    #[arg(long, value_name = "FILE")]
    valid: Option<PathBuf>,
    /// File for the scores of --valid, one per line
    #[arg(long, value_name = "FILE", requires = "valid")]
    valid_out: Option<PathBuf>,
    /// Directory of the models; created if it does not exist
    #[arg(long, value_name = "DIR")]
    models: PathBuf,
    /// Name of the model
    #[arg(long)]
    name: String,
    /// How many times to train on the data
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<u32>(1, u64::from(u32::MAX)))]
    epochs: u32,
    /// Keeps rows on disk and a scratchpad of this size in memory: min (room for the largest sample), a
    /// fraction of all rows, or bytes
    #[arg(long, value_name = "S")]
    scratchpad: Option<SizeFlag>,
    #[command(flatten)]
    pipeline: PipelineFlags,
    /// Data-parallel replicas; each trains on a share of every batch
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = whole::<usize>(0, u64::MAX))]
    replicas: usize,
    /// Replicas average their rows after this many steps. With 1 they exchange gradients instead, which is
    /// exact except for rounding
    #[arg(long, value_name = "STEPS", default_value_t = 1, value_parser = whole::<u64>(0, u64::MAX))]
    lambda: u64,
    /// Stores rows on disk in the order of --counts, and saves that order in the model's directory
    #[arg(long, requires = "counts")]
    reorder: bool,
    /// Prints one line of JSON at the end
    #[arg(long)]
    json: bool,
}

/// Samples per batch of the evaluation.
const EVALUATION_BATCH: usize = 4096;

impl Args {
    pub(crate) fn flags(&self) -> Flags {
        self.training.flags(&self.pipeline)
    }
}

/// Trains, saves a version, evaluates it.
///
/// # Errors
/// When flags or data are wrong, or the version cannot be written.
pub(crate) fn run(args: Args, config: &Config) -> anyhow::Result<()> {
    args.training.optimizer()?;
    check_name("model", &args.name).map_err(|e| InputError(anyhow!("--name: {e}")))?;
    let from = args.from.map(|from| from.open(&args.models, &args.name)).transpose()?;
    let schema = schema_of(args.model_config.as_deref(), from.as_ref())?;
    check_files(&args, &schema)?;
    prepare_models(&args.models)?;
    check_writable(&args.models, &args.name).map_err(|e| InputError(anyhow!("--models: {e}")))?;
    let device = training_device(config)?;
    compute_threads(config)?.install(|| train(&args, &schema, from, device))
}

fn train(
    args: &Args,
    schema: &Schema,
    from: Option<Opened>,
    device: Option<Arc<Nvidia>>,
) -> anyhow::Result<()> {
    let mut trained = Trained::begin(args, schema, from, device)?;
    let pass = train_epochs(args, schema, &mut trained)?;
    let version = trained.save(&args.models, &args.name)?;
    let written = format!("{}/{}/{version}", args.models.display(), args.name);
    let quality = evaluate(args, &mut trained, version)
        .with_context(|| format!("wrote {written}, but could not evaluate it"))?;
    eprint!("{}", text(&pass, &trained, quality.as_ref()));
    eprintln!("wrote {written}");
    if args.json {
        let json = serde_json::json!({
            "model": args.name, "version": version.0, "rows": pass.rows, "epochs": pass.epochs,
            "steps": trained.state().steps, "skipped": pass.skipped, "samples_per_s": pass.samples_per_s(),
            "seconds": pass.seconds, "valid_rows": quality.map(|q| q.rows),
            "auc": quality.and_then(|q| q.auc), "logloss": quality.map(|q| q.log_loss),
            "normalized_entropy": quality.and_then(|q| q.normalized_entropy),
            "infinite_losses": quality.map(|q| q.infinite),
            "scratchpad": trained.scratchpad_json(),
        });
        print(&format!("{json}\n"))?;
    }
    Ok(())
}

/// Rows and lines of one pass over the data, and the time of all passes.
struct Pass {
    rows: u64,
    skipped: u64,
    epochs: u32,
    seconds: f64,
}

impl Pass {
    fn samples_per_s(&self) -> f64 {
        self.rows as f64 * f64::from(self.epochs) / self.seconds
    }
}

fn train_epochs(args: &Args, schema: &Schema, trained: &mut Trained) -> anyhow::Result<Pass> {
    let meter = Meter::new();
    let mut pass = Pass { rows: 0, skipped: 0, epochs: args.epochs, seconds: 0.0 };
    for epoch in 1..=args.epochs {
        let mut reader = args.training.open(&args.training.data, schema)?;
        let start = Instant::now();
        let data = Data { reader: &mut *reader, batch: args.training.batch as usize, steps: u64::MAX };
        pass.rows = trained.epoch(data, |p| meter.show(epoch, p))?;
        pass.seconds += start.elapsed().as_secs_f64();
        pass.skipped = reader.skipped();
    }
    meter.bar.finish_and_clear();
    if pass.rows == 0 {
        return Err(args.training.no_samples());
    }
    Ok(pass)
}

fn text(pass: &Pass, trained: &Trained, quality: Option<&Quality>) -> String {
    let Pass { rows, skipped, epochs, .. } = pass;
    let (steps, samples_per_s) = (trained.state().steps, pass.samples_per_s());
    let mut text = format!(
        "trained {rows} rows x {epochs} epoch(s), {steps} steps, {samples_per_s:.0} samples/s, \
         {skipped} lines skipped\n"
    );
    // Writing to a string cannot fail.
    if let Trained::OnDisk { pipeline, .. } = trained {
        let PlanStats { hits, fills, evictions, bubbles, splits, .. } = pipeline.stats();
        let slots = pipeline.slots();
        let _ = writeln!(
            text,
            "scratchpad: {slots} slots, {hits} hits, {fills} fills, {evictions} evictions, \
             {bubbles} bubbles, {splits} batches split"
        );
        let worked =
            pipeline.worked().map(|(stage, time)| format!("{} {:.1} s", stage.name(), time.as_secs_f64()));
        let _ = writeln!(text, "stages worked: {}", worked.collect::<Vec<_>>().join(", "));
        let settings = pipeline.settings();
        if !settings.exact() {
            let (replicas, apart) = (settings.replicas, settings.steps_apart());
            let _ = writeln!(text, "{replicas} replicas, averaged at most {apart} steps apart: not exact");
        }
    }
    if let Some(q) = quality {
        let shown = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.4}"));
        let (rows, auc, entropy) = (q.rows, shown(q.auc), shown(q.normalized_entropy));
        let _ = writeln!(
            text,
            "validation: {rows} rows, AUC {auc}, log loss {:.4}, normalized entropy {entropy}",
            q.log_loss
        );
        if q.infinite > 0 {
            let _ = writeln!(text, "validation: {} rows have an infinite loss", q.infinite);
        }
    }
    text
}

fn evaluate(args: &Args, trained: &mut Trained, version: Version) -> anyhow::Result<Option<Quality>> {
    let Some(valid) = &args.valid else { return Ok(None) };
    let schema = trained.state().schema.clone();
    let mut reader = args.training.open(std::slice::from_ref(valid), &schema)?;
    let mut lines = Vec::new();
    // Evaluates the rows of the written version, not the trained rows: writing may have rounded them.
    let written = store::open(&args.models, &args.name, version, Purpose::Serve)?.store;
    let mut scores = Vec::new();
    let quality = trainer::evaluate(&schema, &mut *reader, EVALUATION_BATCH, |batch, logits| {
        let state = trained.state_mut();
        state.forward_rows_of(&written, batch)?;
        state.read_logits(logits);
        if args.valid_out.is_some() {
            state.read_probabilities(&mut scores);
            lines.extend_from_slice(&scores);
        }
        Ok(())
    })?;
    if let Some(path) = &args.valid_out {
        let write = || -> std::io::Result<()> {
            let mut out = BufWriter::new(File::create(path)?);
            lines.iter().try_for_each(|score| writeln!(out, "{score}"))?;
            out.flush()
        };
        write().with_context(|| format!("--valid-out: {}", path.display()))?;
    }
    Ok(quality)
}

/// Opens every file once, so that a file that cannot be used is reported before hours of training.
fn check_files(args: &Args, schema: &Schema) -> anyhow::Result<()> {
    for path in args.training.data.iter().chain(&args.valid).filter(|path| !is_pipe(path)) {
        let mut reader = args.training.open(std::slice::from_ref(path), schema)?;
        if Some(path) == args.valid.as_ref() {
            // Reads one sample now, so that missing labels are reported before training and not after it.
            reader.read(1, &mut RawBatch::default())?;
        }
    }
    let Some(path) = args.valid_out.as_ref().filter(|path| !is_pipe(path)) else { return Ok(()) };
    let refused = |e| InputError(anyhow!("--valid-out: {}: {e}", path.display()));
    let new = !path.exists();
    // Opening for appending changes nothing, so an existing file is kept until there are scores to write.
    File::options().append(true).create(true).open(path).map_err(refused)?;
    if new {
        std::fs::remove_file(path).map_err(refused)?;
    }
    Ok(())
}

/// Reads and checks a `model.toml`.
///
/// # Errors
/// When the file cannot be read or is not a valid schema.
pub(crate) fn read_schema(path: &Path) -> anyhow::Result<Schema> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| InputError(anyhow!("--model-config: {}: {e}", path.display())))?;
    Schema::parse(&text).with_context(|| format!("{}", path.display()))
}

fn prepare_models(models: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(models)
        .map_err(|e| InputError(anyhow!("--models: {}: {e}", models.display())).into())
}

/// The progress line: speed, and loss and AUC of the last samples.
struct Meter {
    bar: ProgressBar,
    start: Instant,
    recent: std::cell::RefCell<Recent>,
}

/// A ring of the last scores and labels.
struct Recent {
    probabilities: Vec<f32>,
    labels: Vec<f32>,
    next: usize,
    loss: f64,
    shown: Instant,
}

/// The progress line shows the AUC of this many last samples.
const RECENT: usize = 20_000;
const REFRESH: Duration = Duration::from_millis(500);

impl Meter {
    fn new() -> Self {
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
            bar.set_style(style);
        }
        let now = Instant::now();
        let recent = Recent { probabilities: vec![], labels: vec![], next: 0, loss: f64::NAN, shown: now };
        Self { bar, start: now, recent: std::cell::RefCell::new(recent) }
    }

    fn show(&self, epoch: u32, progress: &Progress<'_>) {
        let mut recent = self.recent.borrow_mut();
        for (&p, &y) in progress.probabilities.iter().zip(progress.labels) {
            recent.push(p, y);
        }
        recent.loss =
            if recent.loss.is_nan() { progress.loss } else { 0.98 * recent.loss + 0.02 * progress.loss };
        if recent.shown.elapsed() < REFRESH {
            return;
        }
        recent.shown = Instant::now();
        let auc = Quality::of(&recent.probabilities, &recent.labels).auc;
        self.bar.set_message(format!(
            "epoch {epoch}, {} samples, {:.0} samples/s, loss {:.4}, AUC {}",
            progress.samples,
            progress.samples as f64 / self.start.elapsed().as_secs_f64(),
            recent.loss,
            auc.map_or("-".into(), |auc| format!("{auc:.4}")),
        ));
        self.bar.tick();
    }
}

impl Recent {
    fn push(&mut self, probability: f32, label: f32) {
        if self.probabilities.len() < RECENT {
            self.probabilities.push(probability);
            self.labels.push(label);
        } else {
            self.probabilities[self.next] = probability;
            self.labels[self.next] = label;
            self.next = (self.next + 1) % RECENT;
        }
    }
}
