//! `flechette train`: trains a model on click logs and writes a new version of it.

mod trained;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use indicatif::{ProgressBar, ProgressStyle};

use crate::cli::InputError;
use crate::cli::scratchpad::{PipelineFlags, SizeFlag, training_device};
use crate::cli::training::{TrainingFlags, compute_threads, is_pipe};
use crate::config::{Config, Flags};
use crate::device::cuda::Nvidia;
use crate::schema::Schema;
use crate::store::{self, check_name, check_writable};
use crate::trainer::eval::Quality;
use crate::trainer::{self, Data, PlanStats, Progress};
use crate::types::{RawBatch, Version};
use trained::Trained;

/// Flags of `train`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    training: TrainingFlags,
    /// File to evaluate on after training
    #[arg(long, value_name = "FILE")]
    valid: Option<PathBuf>,
    /// Writes the scores of `--valid` here, one a line
    #[arg(long, value_name = "FILE", requires = "valid")]
    valid_out: Option<PathBuf>,
    /// Directory of models; made when it is not there
    #[arg(long, value_name = "DIR")]
    models: PathBuf,
    /// Name of the model
    #[arg(long)]
    name: String,
    /// How often all the data is gone through
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Keeps the rows on disk, and in memory a scratchpad: min, a fraction of all rows, or bytes
    #[arg(long, value_name = "S")]
    scratchpad: Option<SizeFlag>,
    #[command(flatten)]
    pipeline: PipelineFlags,
    /// Data-parallel replicas, each with a share of every batch
    #[arg(long, value_name = "K", default_value_t = 1)]
    replicas: usize,
    /// Steps between two averagings of the replicas' rows; 1 exchanges gradients instead, and is exact to rounding
    #[arg(long, value_name = "STEPS", default_value_t = 1)]
    lambda: u64,
    /// Puts the rows on disk in the order of --counts, and keeps that order beside the model's versions
    #[arg(long, requires = "counts")]
    reorder: bool,
    /// Ends with one line of JSON
    #[arg(long)]
    json: bool,
}

/// Samples of a batch that is scored.
const EVALUATED: usize = 4096;

impl Args {
    pub(crate) fn flags(&self) -> Flags {
        self.training.flags(&self.pipeline)
    }
}

/// Trains, saves, evaluates.
///
/// # Errors
/// Flags or data that cannot be used, and versions that cannot be written.
pub(crate) fn run(args: Args, config: &Config) -> anyhow::Result<()> {
    args.training.optimizer()?;
    let schema = read_schema(&args.training.model_config)?;
    check_name("model", &args.name).map_err(|e| InputError(anyhow!("--name: {e}")))?;
    check_files(&args, &schema)?;
    prepare_models(&args.models)?;
    check_writable(&args.models, &args.name).map_err(|e| InputError(anyhow!("--models: {e}")))?;
    let device = training_device(config)?;
    compute_threads(config)?.install(|| train(&args, &schema, device))
}

