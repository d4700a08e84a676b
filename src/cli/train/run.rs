//! A run of training: where it starts, its model, its position in the data, and the versions that it writes.
//! `train` and `serve --train` drive it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Args;
use super::epochs::Epochs;
use super::from::{self, schema_of};
use super::lock::ModelLock;
use super::publishing::{PublishContext, WrittenVersions, base_of};
use super::resume;
use super::trained::Trained;
use crate::cli::error_line;
use crate::cli::serve::{Wake, WatchCommand};
use crate::config::Config;
use crate::dataset::{Feed, FeedFiles, Stop};
use crate::device::cuda::Nvidia;
use crate::metrics::{EventKind, Training};
use crate::schema::Schema;
use crate::store::Opened;
use crate::store::disk::{Disk as _, SystemDisk};
use crate::trainer::cursor::Cursor;
use crate::trainer::progressive::ProgressiveQuality;
use crate::trainer::publish::Published;
use crate::types::Version;

/// Where a run starts.
pub(crate) enum Start {
    /// With fresh weights.
    Fresh,
    /// From a version, with new data.
    From(Box<Opened>),
    /// Where an interrupted run stopped.
    Resumed(Box<Opened>, Box<Cursor>),
}

impl Start {
    fn opened(&self) -> Option<&Opened> {
        match self {
            Self::Fresh => None,
            Self::From(opened) | Self::Resumed(opened, _) => Some(opened),
        }
    }

    /// The version at which an interrupted run continues.
    pub(crate) fn continued(&self) -> Option<Version> {
        match self {
            Self::Resumed(opened, _) => Some(opened.store.version()),
            Self::Fresh | Self::From(_) => None,
        }
    }

    /// What the flags ask for, and the schema.
    ///
    /// # Errors
    /// When a version or the schema cannot be used.
    pub(crate) fn of(args: &Args, stop: &Stop) -> anyhow::Result<(Self, Schema)> {
        let resumed = if args.resume { resume::find(args, stop)? } else { None };
        let start = match (resumed, args.from) {
            (Some(resumed), _) => resumed,
            (None, Some(from)) => Self::From(Box::new(from::open(from, &args.models, &args.name)?)),
            (None, None) => Self::Fresh,
        };
        let schema = schema_of(args.model_config.as_deref(), start.opened())?;
        Ok((start, schema))
    }
}

/// What a run uses besides its flags.
pub(crate) struct RunContext<'c> {
    pub config: &'c Config,
    pub device: Option<Arc<Nvidia>>,
    /// `None` if the process has no metrics.
    pub metrics: Option<RunMetrics>,
    /// That of the model.
    pub lock: ModelLock,
}

/// The metrics of a run, and the server in this process that takes its versions over, if there is one.
#[derive(Clone)]
pub(crate) struct RunMetrics {
    pub training: Arc<Training>,
    server: Option<ToServer>,
}

/// A server in this process.
#[derive(Clone)]
struct ToServer {
    wake: Wake,
    looks: Arc<Looks>,
}

/// How far the server is with the last versions.
#[derive(Default)]
struct Looks {
    /// It was asked to look for them, and has not begun.
    asked: AtomicBool,
    begun: AtomicBool,
}

/// Asks the server to look at a model that may have a new version. When the server begins, this is dropped,
/// and the next version asks again. Otherwise versions that come faster than they are opened would fill the
/// channel.
pub(crate) struct NewVersion {
    model: String,
    looks: Arc<Looks>,
}

impl NewVersion {
    /// `None` if the server was asked already.
    fn ask(model: &str, looks: &Arc<Looks>) -> Option<Self> {
        let asked = looks.asked.swap(true, Ordering::AcqRel);
        (!asked).then(|| Self { model: model.to_owned(), looks: looks.clone() })
    }

    pub(crate) fn begin(self) -> Looking {
        self.looks.begun.store(true, Ordering::Release);
        Looking { model: self.model.clone(), looks: self.looks.clone() }
    }
}

impl Drop for NewVersion {
    fn drop(&mut self) {
        self.looks.asked.store(false, Ordering::Release);
    }
}

/// A look that has begun. It has ended when this is dropped.
pub(crate) struct Looking {
    pub model: String,
    looks: Arc<Looks>,
}

impl Drop for Looking {
    fn drop(&mut self) {
        self.looks.begun.store(false, Ordering::Release);
    }
}

impl RunMetrics {
    /// The metrics of a process without a server.
    pub(crate) fn alone(training: Arc<Training>) -> Self {
        Self { training, server: None }
    }

    /// Those of a process whose server is woken by each version.
    pub(crate) fn beside_server(training: Arc<Training>, wake: Wake) -> Self {
        Self { training, server: Some(ToServer { wake, looks: Arc::default() }) }
    }

    pub(crate) fn has_server(&self) -> bool {
        self.server.is_some()
    }

    /// Whether the server looks at the last version, or takes it over.
    pub(crate) fn server_looks(&self) -> bool {
        let looks = |of: &Looks| of.asked.load(Ordering::Acquire) || of.begun.load(Ordering::Acquire);
        self.server.as_ref().is_some_and(|server| looks(&server.looks))
    }

    /// A step was taken.
    pub(crate) fn stepped(&self, samples: usize) {
        self.training.series.steps.increment(1);
        self.training.series.samples.increment(samples as u64);
    }

    /// The last samples were measured.
    pub(crate) fn measured(&self, progressive: &ProgressiveQuality) {
        let series = &self.training.series;
        series.log_loss.set(progressive.quality.log_loss);
        series.auc.set(progressive.quality.auc.unwrap_or(f64::NAN));
        series.calibration.set(progressive.calibration.unwrap_or(f64::NAN));
    }

