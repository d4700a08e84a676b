//! `serve --train`: training beside the server of the same process.
//!
//! One thread trains, only when a processor is free, and starts all other threads of training, which inherit
//! this. So requests come first. It writes a first version if the model has none, waits until the server
//! answers, and trains. The server takes over the versions that it publishes like those of another process.
//!
//! A failure of training is logged and shown, and the server goes on with its last version.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::error::ErrorKind;
use clap::{ArgMatches, Command, FromArgMatches};

use super::data::{OrderFlags, Source};
use super::interrupt::OnSignal;
use super::lock::ModelLock;
use super::run::{Run, RunMetrics, Setting, Start};
use super::{Args, Checked, RunFlags, check};
use crate::cli::background;
use crate::cli::flags::whole;
use crate::cli::training::ComputeFlags;
use crate::cli::{InputError, error_line};
use crate::config::Config;
use crate::dataset::{Feed, Stop};
use crate::learnlog::{self, LogError};
use crate::metrics::{EventKind, TrainingState};
use crate::store::disk::SystemDisk;
use crate::store::retention::chain_bytes;
use crate::store::{StoreError, check_name, make_dirs, versions};
use crate::trainer::cursor::CursorError;
use crate::types::VersionSelector;

/// How often versions are published without `--publish-every`.
const PUBLISH_EVERY: Duration = Duration::from_secs(5);

/// The flags of `serve --train` as they are given.
#[derive(Debug, clap::Args)]
struct GivenFlags {
    /// Trains one model, of this name, while it is served. SOURCE is a directory (or follow:DIR), whose files
    /// are trained in the order of their names as they are renamed into it, or data files, or `learn`: the
    /// samples that clients send with Learn
    #[arg(long, value_name = "NAME=SOURCE", num_args = 1..)]
    train: Vec<String>,
    /// The model.toml that `init` wrote; needed if the model has no version yet
    #[arg(long, value_name = "FILE")]
    model_config: Option<PathBuf>,
    /// Threads that train when a processor is free [default: --threads]
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1, 1024))]
    train_threads: Option<usize>,
    /// Ends training after the file of this name, or before a file whose name is greater
    #[arg(long, value_name = "NAME")]
    follow_until: Option<String>,
    /// How many times to train on the data files
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<u32>(1, u64::from(u32::MAX)))]
    epochs: u32,
    #[command(flatten)]
    order: OrderFlags,
    /// How long the end of the server waits for the last version to be published
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = whole::<u64>(1, 86_400))]
    last_version_seconds: u64,
    #[command(flatten)]
    run: RunFlags,
}

impl GivenFlags {
    /// A flag that is given and only for data files.
    fn for_files_only(&self) -> Option<&'static str> {
        if self.epochs > 1 { Some("--epochs") } else { self.order.given() }
    }
}

/// Flags of `serve --train`.
#[derive(Debug)]
pub(crate) struct ServeTrainFlags {
    target: Target,
    given: GivenFlags,
}

/// [`ServeTrainFlags`] if `--train` is given. Each of them requires it. clap cannot derive this, because
/// flags are flattened within them.
#[derive(Debug)]
pub(crate) struct OptionalServeTrain(pub Option<ServeTrainFlags>);

