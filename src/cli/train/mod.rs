//! `flechette train`: trains a model on click logs and writes a new version of it.
//!
//! - `data`: the flags of the data; `publish_flags` and `serve_flags`: those of publishing and of
//!   `serve --train`; `from` and `resume`: the version that training continues from;
//! - `run`: a run, which `train` and `serve_train` drive; `trained`: its model, with rows in memory or on
//!   disk; `epochs`: its position in the data;
//! - `publishing`: the versions that a run writes; `lock`: one trainer at a time publishes a model;
//! - `evaluate`: validation; `progress_line` and `report`: what is shown during a run and at its end;
//!   `metrics_port`: its metrics for Prometheus;
//! - `interrupt`: signals.

mod data;
mod epochs;
mod evaluate;
mod from;
pub(crate) mod interrupt;
pub(crate) mod lock;
mod metrics_port;
mod progress_line;
mod publish_flags;
mod publishing;
mod report;
mod resume;
pub(crate) mod run;
pub(crate) mod serve_flags;
pub(crate) mod serve_train;
mod trained;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use serde_json::json;

use crate::cli::flags::{address, whole};
use crate::cli::pipeline_flags::{PipelineFlags, SizeFlag, training_device};
use crate::cli::training_flags::{ComputeFlags, TrainingFlags, compute_threads};
use crate::cli::{InputError, error_line, note, print, print_and_end};
use crate::config::{Config, Flags};
use crate::dataset::{Feed, Stop};
use crate::schema::Schema;
use crate::store::{StoreError, check_name, check_writable, versions};
use crate::trainer::TrainError;
use crate::trainer::cursor::MAX_EPOCHS;
use crate::types::{Version, VersionSelector};
use data::DataFlags;
use epochs::is_of_version;
use interrupt::{Interrupted, OnSignal};
use lock::ModelLock;
use publish_flags::PublishFlags;
use report::Report;
use run::{Run, RunContext, RunMetrics, Start};

/// Flags of `train`.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("validation").args(["valid", "valid_ratio"])))]
pub(crate) struct Args {
    /// The model.toml that `init` wrote. With --from it may be left out, because the version has its own
    #[arg(long, value_name = "FILE", required_unless_present_any = ["from", "resume"])]
    model_config: Option<PathBuf>,
    /// Continues from a version of the model, by number, or from the latest good one (latest): its rows,
    /// dense weights and optimizer state
    #[arg(long, value_name = "V", value_parser = from::parse)]
    from: Option<VersionSelector>,
    /// Continues an interrupted run of this command from the last version that it wrote, to the bit. If the
    /// run wrote none, training starts at the beginning
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    data: DataFlags,
    #[command(flatten)]
    run: RunFlags,
    #[command(flatten)]
    compute: ComputeFlags,
    /// File to evaluate on after every epoch, and after the version was written
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
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<u32>(1, u64::from(MAX_EPOCHS)))]
    #[arg(conflicts_with = "follow")]
    epochs: u32,
    /// Ends training after this many epochs without a smaller log loss of the validation data
    #[arg(long, value_name = "N", requires = "validation", conflicts_with = "follow")]
    #[arg(value_parser = whole::<u32>(1, u64::from(MAX_EPOCHS)))]
    early_stop: Option<u32>,
    /// Writes a version after each epoch whose log loss is the lowest so far; at the end the best version is
    /// the latest one
    #[arg(long, requires = "validation", conflicts_with = "follow")]
    save_best: bool,
    /// Address of the metrics of this run for Prometheus (/metrics), such as 127.0.0.1:9090. The settings of
    /// tokens and TLS hold as for server.http
    #[arg(long, value_name = "ADDR", value_parser = address)]
    metrics_http: Option<SocketAddr>,
    /// Whether training has a process of its own. `serve --train` has no flags of validation, and its server
    /// opens the log of learned samples.
    #[arg(skip = true)]
    alone: bool,
    /// Prints one line of JSON at the end
    #[arg(long)]
    json: bool,
}

