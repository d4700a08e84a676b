//! The loop over epochs: train, validate, keep the best version (`epochs/validation.rs`), stop early, at a
//! signal or at data that cannot be read. It always knows the cursor of the last step.

mod validation;
mod whole_batches;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use whole_batches::WholeBatches;

use anyhow::anyhow;

use super::Args;
use super::progress_line::{ProgressLine, shown, until_next_measure};
use super::publishing::WrittenVersions;
use super::run::RunMetrics;
use super::trained::Trained;
use crate::cli::InputError;
use crate::dataset::{DataFile, DataPosition, Feed, FeedFiles, FileAt, Reader, in_line};
use crate::store::StoreError;
use crate::trainer::cursor::{Cursor, RunIdentity, Validation};
use crate::trainer::eval::Quality;
use crate::trainer::progressive::Progressive;
use crate::trainer::publish::{CutNotes, RunControl, RunObserver};
use crate::trainer::{Data, Progress, TrainError, TrainState};
use crate::types::Version;

/// A run over the epochs.
pub(crate) struct Epochs<'a> {
    pub args: &'a Args,
    pub feed: &'a Feed,
    run: RunIdentity,
    pub progress: ProgressLine,
    /// After the last step.
    pub position: DataPosition,
    pub validation: Validation,
    /// The validation of each epoch, and its number.
    pub validated: Vec<(u32, Quality)>,
    /// Lines that were skipped in the last epoch.
    pub skipped: u64,
    /// Samples of the last epoch that was trained to its end.
    pub epoch_samples: u64,
    /// The last epoch that was trained to its end.
    pub epochs_trained: u32,
    /// Why data or validation data could not be read, at which training has ended.
    pub failed: Option<anyhow::Error>,
    /// Steps of the model before this run.
    pub steps_before: u64,
    /// The id of the log with the samples, once it is known.
    log: Option<String>,
    /// The present file of a followed directory.
    of_file: Option<OfFile>,
    /// `None` if the process has no metrics.
    metrics: Option<RunMetrics>,
    /// When the metrics next show the quality of the last samples, if no version is cut before.
    measure_at: Instant,
}

/// Metrics show the quality of the last samples at each cut, and otherwise at this interval.
const MEASURE_EVERY: Duration = Duration::from_secs(5);

/// A file that is trained on.
struct OfFile {
    /// Compared by its address, because a new log in the place of a deleted one has files of the same names.
    file: Arc<DataFile>,
    samples: u64,
    progressive: Progressive,
}

impl<'a> Epochs<'a> {
    /// A run from its beginning.
    ///
    /// # Errors
    /// For flags that are out of range.
    pub(crate) fn new(args: &'a Args, feed: &'a Feed) -> anyhow::Result<Self> {
        Ok(Self {
            args,
            feed,
            run: args.cursor_run(feed)?,
            progress: ProgressLine::new(args.epochs, args.run.window),
            position: DataPosition::begin(1),
            validation: Validation::default(),
            validated: Vec::new(),
            skipped: 0,
            epoch_samples: 0,
            epochs_trained: 0,
            failed: None,
            steps_before: 0,
            log: None,
            of_file: None,
            metrics: None,
            measure_at: Instant::now(),
        })
    }

    /// Shows the run in these metrics. Beside a server, they and the log replace the progress line.
    #[must_use]
    pub(crate) fn measured_by(mut self, metrics: Option<&RunMetrics>) -> Self {
        self.metrics = metrics.cloned();
        if metrics.is_some_and(RunMetrics::has_server) {
            self.progress = self.progress.into_log(&self.args.name);
        }
        self
    }

    /// Where the run is, after the last step.
    #[must_use]
    pub(crate) fn cursor(&self, state: &TrainState) -> Cursor {
        let DataPosition { epoch, samples, file } = self.position.clone();
        let (mut run, log) = (self.run.clone(), self.log.clone());
        if !self.args.data.follows() {
            // `serve --train` writes what `train` without validation writes.
            run.validating.get_or_insert_default();
        }
        Cursor { run, epoch, samples, file, log, steps: state.steps, validation: self.validation }
    }