impl clap::Args for OptionalServeTrain {
    fn augment_args(command: Command) -> Command {
        // For an update, no flag is required.
        let flags = GivenFlags::augment_args_for_update(Command::new("serve-train"));
        let needs_train = |flag: &clap::Arg| {
            let flag = flag.clone().help_heading("Training in the server");
            if flag.get_id() == "train" { flag } else { flag.requires("train") }
        };
        command.args(flags.get_arguments().map(needs_train))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for OptionalServeTrain {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        if !matches.contains_id("train") {
            return Ok(Self(None));
        }
        if matches.get_occurrences::<String>("train").is_some_and(|given| given.len() > 1) {
            let reason = "--train: given twice, but a server trains one model\n";
            return Err(clap::Error::raw(ErrorKind::ArgumentConflict, reason));
        }
        let given = GivenFlags::from_arg_matches(matches)?;
        let wrong = |reason| clap::Error::raw(ErrorKind::ValueValidation, format!("--train: {reason}\n"));
        let target = Target::parse(&given.train).map_err(wrong)?;
        if let Some(flag) = given.for_files_only().filter(|_| !matches!(target.source, Source::Files(_))) {
            let reason = format!("{flag}: only for data files, because this SOURCE grows\n");
            return Err(clap::Error::raw(ErrorKind::ValueValidation, reason));
        }
        if given.run.training.format.given().is_none() && target.source != Source::Learned {
            let reason = "--format: missing, for the files of --train\n";
            return Err(clap::Error::raw(ErrorKind::MissingRequiredArgument, reason));
        }
        Ok(Self(Some(ServeTrainFlags { target, given })))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The value of `--train`.
#[derive(Clone, Debug)]
struct Target {
    name: String,
    source: Source,
}

impl Target {
    /// # Errors
    /// When the first word has no name, or the words no source.
    fn parse(words: &[String]) -> Result<Self, String> {
        let mut words = words.iter().map(String::as_str);
        let parts = words.next().and_then(|first| first.split_once('=')).filter(|(name, _)| !name.is_empty());
        let (name, first) = parts.ok_or("expected NAME=SOURCE, such as ctr=incoming")?;
        let source: Vec<&str> = std::iter::once(first).chain(words).collect();
        Ok(Self { name: name.to_owned(), source: Source::parse(&source)? })
    }
}

impl ServeTrainFlags {
    /// The model's name.
    pub(crate) fn name(&self) -> &str {
        &self.target.name
    }

    /// The model's name, if it is trained on the samples that clients send.
    pub(crate) fn learns(&self) -> Option<String> {
        (self.target.source == Source::Learned).then(|| self.target.name.clone())
    }

    /// The flags of `train` that mean the same, with which the model's last version continues.
    fn into_args(self, models: &Path) -> anyhow::Result<Args> {
        let Self { target: Target { name, source }, given } = self;
        let GivenFlags { model_config, follow_until, epochs, order, run, .. } = given;
        // A directory without this model has no versions.
        let from = versions(models, &name).is_ok_and(|versions| !versions.is_empty());
        if model_config.is_none() && !from {
            let error = anyhow!("--model-config: missing, and model {name:?} has no version yet");
            return Err(InputError(error).into());
        }
        if source == Source::Learned {
            // No client has sent a sample yet.
            let log = learnlog::folder(models, &name);
            make_dirs(&SystemDisk, &log)?;
        }
        Ok(Args {
            model_config,
            from: from.then_some(VersionSelector::Latest),
            resume: true,
            data: source.flags(follow_until, order),
            run: RunFlags { publish: run.publish.or_every(PUBLISH_EVERY), ..run },
            compute: ComputeFlags::default(),
            valid: None,
            valid_out: None,
            models: models.to_owned(),
            name,
            epochs,
            early_stop: None,
            save_best: false,
            metrics_http: None,
            alone: false,
            json: false,
        })
    }
}

/// Training beside a server.
pub(crate) struct ServeTrain {
    stop: Stop,
    /// Lets the thread begin to train.
    begin: Option<Sender<()>>,
    /// How training has ended; the text says why it has failed.
    ended: Receiver<Result<(), String>>,
    on_signal: Option<OnSignal>,
    /// How long the end of the server waits for the last version.
    last_version: Duration,
}

impl ServeTrain {
    /// Starts the thread, and waits until the model can be served.
    ///
    /// # Errors
    /// When flags or data are wrong, or the model's last version cannot be continued.
    pub(crate) fn prepare(
        flags: ServeTrainFlags,
        config: &Config,
        models: &Path,
        metrics: RunMetrics,
    ) -> anyhow::Result<Self> {
        let last_version = Duration::from_secs(flags.given.last_version_seconds);
        let threads = flags.given.train_threads.unwrap_or(config.threads.compute);
        let args = flags.into_args(models)?;
        let stop = Stop::default();
        let ((ready, prepared), (begin, begun), (end, ended)) = (channel(), channel(), channel());
        let thread = TrainingThread { args, config: config.clone(), stop: stop.clone(), metrics, threads };
        let spawned = std::thread::Builder::new().name("train".to_owned());
        spawned.spawn(move || thread.run(Server { ready, begun }, &end)).context("--train: thread")?;
        // The thread answers, or drops its end. The time depends on the size of the model.
        prepared.recv().context("--train: the thread has ended")?.context("--train")?;
        Ok(Self { stop, begin: Some(begin), ended, on_signal: None, last_version })
    }

    /// Lets training begin. From now on the first signal stops it, and a second one ends the process.
    ///
    /// # Errors
    /// When the system refuses the handlers of the signals.
    pub(crate) fn begin(&mut self) -> anyhow::Result<()> {
        self.on_signal = Some(OnSignal::set(&self.stop)?);
        // The thread waits for this being dropped as well.
        if let Some(begin) = self.begin.take() {
            let _ = begin.send(());
        }
        Ok(())
    }

    /// Stops training after its batch, and waits for its last version. Blocks.
    ///
    /// # Errors
    /// When training has failed, or does not end in time.
    pub(crate) fn end(self) -> anyhow::Result<()> {
        self.stop.interrupt();
        drop(self.begin);
        match self.ended.recv_timeout(self.last_version) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(reason)) => Err(anyhow!("training has failed: {reason}")),
            Err(RecvTimeoutError::Disconnected) => Ok(()),
            Err(RecvTimeoutError::Timeout) => Err(anyhow!(
                "training did not end in {} s (--last-version-seconds), so its last version is missing; the \
                 next start continues from the version before",
                self.last_version.as_secs()
            )),
        }
    }
}

/// The thread that waits for the model, and lets training begin.
struct Server {
    ready: Sender<anyhow::Result<()>>,
    begun: Receiver<()>,
}

impl Server {
    /// Reports that the model is ready, or why not, and waits. Returns whether training begins.
    fn waits(self, prepared: anyhow::Result<()>) -> bool {
        // Both fail if the server has given up.
        self.ready.send(prepared).is_ok() && self.begun.recv().is_ok()
    }