/// The flags that `train` shares with `serve --train`.
#[derive(Debug, clap::Args)]
pub(crate) struct RunFlags {
    #[command(flatten)]
    pub publish: PublishFlags,
    #[command(flatten)]
    pub training: TrainingFlags,
    /// Samples of the progressive validation: AUC, log loss and calibration of the last N samples, scored
    /// before the model was trained on them
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = whole::<usize>(1, 1 << 30))]
    pub window: usize,
    /// Keeps rows on disk and a scratchpad of this size in memory: min (room for the largest sample), a
    /// fraction of all rows, or bytes
    #[arg(long, value_name = "S")]
    pub scratchpad: Option<SizeFlag>,
    #[command(flatten)]
    pub pipeline: PipelineFlags,
    /// Data-parallel replicas; each trains on a share of every batch
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = whole::<usize>(0, u64::MAX))]
    pub replicas: usize,
    /// Replicas average their rows after this many steps. With 1 they exchange gradients instead, which is
    /// exact except for rounding
    #[arg(long, value_name = "STEPS", default_value_t = 1, value_parser = whole::<u64>(0, u64::MAX))]
    pub lambda: u64,
    /// Stores rows on disk in the order of --counts, and saves that order in the model's directory
    #[arg(long, requires = "counts")]
    pub reorder: bool,
}

impl Args {
    pub(crate) fn flags(&self) -> Flags {
        self.compute.flags()
    }

    /// The highest version of the model on disk.
    fn highest_version(&self) -> Option<Version> {
        versions(&self.models, &self.name).ok().and_then(|mut versions| versions.pop())
    }

    /// The directory of a version of the model, for messages.
    fn shown_dir(&self, version: Version) -> String {
        format!("{}/{}/{version}", self.models.display(), self.name)
    }
}

/// Trains, saves a version, evaluates it.
///
/// # Errors
/// When flags or data are wrong, or the version cannot be written.
pub(crate) fn run(args: Args, config: &Config) -> anyhow::Result<()> {
    args.run.training.optimizer()?;
    args.run.publish.check_needs(args.run.window)?;
    check_name("model", &args.name).map_err(|e| InputError(anyhow!("--name: {e}")))?;
    let stop = Stop::default();
    let _on_signal = OnSignal::set(&stop)?.and_hangup(&stop)?;
    let args = Arc::new(args);
    let checked = check_until_interrupted(&args, &stop)?;
    let device = training_device(config)?;
    if stop.interrupted() {
        return Err(Interrupted(NO_STEP.to_owned()).into());
    }
    let context = RunContext { config, device, metrics: None, lock: checked.lock.clone() };
    compute_threads(config)?.install(|| train(&args, &stop, checked, context))
}

/// How often it is looked whether a signal ends the checks.
const SIGNAL_POLL: Duration = Duration::from_millis(50);