    /// What a version after the last step has besides the model.
    #[must_use]
    pub(crate) fn cut_notes(&self, state: &TrainState) -> CutNotes {
        let last = self.progress.progressive.clone();
        // Within an epoch the weights are not those that were validated after the epoch before.
        let validated = self.validated.last().filter(|_| self.position.samples == 0);
        let (validated, metrics) = (validated.map(|(_, quality)| *quality), self.metrics.clone());
        let quality = Arc::new(move || {
            let mut quality = BTreeMap::new();
            if let Some(progressive) = last.quality() {
                if let Some(metrics) = &metrics {
                    metrics.measured(&progressive);
                }
                quality.insert("progressive_log_loss".to_owned(), progressive.quality.log_loss);
                quality.extend(progressive.quality.auc.map(|auc| ("progressive_auc".to_owned(), auc)));
                let calibration = progressive.calibration;
                quality.extend(calibration.map(|ratio| ("progressive_calibration".to_owned(), ratio)));
            }
            if let Some(validated) = validated {
                quality.insert("valid_log_loss".to_owned(), validated.log_loss);
                quality.extend(validated.auc.map(|auc| ("valid_auc".to_owned(), auc)));
            }
            quality
        });
        // A cursor has only numbers and texts, so it is always encoded.
        CutNotes { cursor: serde_json::to_string_pretty(&self.cursor(state)).ok(), quality }
    }

    /// Continues at the cursor of a version.
    ///
    /// # Errors
    /// When the cursor is of another run, or the log of its samples cannot be read.
    pub(crate) fn at(mut self, cursor: &Cursor, version: Version) -> anyhow::Result<Self> {
        cursor.run.check(&self.run)?;
        // `serve --train` goes on with a run that had flags of validation.
        if self.run.validating.is_none() {
            self.run.validating.clone_from(&cursor.run.validating);
        }
        (self.position, self.validation) = (cursor.position(), cursor.validation_of(version));
        // Standard input of `train --resume` has the samples of before again. What a server reads from a pipe
        // after a restart is new.
        if !self.args.alone && self.args.reads_pipe() {
            tracing::info!(model = self.args.name, "training begins at the first sample of the pipe");
            self.position = DataPosition::begin(1);
        }
        let (epoch, epochs) = (self.position.epoch, self.args.epochs);
        if epoch > epochs && self.position.samples > 0 {
            let within = format!("because version {version} is within that epoch");
            let error = anyhow!("--epochs: expected at least {epoch}, {within}, got {epochs}");
            return Err(InputError(error).into());
        }
        if let (FeedFiles::Learned(learned), Some(file)) = (&self.feed.files, &cursor.file) {
            match learned.lacks(file, cursor.log.as_deref())? {
                None => self.log.clone_from(&cursor.log),
                // To go on there would skip samples that no version was trained on.
                Some(reason) => {
                    let (model, version) = (&self.args.name, version.0);
                    let begin = "training begins at the first sample of the log";
                    tracing::warn!(model, version, "{reason}: {begin}");
                    self.position = DataPosition::begin(1);
                }
            }
        }
        Ok(self)
    }

    /// Trains the epochs from the present position on. Returns early, after a whole batch, at an interrupt
    /// and when data cannot be read ([`Self::failed`]). The present state may be written after both.
    ///
    /// # Errors
    /// Other errors of training and validation.
    pub(crate) fn train(
        &mut self,
        model: &mut Trained,
        versions: &mut WrittenVersions<'_>,
    ) -> anyhow::Result<()> {
        while !self.is_complete() {
            self.epoch(model, versions)?;
            if self.has_ended_early() {
                break;
            }
            self.epoch_samples = self.position.samples;
            let epoch = self.position.epoch;
            self.epochs_trained = epoch;
            if self.args.data.follows() {
                break;
            }
            let trained = self.position.samples > 0;
            // A version that is written now must not train this epoch again.
            self.position = DataPosition::begin(epoch + 1);
            if trained {
                self.validate(epoch, model, versions)?;
            }
            // A signal may have ended the validation.
            if self.has_ended_early() {
                break;
            }
        }
        self.end_file(None);
        self.progress.finish();
        // Without a server, the report has it.
        if self.metrics.as_ref().is_some_and(RunMetrics::has_server)
            && let Some(last) = self.progress.last_samples()
        {
            self.progress.print(&last);
        }
        Ok(())
    }

    /// Whether a signal, or data that cannot be read, has ended training.
    fn has_ended_early(&self) -> bool {
        self.feed.stop.interrupted() || self.failed.is_some()
    }

    /// Whether all epochs were trained, or training has stopped early.
    #[must_use]
    pub(crate) fn is_complete(&self) -> bool {
        let bad = self.validation.bad_epochs;
        self.position.epoch > self.args.epochs || self.args.early_stop.is_some_and(|limit| bad >= limit)
    }