    /// Reports that the model is ready although training cannot begin, and returns the error when it would.
    fn serves_without(self, error: anyhow::Error) -> anyhow::Result<()> {
        if self.waits(Ok(())) { Err(error) } else { Ok(()) }
    }
}

/// What the thread of training owns.
struct TrainingThread {
    args: Args,
    config: Config,
    stop: Stop,
    metrics: RunMetrics,
    threads: usize,
}

impl TrainingThread {
    /// Prepares the model, waits until the server answers, trains, and reports the end.
    fn run(self, server: Server, end: &Sender<Result<(), String>>) {
        background::only_when_idle("training runs");
        let trained = match background::pool("train", self.threads) {
            Ok(pool) => {
                let train = || pool.install(|| self.prepare_and_train(server));
                catch_unwind(AssertUnwindSafe(train))
            }
            Err(error) => {
                server.waits(Err(error));
                return;
            }
        };
        let trained = trained.unwrap_or_else(|_| Err(anyhow!("a thread of training panicked")));
        let training = &self.metrics.training;
        let result = trained.map_err(|error| error_line(error.as_ref()));
        match &result {
            Ok(()) => {
                training.enter(TrainingState::Ended);
                training.record(EventKind::TrainingEnded, "at the end of the data, or at a signal");
            }
            Err(reason) => {
                training.enter(TrainingState::Failed);
                training.record(EventKind::TrainingFailed, reason);
                tracing::error!(
                    model = self.args.name,
                    %reason,
                    "training has failed; the last version is served until the server ends"
                );
            }
        }
        // Without a receiver the server has ended.
        let _ = end.send(result);
    }

