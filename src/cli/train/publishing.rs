//! The versions that `train` writes: at intervals, of the best epoch, and at the end.

use std::sync::Arc;

use super::Args;
use super::data::Consumer;
use super::lock::ModelLock;
use super::publish_flags::Interval;
use super::run::RunMetrics;
use super::trained::Trained;
use crate::config::{Config, VersionsConfig};
use crate::dataset::Shortage;
use crate::store::disk::SystemDisk;
use crate::store::{self, Base, EmbeddingStore, Opened, Purpose, retention};
use crate::trainer::publish::{CutNotes, PublishOptions, Published, Publisher, RunControl};
use crate::trainer::{Data, TrainError, is_exact};
use crate::types::Version;

/// Writes the versions of a run.
pub(crate) struct WrittenVersions<'a> {
    args: &'a Args,
    /// Removes the samples that a published version was trained on from the log of learned samples.
    consume: Option<Consumer>,
    /// Without one, a version is written only when it is asked for.
    publisher: Option<Publisher>,
    /// The version of the best epoch: while it is open, retention does not remove it.
    best: Option<EmbeddingStore>,
    /// Without a publisher, the versions of best epochs that were written here and not removed.
    bests: Vec<Base>,
    /// Without a publisher, the highest version that is known: one from before the run, or of the run.
    highest: Option<Version>,
}

/// What a run publishes with, besides its model.
pub(crate) struct PublishContext<'m> {
    /// The version that training continues from.
    pub from: Option<Base>,
    /// The highest version when the run began.
    pub highest: Option<Version>,
    /// The metrics of the run; `None` if the process has none.
    pub metrics: Option<&'m RunMetrics>,
    /// Renewed if the model's directory has to be made again.
    pub lock: ModelLock,
}

impl<'a> WrittenVersions<'a> {
    /// The versions of a run that begins.
    ///
    /// # Errors
    /// When the thread that writes cannot start, or memory does not suffice.
    pub(crate) fn new(
        args: &'a Args,
        config: &Config,
        model: &Trained,
        PublishContext { from, highest, metrics, lock }: PublishContext<'_>,
    ) -> anyhow::Result<Self> {
        let consume = args.consumer();
        let Some(Interval(every)) = args.run.publish.publish_every else {
            return Ok(Self { args, consume, publisher: None, best: None, bests: Vec::new(), highest });
        };
        let VersionsConfig { keep, compact_at } = config.versions;
        let options = PublishOptions {
            models: args.models.clone(),
            name: args.name.clone(),
            disk: Arc::new(SystemDisk),
            every,
            keep,
            compact_at,
        };
        let (beside_server, metrics) = (metrics.cloned().filter(RunMetrics::has_server), metrics.cloned());
        let (models, name, consumer) = (args.models.clone(), args.name.clone(), consume.clone());
        let on_publish = move |outcome: Result<Published, String>| {
            if outcome.is_ok() {
                lock.renew(&models, &name);
            }
            if let (Some(consume), Ok(Published { cursor: Some(cursor), .. })) = (&consumer, &outcome) {
                consume(cursor);
            }
            if let Some(metrics) = &metrics {
                metrics.published(&name, &outcome);
            }
            report(&name, outcome);
        };
        let mut publisher = Publisher::new(options, model.state(), from, Box::new(on_publish))?;
        if let Some(metrics) = beside_server {
            publisher = publisher.resting_while(Box::new(move || metrics.server_looks()));
        }
        Ok(Self { args, consume, publisher: Some(publisher), best: None, bests: Vec::new(), highest })
    }

    /// Publishes what was trained as soon as a log of samples is full.
    #[must_use]
    pub(crate) fn relieving(self, shortage: Shortage) -> Self {
        Self { publisher: self.publisher.map(|publisher| publisher.relieving(shortage)), ..self }
    }

    /// Trains on the data once. Returns the number of samples.
    ///
    /// # Errors
    /// [`TrainError`].
    pub(crate) fn train(
        &mut self,
        model: &mut Trained,
        data: Data<'_>,
        control: RunControl<'_>,
    ) -> Result<u64, TrainError> {
        match (&mut self.publisher, model) {
            (None, model) => model.epoch(data, |progress| control.observer.step(progress)),
            (Some(publisher), Trained::InMemory(reference)) => {
                publisher.train_in_memory(reference, data, control)
            }
            (Some(publisher), Trained::OnDisk { state, pipeline }) => {
                publisher.train_on_disk(state, pipeline, data, control)
            }
        }
    }

    /// Writes a version of the model as it is now.
    ///
    /// # Errors
    /// When the version cannot be written.
    pub(crate) fn write(&mut self, model: &mut Trained, notes: &CutNotes) -> anyhow::Result<Version> {
        Ok(self.write_base(model, notes)?.version)
    }

