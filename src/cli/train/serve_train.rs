//! `serve --train`: training beside the server of the same process.
//!
//! One thread trains, only when a processor is free, and starts all other threads of training, which inherit
//! this. So requests come first. It writes a first version if the model has none, waits until the server
//! answers, and trains. The server takes over the versions that it publishes like those of another process.
//!
//! A failure of training is logged and shown, and the server goes on with its last version.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use anyhow::{Context, anyhow};

use super::interrupt::OnSignal;
use super::lock::ModelLock;
use super::run::{Run, RunContext, RunMetrics, Start};
use super::serve_flags::ServeTrainFlags;
use super::{Args, Checked, check};
use crate::cli::background;
use crate::cli::{InputError, error_line};
use crate::config::Config;
use crate::dataset::{DatasetError, Feed, Stop};
use crate::learnlog::{self, LogError};
use crate::metrics::{EventKind, TrainingState};
use crate::pace;
use crate::store::disk::SystemDisk;
use crate::store::retention::chain_bytes;
use crate::store::{StoreError, check_name, make_dirs};
use crate::trainer::cursor::CursorError;

/// Training beside a server.
pub(crate) struct ServeTrain {
    /// The model that is trained.
    pub name: String,
    /// Gets whether the model can be served; `None` when it can.
    prepared: Option<Receiver<anyhow::Result<()>>>,
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
    /// Starts the thread, which prepares the model.
    ///
    /// # Errors
    /// When a flag is wrong, or the system cannot start a thread.
    pub(crate) fn start(
        flags: ServeTrainFlags,
        config: &Config,
        models: &Path,
        metrics: RunMetrics,
    ) -> anyhow::Result<Self> {
        let (name, last_version) = (flags.name().to_owned(), flags.last_version());
        let threads = flags.threads().unwrap_or(config.threads.compute);
        let args = flags.into_args(models)?;
        let stop = Stop::default();
        let ((ready, prepared), (begin, begun), (end, ended)) = (channel(), channel(), channel());
        let thread = TrainingThread { args, config: config.clone(), stop: stop.clone(), metrics, threads };
        let spawned = std::thread::Builder::new().name("train".to_owned());
        spawned.spawn(move || thread.run(Server { ready, begun }, &end)).context("--train: thread")?;
        let (begin, prepared) = (Some(begin), Some(prepared));
        Ok(Self { name, prepared, stop, begin, ended, on_signal: None, last_version })
    }

    /// Waits until the model can be served, at most for `limit`. Returns whether it can. The time depends on
    /// the size of the model.
    ///
    /// # Errors
    /// When flags or data are wrong, or the model's last version cannot be continued.
    pub(crate) fn is_prepared_within(&mut self, limit: Duration) -> anyhow::Result<bool> {
        let Some(prepared) = &self.prepared else { return Ok(true) };
        match prepared.recv_timeout(limit) {
            Ok(prepared) => prepared.context("--train")?,
            Err(RecvTimeoutError::Timeout) => return Ok(false),
            Err(RecvTimeoutError::Disconnected) => anyhow::bail!("--train: the thread has ended"),
        }
        self.prepared = None;
        Ok(true)
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

    /// Reports why the model is not ready. Returns the error if the server goes on without it.
    fn refuses(self, error: anyhow::Error) -> anyhow::Result<()> {
        let reason = anyhow!(error_line(error.as_ref()));
        if self.waits(Err(error)) { Err(reason) } else { Ok(()) }
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
        // First, because from then on this thread may wait long for a processor.
        let _taken = pace::FreeTimeTaken::begin();
        background::only_when_idle("training runs");
        let trained = match background::pool("train", self.threads) {
            Ok(pool) => {
                let train = || pool.install(|| self.prepare_and_train(server));
                catch_unwind(AssertUnwindSafe(train))
            }
            Err(error) => Ok(server.refuses(error)),
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
                    "training has failed; the server goes on with the versions that there are"
                );
            }
        }
        // Without a receiver the server has ended.
        let _ = end.send(result);
    }

    /// The server gets an error before the model is ready, if it is one of flags or if the model has no
    /// version. Others, and all with which the server goes on, are returned: training has failed.
    fn prepare_and_train(&self, server: Server) -> anyhow::Result<()> {
        // The lock is held to the end, also by the publisher.
        let Checked { start, schema, lock } = match self.check() {
            Ok(checked) => checked,
            // The disk is full, or a file of data is gone, or a checkpoint is damaged, for example.
            Err(error) if is_of_disk(&error) && self.has_version() => {
                return server.serves_without(error);
            }
            Err(error) => return server.refuses(error),
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
            Err(error) => server.refuses(error),
        }
    }

    /// Begins the run, and writes a first version if there is none.
    fn begin<'a>(&'a self, feed: &'a Feed, start: Start, lock: ModelLock) -> anyhow::Result<Option<Run<'a>>> {
        let first = matches!(start, Start::Fresh);
        let metrics = Some(self.metrics.clone());
        let context = RunContext { config: &self.config, device: None, metrics, lock };
        let mut run = Run::begin(&self.args, feed, start, context)?;
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
        args.run.publish.check_needs(args.run.window)?;
        check_name("model", &args.name).map_err(|e| InputError(anyhow!("{e}")))?;
        if args.data.learned {
            // No client has sent a sample yet.
            make_dirs(&SystemDisk, &learnlog::folder(&args.models, &args.name))?;
        }
        check(args, stop)
    }

    /// Whether the last version is on disk, with all that it builds on. Somebody may have removed it.
    fn has_version(&self) -> bool {
        let Args { models, name, .. } = &self.args;
        let last = self.args.highest_version();
        last.is_some_and(|version| chain_bytes(models, name, version).is_ok())
    }

    /// Trains to the end of the data or to a signal, and publishes what was trained.
    fn train(&self, run: &mut Run<'_>) -> anyhow::Result<()> {
        run.train()?;
        let failed = run.epochs.failed.take();
        let why = match (&failed, self.stop.interrupted()) {
            (Some(_), _) => "at data that cannot be read",
            (None, true) => "at a signal",
            (None, false) => "at the end of the data",
        };
        let written = self.write_last(run, why);
        match failed {
            Some(error) => {
                if let Err(reason) = written {
                    let (model, reason) = (&self.args.name, error_line(reason.as_ref()));
                    tracing::warn!(model, reason, "what was trained before is not written");
                }
                Err(error)
            }
            None => written,
        }
    }

    /// Publishes what was trained, if the gate lets it through.
    fn write_last(&self, run: &mut Run<'_>, why: &str) -> anyhow::Result<()> {
        let model = &self.args.name;
        let samples = run.epochs.progress.samples();
        // A version that was cut at the last step does not say that the run is complete; the next one does.
        // Of a pipe that is read anew, there may be no samples at every start.
        let complete = run.epochs.is_complete() && !self.args.reads_pipe();
        if samples == 0 && !complete && self.has_version() {
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
    error.is::<StoreError>()
        || error.is::<LogError>()
        || error.is::<CursorError>()
        || error.is::<DatasetError>()
}