    /// Trains to the end of the epoch, to an interrupt, or to data that cannot be read.
    fn epoch(&mut self, model: &mut Trained, versions: &mut WrittenVersions<'_>) -> anyhow::Result<()> {
        let mut reader = match self.feed.open(&self.position) {
            Ok(reader) => WholeBatches::new(reader),
            Err(error) => {
                self.failed = Some(error.into());
                return Ok(());
            }
        };
        let before = self.position.samples;
        self.progress.begin(self.position.epoch, before);
        let data =
            Data { reader: &mut reader, batch: self.args.run.training.batch as usize, steps: u64::MAX };
        let stop = self.feed.stop.clone();
        let control = RunControl { observer: &mut AfterSamples { epochs: self, before }, stop: &stop };
        let samples = versions.train(model, data, control)?;
        self.progress.end(samples);
        self.skipped = reader.skipped();
        self.failed = reader.failed.map(anyhow::Error::from);
        Ok(())
    }

    fn step(&mut self, before: u64, progress: &Progress<'_>) {
        self.progress.step(progress);
        if let Some(metrics) = &self.metrics {
            metrics.stepped(progress.labels.len());
        }
        self.measure();
        self.position.samples = before + progress.samples;
        if !self.args.data.follows() {
            return;
        }
        let mut from = 0;
        for run in &progress.position.runs {
            if self.of_file.as_ref().is_none_or(|now| !Arc::ptr_eq(&now.file, &run.file)) {
                self.end_file(Some(&run.file));
                self.log.clone_from(&run.file.log);
            }
            if let Some(now) = &mut self.of_file {
                let of = from..from + run.samples;
                now.progressive.push(&progress.logits[of.clone()], &progress.labels[of]);
                now.samples = run.of_file;
            }
            from += run.samples;
            let (name, samples, complete) = (run.file.name.clone(), run.of_file, run.ends_file);
            self.position.file = Some(FileAt { name, samples, complete });
        }
    }

    /// Shows the quality of the last samples in the metrics, if it is time.
    fn measure(&mut self) {
        let (Some(metrics), begun) = (&self.metrics, Instant::now()) else { return };
        if begun < self.measure_at {
            return;
        }
        if let Some(quality) = self.progress.progressive.quality() {
            metrics.measured(&quality);
        }
        self.measure_at = Instant::now() + until_next_measure(MEASURE_EVERY, begun.elapsed());
    }

    /// Prints the quality of the file that was trained, and begins the next.
    fn end_file(&mut self, next: Option<&Arc<DataFile>>) {
        let progressive = Progressive::new(self.args.run.window);
        let next = next.map(|file| OfFile { file: file.clone(), samples: 0, progressive });
        let ended = std::mem::replace(&mut self.of_file, next);
        let Some(OfFile { file, samples, progressive }) = ended else { return };
        if let Some(quality) = progressive.quality() {
            // Fewer than the file has if the window is smaller, or if the run continued within the file.
            let measured = quality.quality.samples;
            let of = if measured < samples { format!("the last {measured} ") } else { String::new() };
            let (name, quality) = (in_line(&file.name), shown(&quality));
            let text = format!("{name}: {samples} samples, {of}before training on them: {quality}");
            self.progress.print(&text);
        }
    }
}

/// Whether training can go on after this error of a version.
pub(crate) fn is_of_version(error: &anyhow::Error) -> bool {
    match error.downcast_ref::<TrainError>() {
        Some(error) => error.is_of_version() || matches!(error, TrainError::StillWriting { .. }),
        None => error.is::<StoreError>(),
    }
}

/// Observes the steps of an epoch after its first `before` samples.
struct AfterSamples<'e, 'a> {
    epochs: &'e mut Epochs<'a>,
    before: u64,
}

impl RunObserver for AfterSamples<'_, '_> {
    fn step(&mut self, progress: &Progress<'_>) {
        self.epochs.step(self.before, progress);
    }

    fn notes(&mut self, state: &TrainState) -> Result<CutNotes, String> {
        let Epochs { args, progress, metrics, .. } = &*self.epochs;
        if let Err(reason) = args.run.publish.check(&progress.progressive) {
            // Metrics show also the quality of what is refused. That of a version is measured when it is
            // written.
            if let Some(metrics) = metrics
                && let Some(quality) = progress.progressive.quality()
            {
                metrics.measured(&quality);
            }
            return Err(reason);
        }
        Ok(self.epochs.cut_notes(state))
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