    fn write_base(&mut self, model: &mut Trained, notes: &CutNotes) -> anyhow::Result<Base> {
        match (&mut self.publisher, &mut *model) {
            (None, model) => {
                let base = self.save(model, notes)?;
                if let (Some(consume), Some(cursor)) = (&self.consume, &notes.cursor) {
                    consume(cursor);
                }
                Ok(base)
            }
            (Some(publisher), Trained::InMemory(reference)) => {
                Ok(publisher.finish(&reference.state, &reference.tables, notes)?)
            }
            (Some(publisher), Trained::OnDisk { state, pipeline }) => {
                Ok(publisher.finish_on_disk(state, pipeline, notes)?)
            }
        }
    }

    /// Writes a full version without a publisher. Its number is above all that the run knows, also if the
    /// directory of the model has been removed: a server may still have a version of the number.
    fn save(&mut self, model: &mut Trained, notes: &CutNotes) -> Result<Base, TrainError> {
        let Args { models, name, .. } = self.args;
        let others = self.args.highest_version().filter(|&version| Some(version) > self.highest);
        let base = model.save(models, name, notes, self.highest)?;
        if let Some(other) = others {
            tracing::warn!(
                model = name,
                version = base.version.0,
                "another run has written version {other} meanwhile: this version does not build on it"
            );
        }
        self.highest = Some(base.version);
        Ok(base)
    }

    /// [`Self::write`] for the best epoch, whose version is kept on disk. Those of earlier best epochs are
    /// removed, unless something uses them.
    ///
    /// # Errors
    /// When the version cannot be written.
    pub(crate) fn write_best(&mut self, model: &mut Trained, notes: &CutNotes) -> anyhow::Result<Version> {
        let base = self.write_base(model, notes)?;
        if self.publisher.is_none() {
            self.remove_earlier_bests();
            self.bests.push(base);
        } else {
            self.keep(base.version)?;
        }
        Ok(base.version)
    }

    fn remove_earlier_bests(&mut self) {
        let Args { models, name, .. } = self.args;
        match retention::remove_unused(models, name, &self.bests) {
            Ok(removed) => self.bests.retain(|base| !removed.contains(base)),
            Err(error) => {
                tracing::warn!(model = name, %error, "versions of earlier best epochs are not removed");
            }
        }
    }

    /// Ends publishing, and makes a version the latest one: if others followed it, writes a full version with
    /// its contents. Returns the number of the latest version.
    ///
    /// # Errors
    /// When the version cannot be read or written.
    pub(crate) fn make_latest(&mut self, version: Version) -> anyhow::Result<Version> {
        let mut publisher = self.publisher.take();
        publisher.iter_mut().for_each(Publisher::end);
        let Args { models, name, .. } = self.args;
        let latest = match store::versions(models, name)?.pop() {
            Some(highest) if highest != version => {
                retention::compact(models, name, version, highest)?.version
            }
            _ => version,
        };
        self.best = None;
        publisher.iter().for_each(Publisher::retain);
        Ok(latest)
    }

    /// Ends publishing. The version in flight is waited for, and reported as all are.
    pub(crate) fn end(&mut self) {
        if let Some(mut publisher) = self.publisher.take() {
            publisher.end();
        }
    }

    /// Keeps the version of the best epoch on disk: retention removes none that is open.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub(crate) fn keep(&mut self, version: Version) -> anyhow::Result<()> {
        let opened = store::open(&self.args.models, &self.args.name, version, Purpose::Serve)?;
        self.best = Some(opened.store);
        Ok(())
    }
}

/// Logs a published version.
fn report(model: &str, outcome: Result<Published, String>) {
    match outcome {
        Ok(Published { version, full, rows, bytes, took, pause, steps, .. }) => {
            let kind = if full { "full" } else { "delta" };
            let version = version.0;
            let (took_ms, pause_ms) = (took.as_millis() as u64, pause.as_micros() as f64 / 1e3);
            tracing::info!(model, version, kind, steps, rows, bytes, took_ms, pause_ms, "published");
        }
        Err(reason) => tracing::warn!(model, "not published: {reason}; the next version has its rows"),
    }
}

/// What deltas of this version name as their base: the version itself, if training continues from it to the
/// bit, and no version has had a higher number.
pub(crate) fn base_of(args: &Args, opened: &Opened) -> anyhow::Result<Option<Base>> {
    let exact = is_exact(opened, args.run.training.optimizer()?);
    let highest = store::highest(&args.models, &args.name)?;
    Ok(opened.store.base().filter(|base| exact && highest == Some(base.version)))
}