    /// The server gets an error before the model is ready, if it is one of flags or if nothing can be served.
    /// Others are returned: training has failed.
    fn prepare_and_train(&self, server: Server) -> anyhow::Result<()> {
        // The lock is held to the end, also by the publisher.
        let Checked { start, schema, lock } = match self.check() {
            Ok(checked) => checked,
            // The disk is full, or a checkpoint or the log of learned samples is damaged, for example.
            Err(error) if is_of_disk(&error) && self.has_version() => {
                return server.serves_without(error);
            }
            Err(error) => {
                server.waits(Err(error));
                return Ok(());
            }
        };
        let feed = self.args.feed(&schema, &self.stop);
        match self.begin(&feed, start, lock.clone()) {
            // There is nothing to train if the run is complete.
            Ok(run) => match (server.waits(Ok(())), run) {
                (true, Some(mut run)) => self.train(&mut run),
                _ => Ok(()),
            },
            // The data is damaged, or a disk has failed. What is there can be served.
            Err(error) if !error.is::<InputError>() && self.has_version() => server.serves_without(error),
            Err(error) => {
                server.waits(Err(error));
                Ok(())
            }
        }
    }

    /// Begins the run, and writes a first version if there is none.
    fn begin<'a>(&'a self, feed: &'a Feed, start: Start, lock: ModelLock) -> anyhow::Result<Option<Run<'a>>> {
        let first = matches!(start, Start::Fresh);
        let metrics = Some(self.metrics.clone());
        let setting = Setting { config: &self.config, device: None, metrics, lock };
        let mut run = Run::begin(&self.args, feed, start, setting)?;
        if let Some(run) = run.as_mut().filter(|_| first) {
            let version = run.write()?;
            tracing::info!(
                model = self.args.name,
                version = version.0,
                "the first version has the initial weights"
            );
        }
        Ok(run)
    }

    fn check(&self) -> anyhow::Result<Checked> {
        let Self { args, stop, .. } = self;
        args.run.training.optimizer()?;
        check_name("model", &args.name).map_err(|e| InputError(anyhow!("{e}")))?;
        check(args, stop)
    }

    /// Whether the last version is on disk, with all that it builds on. Somebody may have removed it.
    fn has_version(&self) -> bool {
        let Args { models, name, .. } = &self.args;
        let last = versions(models, name).ok().and_then(|mut versions| versions.pop());
        last.is_some_and(|version| chain_bytes(models, name, version).is_ok())
    }

    /// Trains to the end of the data or to a signal, and publishes what was trained.
    fn train(&self, run: &mut Run<'_>) -> anyhow::Result<()> {
        let model = &self.args.name;
        run.train()?;
        let samples = run.epochs.meter.samples();
        let why = if self.stop.interrupted() { "at a signal" } else { "at the end of the data" };
        // A version that was cut at the last step does not say that the run is complete; the next one does.
        if samples == 0 && !run.epochs.is_complete() && self.has_version() {
            tracing::info!(model, "training has ended {why}; it took no step");
            return Ok(());
        }
        if let Err(reason) = run.epochs.check_gate() {
            self.metrics.published(model, &Err(reason.clone()));
            tracing::warn!(
                model,
                samples,
                "training has ended {why}; the last version is not published: {reason}"
            );
            return Ok(());
        }
        let version = run.write().context("the last version")?;
        tracing::info!(model, samples, version = version.0, "training has ended {why}");
        Ok(())
    }
}

/// Whether something on disk keeps the model from being trained, so that it may be served as it is.
fn is_of_disk(error: &anyhow::Error) -> bool {
    error.is::<StoreError>() || error.is::<LogError>() || error.is::<CursorError>()
}