fn train(args: &Args, schema: &Schema, device: Option<Arc<Nvidia>>) -> anyhow::Result<()> {
    let mut trained = Trained::begin(args, schema, device)?;
    let meter = Meter::new();
    let (mut rows, mut skipped) = (0, 0);
    let mut seconds = 0.0;
    for epoch in 1..=args.epochs {
        let mut reader = args.training.open(&args.training.data, schema)?;
        let start = Instant::now();
        let data = Data { reader: &mut *reader, batch: args.training.batch as usize, steps: u64::MAX };
        rows = trained.epoch(data, |p| meter.show(epoch, p))?;
        seconds += start.elapsed().as_secs_f64();
        skipped = reader.skipped();
    }
    meter.bar.finish_and_clear();
    if rows == 0 {
        return Err(args.training.no_samples());
    }
    let version = trained.save(&args.models, &args.name)?;
    let written = format!("{}/{}/{version}", args.models.display(), args.name);
    let quality =
        evaluate(args, &mut trained, version).with_context(|| format!("wrote {written}, not evaluated"))?;
    let samples_per_s = rows as f64 * f64::from(args.epochs) / seconds;
    eprintln!(
        "trained {rows} rows x {} epoch(s), {} steps, {samples_per_s:.0} samples/s, {skipped} lines skipped",
        args.epochs,
        trained.network().steps()
    );
    if let Trained::OnDisk { pipeline, .. } = &trained {
        let PlanStats { hits, fills, evictions, bubbles, splits, .. } = pipeline.stats();
        eprintln!(
            "scratchpad: {} slots, {hits} hits, {fills} fills, {evictions} evictions, {bubbles} bubbles, \
             {splits} batches split",
            pipeline.slots()
        );
        let worked =
            pipeline.worked().map(|(stage, time)| format!("{} {:.1} s", stage.name(), time.as_secs_f64()));
        eprintln!("stages worked: {}", worked.collect::<Vec<_>>().join(", "));
        let settings = pipeline.settings();
        if !settings.exact() {
            let (replicas, apart) = (settings.replicas, settings.steps_apart());
            eprintln!("{replicas} replicas, averaged at most {apart} steps apart: not exact");
        }
    }
    if let Some(q) = quality {
        eprintln!(
            "validation: {} rows, AUC {}, log loss {:.4}, normalized entropy {}",
            q.rows,
            q.auc.map_or("-".into(), |auc| format!("{auc:.4}")),
            q.log_loss,
            q.normalized_entropy.map_or("-".into(), |ne| format!("{ne:.4}"))
        );
        if q.infinite > 0 {
            eprintln!("validation: {} rows have an infinite loss", q.infinite);
        }
    }
    eprintln!("wrote {written}");
    if args.json {
        let json = serde_json::json!({
            "model": args.name, "version": version.0, "rows": rows, "epochs": args.epochs,
            "steps": trained.network().steps(), "skipped": skipped, "samples_per_s": samples_per_s,
            "seconds": seconds, "valid_rows": quality.map(|q| q.rows),
            "auc": quality.and_then(|q| q.auc), "logloss": quality.map(|q| q.log_loss),
            "normalized_entropy": quality.and_then(|q| q.normalized_entropy),
            "infinite_losses": quality.map(|q| q.infinite),
            "scratchpad": trained.scratchpad_json(),
        });
        writeln!(std::io::stdout(), "{json}")?;
    }
    Ok(())
}

fn evaluate(args: &Args, trained: &mut Trained, version: Version) -> anyhow::Result<Option<Quality>> {
    let Some(valid) = &args.valid else { return Ok(None) };
    let schema = trained.network().schema().clone();
    let mut reader = args.training.open(std::slice::from_ref(valid), &schema)?;
    let mut lines = Vec::new();
    // What is evaluated is the version: where its rows were rounded, those that were trained are not its.
    let written = store::open(&args.models, &args.name, version)?.store;
    let mut scores = Vec::new();
    let quality = trainer::evaluate(&schema, &mut *reader, EVALUATED, |batch, logits| {
        let state = trained.network_mut();
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

/// Opens every file once, so that one that cannot be used is told of before hours of training.
fn check_files(args: &Args, schema: &Schema) -> anyhow::Result<()> {
    for path in args.training.data.iter().chain(&args.valid).filter(|path| !is_pipe(path)) {
        let mut reader = args.training.open(std::slice::from_ref(path), schema)?;
        if Some(path) == args.valid.as_ref() {
            // Its lines are not read before training ends, and a file without labels must not be found then.
            reader.read(1, &mut RawBatch::default())?;
        }
    }
    let Some(path) = args.valid_out.as_ref().filter(|path| !is_pipe(path)) else { return Ok(()) };
    let refused = |e| InputError(anyhow!("--valid-out: {}: {e}", path.display()));
    let new = !path.exists();
    // What stands there is left as it is until there is something to put in its place.
    File::options().append(true).create(true).open(path).map_err(refused)?;
    if new {
        std::fs::remove_file(path).map_err(refused)?;
    }
    Ok(())
}

/// Reads and checks a `model.toml`.
///
/// # Errors
/// A file that cannot be read or does not add up.
pub(crate) fn read_schema(path: &Path) -> anyhow::Result<Schema> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| InputError(anyhow!("--model-config: {}: {e}", path.display())))?;
    Schema::parse(&text).with_context(|| format!("{}", path.display()))
}

fn prepare_models(models: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(models)
        .map_err(|e| InputError(anyhow!("--models: {}: {e}", models.display())).into())
}

/// The progress line, and what it shows: speed, and loss and AUC over the last samples.
struct Meter {
    bar: ProgressBar,
    start: Instant,
    state: std::cell::RefCell<Recent>,
}

/// A ring of the last scores and labels.
struct Recent {
    probabilities: Vec<f32>,
    labels: Vec<f32>,
    next: usize,
    loss: f64,
    shown: Instant,
}

/// How many samples the running AUC looks back on.
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
        Self { bar, start: now, state: std::cell::RefCell::new(recent) }
    }

    fn show(&self, epoch: u32, progress: &Progress<'_>) {
        let mut recent = self.state.borrow_mut();
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