    /// A version was published, or not.
    pub(crate) fn published(&self, model: &str, outcome: &Result<Published, String>) {
        let series = &self.training.series;
        let published = match outcome {
            Ok(published) => published,
            Err(reason) => {
                series.not_published.increment(1);
                return self.training.record(EventKind::NotPublished, reason);
            }
        };
        let Published { version, full, rows, took, appeared, .. } = published;
        let rows = if *full { format!("all {rows} rows") } else { format!("{rows} changed rows") };
        let text = format!("version {version}: {rows} in {} ms", took.as_millis());
        self.training.record_since(EventKind::Published, text, *appeared);
        series.published.increment(1);
        series.publish_seconds.record(published.took);
        series.pause_seconds.record(published.pause);
        series.publish_bytes.increment(published.bytes);
        series.publish_rows.increment(published.rows);
        let Some(ToServer { wake, looks }) = &self.server else { return };
        if let Some(look) = NewVersion::ask(model, looks) {
            // Without room, the next version asks again, and a look at all models may find this one.
            let _ = wake.send(WatchCommand::Look(look));
        }
    }
}

/// A run that has begun.
pub(crate) struct Run<'a> {
    pub epochs: Epochs<'a>,
    pub model: Trained,
    pub versions: WrittenVersions<'a>,
}

/// Removes the samples of a log that the version was trained on. A process that was killed after its version
/// had appeared has not removed them, and a log that is full takes no others.
fn remove_trained_samples(args: &Args, version: &Opened) {
    let (Some(consume), Some(cursor)) = (args.consumer(), &version.cursor) else { return };
    // The version must outlive a power failure before its samples go.
    match SystemDisk.sync_dir(&args.models.join(&args.name)) {
        Ok(()) => consume(cursor),
        Err(reason) => tracing::warn!(%reason, "samples that were trained on are not removed"),
    }
}

impl<'a> Run<'a> {
    /// Initialises the model or opens its version. `None` if the run is complete, which is logged.
    ///
    /// # Errors
    /// When the version is of another run, or memory or disk do not suffice.
    pub(crate) fn begin(
        args: &'a Args,
        feed: &'a Feed,
        start: Start,
        context: RunContext<'_>,
    ) -> anyhow::Result<Option<Self>> {
        let RunContext { config, device, metrics, lock } = context;
        let mut epochs = Epochs::new(args, feed)?.measured_by(metrics.as_ref());
        let from = match start {
            Start::Fresh => None,
            Start::From(opened) => Some(opened),
            Start::Resumed(opened, cursor) => {
                let version = opened.store.version();
                epochs = epochs.at(&cursor, version)?;
                if epochs.position.file.is_some() {
                    remove_trained_samples(args, &opened);
                }
                if epochs.is_complete() {
                    let dir = args.shown_dir(version);
                    let other = "new data needs files of other names";
                    epochs.progress.print(&format!("the run is complete: {dir}; {other}"));
                    return Ok(None);
                }
                let (model, epoch, samples) = (&args.name, cursor.epoch, cursor.samples);
                tracing::info!(model, version = version.0, epoch, samples, "the run continues");
                Some(opened)
            }
        };
        let base = from.as_ref().map(|opened| base_of(args, opened)).transpose()?.flatten();
        // Before the rows are read, which may take long.
        let highest = args.highest_version().max(base.map(|base| base.version));
        let model = Trained::begin(args, feed, from.map(|opened| *opened), device)?;
        epochs.steps_before = model.state().steps;
        let context = PublishContext { from: base, highest, metrics: metrics.as_ref(), lock };
        let mut versions = WrittenVersions::new(args, config, &model, context)?;
        if let FeedFiles::Learned(learned) = &feed.files {
            versions = versions.relieving(learned.shortage.clone());
        }
        if let Some(best) = epochs.best_version()
            && let Err(error) = versions.keep(best)
        {
            let reason = error_line(error.as_ref());
            tracing::warn!("version {best} of the best epoch so far cannot be kept: {reason}");
            epochs.best_is_in(None);
        }
        Ok(Some(Self { epochs, model, versions }))
    }

    /// Trains to the end of the data, or to an interrupt.
    ///
    /// # Errors
    /// Errors of training and validation.
    pub(crate) fn train(&mut self) -> anyhow::Result<()> {
        let trained = self.epochs.train(&mut self.model, &mut self.versions);
        if trained.is_err() {
            // The version in flight is reported too.
            self.versions.end();
            self.epochs.progress.finish();
        }
        trained
    }

    /// Writes a version of the present state. If the last version has this state, nothing is written.
    ///
    /// # Errors
    /// When the version cannot be written.
    pub(crate) fn write(&mut self) -> anyhow::Result<Version> {
        let notes = self.epochs.cut_notes(self.model.state());
        self.versions.write(&mut self.model, &notes)
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;

    #[test]
    fn the_server_is_asked_again_only_when_it_has_begun_to_look() {
        let looks = Arc::default();
        let ask = || NewVersion::ask("ads", &looks);
        let first = ask().unwrap();
        assert!(ask().is_none());
        let looking = first.begin();
        let second = ask().unwrap();
        assert!(ask().is_none());
        drop(looking);
        assert!(looks.asked.load(Ordering::Acquire) && !looks.begun.load(Ordering::Acquire));
        // The channel had no room.
        drop(second);
        assert!(ask().is_some());
    }
}