/// [`check`], which reads and compares all files of a version. A thread does it, which is not waited for at a
/// signal.
///
/// # Errors
/// As [`check`], and [`Interrupted`].
fn check_until_interrupted(args: &Arc<Args>, stop: &Stop) -> anyhow::Result<Checked> {
    let (send, checked) = channel();
    let of_thread = (args.clone(), stop.clone());
    let run = move || {
        // Without a receiver the process ends.
        let _ = send.send(check(&of_thread.0, &of_thread.1));
    };
    std::thread::Builder::new().name("check".to_owned()).spawn(run).context("threads")?;
    loop {
        match checked.recv_timeout(SIGNAL_POLL) {
            Ok(checked) => return checked,
            Err(RecvTimeoutError::Disconnected) => bail!("the thread that checks flags and data panicked"),
            Err(RecvTimeoutError::Timeout) if stop.interrupted() => {
                return Err(Interrupted(NO_STEP.to_owned()).into());
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// How a run ends that a signal stops before its first step.
const NO_STEP: &str = "no step was taken, so no version was written";

/// A run whose flags and data can be used.
struct Checked {
    start: Start,
    schema: Schema,
    /// Keeps other trainers from publishing versions of the model.
    lock: ModelLock,
}

/// Checks everything that can be checked before the model is initialised.
///
/// # Errors
/// When flags or data are wrong, or no version can be written.
fn check(args: &Args, stop: &Stop) -> anyhow::Result<Checked> {
    // A model is locked before its last version is read, so that no other trainer publishes a later one. The
    // directory of a new model is made only for a run that can begin.
    let exists = args.models.join(&args.name).is_dir();
    let held = if exists { lock::lock(args)? } else { ModelLock::default() };
    if args.alone && !held.is_held() {
        lock::check_no_other(&args.models, &args.name)?;
    }
    let (start, schema) = Start::of(args, stop)?;
    args.check_data(&schema)?;
    evaluate::check_out(args)?;
    // With `serve --train`, the existing versions are served all the same.
    let refused = |error: StoreError| match args.alone {
        true => InputError(anyhow!("--models: {error}")).into(),
        false => anyhow::Error::new(error).context("--models"),
    };
    check_writable(&args.models, &args.name).map_err(refused)?;
    let lock = if held.is_held() { held } else { lock::lock(args)? };
    Ok(Checked { start, schema, lock })
}

/// The line of `--json` for a run that trains nothing, because this version has all of its samples.
fn no_news(args: &Args, version: Option<Version>) -> String {
    let version = version.map(|version| version.0);
    match args.json {
        true => format!("{}\n", json!({ "model": args.name, "version": version, "rows": 0 })),
        false => String::new(),
    }
}

fn train(args: &Args, stop: &Stop, checked: Checked, mut context: RunContext<'_>) -> anyhow::Result<()> {
    // The lock is held to the end, also by the publisher.
    let Checked { start, schema, lock: _lock } = checked;
    let feed = args.feed(&schema, stop);
    let metrics = args.metrics_http.map(|address| metrics_port::start(address, context.config, &args.name));
    context.metrics = metrics.transpose()?.map(RunMetrics::alone);
    let continued = start.continued();
    let Some(mut run) = Run::begin(args, &feed, start, context)? else {
        return print(&no_news(args, continued));
    };
    if let Err(error) = run.train() {
        if args.run.publish.publishes() {
            note(&outlook(&run));
        }
        return Err(error);
    }
    if let Some(error) = run.epochs.failed.take() {
        write_trained(&mut run);
        return Err(error);
    }
    if run.epochs.progress.samples() == 0
        && let Some(ended) = without_sample(args, &run, continued, stop.interrupted())
    {
        return ended;
    }
    let version = write_last(&mut run, stop)?;
    evaluate_and_report(run, &feed, version, stop)
}

/// How a run ends that took no step. `None` if it writes a version nevertheless: the same rows, with the
/// cursor of all its data.
fn without_sample(
    args: &Args,
    run: &Run<'_>,
    continued: Option<Version>,
    interrupted: bool,
) -> Option<anyhow::Result<()>> {
    // Validation may have published a version of the state with which the run continued.
    let Some(version) = run.epochs.best_version().max(continued) else {
        let stopped = interrupted.then(|| Interrupted(NO_STEP.to_owned()).into());
        return Some(Err(stopped.unwrap_or_else(|| args.data.no_samples())));
    };
    let before = args.shown_dir(version);
    // The version that is there has all that was trained.
    if interrupted {
        let how = match run.epochs.is_complete() {
            true => format!("the run is complete: {before}; it was not evaluated"),
            false => format!("no step was taken since {before}; {}", outlook(run)),
        };
        return Some(print_and_end(&no_news(args, Some(version)), Err(Interrupted(how).into())));
    }
    // Data that is followed is never complete, so that a run may continue when there is more of it.
    if !args.data.follows() {
        return None;
    }
    run.epochs.progress.print(&format!("no new samples since {before}"));
    Some(print_and_end(&no_news(args, Some(version)), Ok(())))
}

/// Writes the last version, or makes the best one the latest, and returns it.
///
/// # Errors
/// When the gate refuses the version, or it cannot be written.
fn write_last(run: &mut Run<'_>, stop: &Stop) -> anyhow::Result<Version> {
    let interrupted = stop.interrupted();
    // After an interrupt the trained state is needed to continue, not the best one.
    if !interrupted || run.epochs.is_complete() {
        if let Some(best) = run.epochs.best_version() {
            let latest = run.versions.make_latest(best);
            return latest.map_err(|error| {
                let (reason, outlook) = (error_line(error.as_ref()), outlook(run));
                anyhow!("version {best} of the best epoch could not be made the latest: {reason}; {outlook}")
            });
        }
        if let Some(best) = run.epochs.unwritten_best() {
            tracing::warn!(
                "no version of the best epoch, {best}, could be written: the last epoch is written"
            );
        }
    }
    run.epochs.check_gate().map_err(|reason| not_published(&reason, run, interrupted))?;
    match run.write() {
        Err(error) if stop.interrupted() => Err(Interrupted(not_written(&error, run)).into()),
        Err(error) if run.epochs.args.run.publish.publishes() && is_of_version(&error) => {
            Err(anyhow!(not_written(&error, run)))
        }
        written => written,
    }
}

/// Writes a version of what was trained before data could not be read, and says how the run is continued.
fn write_trained(run: &mut Run<'_>) {
    if run.epochs.progress.samples() == 0 {
        return;
    }
    let written = run.epochs.check_gate().map_err(|reason| not_published(&reason, run, false));
    let text = match written.and_then(|()| run.write()) {
        Ok(version) => {
            let dir = run.epochs.args.shown_dir(version);
            format!("wrote {dir} with what was trained before the error; {}", outlook(run))
        }
        Err(error) => not_written(&error, run),
    };
    note(&text);
}

/// Evaluates the last version on the validation data, and says how the run ended.
///
/// # Errors
/// When the validation data cannot be read, or the run was interrupted.
fn evaluate_and_report(
    Run { epochs, mut model, .. }: Run<'_>,
    feed: &Feed,
    version: Version,
    stop: &Stop,
) -> anyhow::Result<()> {
    let args = epochs.args;
    let written = args.shown_dir(version);
    // A signal from now on ends only the evaluation.
    let complete = epochs.is_complete() || !stop.interrupted();
    let quality = if stop.interrupted() {
        None
    } else {
        let quality = evaluate::written(args, feed, &mut model, version);
        quality.with_context(|| format!("wrote {written}, but could not evaluate it"))?
    };
    // Then the validation data may not have been read to its end.
    let interrupted = stop.interrupted();
    let quality = quality.filter(|_| !interrupted);
    let report = Report { epochs: &epochs, model: &model, version, quality, interrupted, complete };
    note(report.text().trim_end());
    let json = if args.json { format!("{}\n", report.json()) } else { String::new() };
    if interrupted {
        let how = match complete {
            true => format!("wrote {written}; it was not evaluated"),
            false => format!("wrote {written}; the same command with --resume continues the run"),
        };
        return print_and_end(&json, Err(Interrupted(how).into()));
    }
    note(&format!("wrote {written}"));
    print(&json)
}

/// The last version is not published.
fn not_published(reason: &str, run: &Run<'_>, interrupted: bool) -> anyhow::Error {
    if interrupted {
        return Interrupted(format!("not published: {reason}; {}", outlook(run))).into();
    }
    anyhow!("not published: {reason}")
}

/// The last version could not be written, and how the run is continued.
fn not_written(error: &anyhow::Error, run: &Run<'_>) -> String {
    let reason = error_line(error.as_ref());
    if let Some(TrainError::StillWriting { .. }) = error.downcast_ref() {
        // It says already how to continue.
        return reason;
    }
    format!("the last version could not be written: {reason}; {}", outlook(run))
}

/// How the run is continued.
fn outlook(Run { epochs, model, .. }: &Run<'_>) -> String {
    resume::outlook(epochs.args, &epochs.cursor(model.state()).run)
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
