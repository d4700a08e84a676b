//! The loop over epochs: train, validate, keep the best version, stop early or at a signal. It always knows
//! the cursor of the last step.

use super::meter::{Meter, shown};
use super::trained::Trained;
use super::{Args, evaluate};
use crate::dataset::{Feed, FileAt, Place};
use crate::trainer::cursor::{Cursor, OtherRun, Run, Validation};
use crate::trainer::eval::Quality;
use crate::trainer::progressive::Progressive;
use crate::trainer::{Data, Progress};
use crate::types::Version;

/// A run over the epochs.
pub(crate) struct Epochs<'a> {
    pub args: &'a Args,
    pub feed: &'a Feed,
    run: Run,
    pub meter: Meter,
    /// After the last step.
    pub place: Place,
    pub validation: Validation,
    /// The validation of each epoch, and its number.
    pub validated: Vec<(u32, Quality)>,
    /// Lines that were skipped in the last epoch.
    pub skipped: u64,
    /// Samples of the last epoch that was trained to its end.
    pub epoch_samples: u64,
    /// The samples of the present file of a followed directory.
    of_file: Option<(FileAt, Progressive)>,
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
            meter: Meter::new(args.epochs, args.window),
            place: Place::begin(1),
            validation: Validation::default(),
            validated: Vec::new(),
            skipped: 0,
            epoch_samples: 0,
            of_file: None,
        })
    }

    /// Where the run is: after the last step of `model`.
    #[must_use]
    pub(crate) fn cursor(&self, model: &Trained) -> Cursor {
        let Place { epoch, samples, file } = self.place.clone();
        let (run, steps, validation) = (self.run.clone(), model.state().steps, self.validation);
        Cursor { run, epoch, samples, file, steps, validation }
    }

    /// Continues at a cursor, whose version `model` was opened from.
    ///
    /// # Errors
    /// When the cursor is of another run.
    #[cfg_attr(not(test), allow(dead_code))] // for a run that continues
    pub(crate) fn at(mut self, cursor: &Cursor) -> Result<Self, OtherRun> {
        cursor.run.check(&self.run)?;
        (self.place, self.validation) = (cursor.place(), cursor.validation);
        Ok(self)
    }

    /// Trains the epochs from the present place on. Returns early at an interrupt, at a batch boundary.
    ///
    /// # Errors
    /// Errors of training and validation.
    pub(crate) fn train(&mut self, model: &mut Trained) -> anyhow::Result<()> {
        loop {
            self.epoch(model)?;
            if self.feed.stop.interrupted() {
                break;
            }
            self.epoch_samples = self.place.samples;
            if self.place.samples > 0 && !self.validate(model)? {
                break;
            }
            if self.place.epoch >= self.args.epochs {
                break;
            }
            self.place = Place::begin(self.place.epoch + 1);
        }
        self.end_file(None);
        self.meter.finish();
        Ok(())
    }

    /// Trains to the end of the epoch, or to an interrupt.
    fn epoch(&mut self, model: &mut Trained) -> anyhow::Result<()> {
        let mut reader = self.feed.open(&self.place)?;
        let before = self.place.samples;
        self.meter.begin(self.place.epoch, before);
        let data = Data { reader: &mut *reader, batch: self.args.training.batch as usize, steps: u64::MAX };
        let samples = model.epoch(data, |progress| self.step(before, progress))?;
        self.meter.end(samples);
        self.skipped = reader.skipped();
        Ok(())
    }

    fn step(&mut self, before: u64, progress: &Progress<'_>) {
        self.meter.step(progress);
        self.place.samples = before + progress.samples;
        if self.args.data.follow.is_none() {
            return;
        }
        let mut from = 0;
        for run in &progress.place.runs {
            let file = FileAt { name: run.file.to_string(), samples: run.of_file };
            if self.of_file.as_ref().is_none_or(|(now, _)| now.name != file.name) {
                self.end_file(Some(file.clone()));
            }
            if let Some((now, progressive)) = &mut self.of_file {
                let of = from..from + run.samples;
                progressive.push(&progress.probabilities[of.clone()], &progress.labels[of]);
                now.samples = run.of_file;
            }
            from += run.samples;
            self.place.file = Some(file);
        }
    }

    /// Prints the quality of the file that was trained, and begins the next.
    fn end_file(&mut self, next: Option<FileAt>) {
        let next = next.map(|file| (file, Progressive::new(self.args.window)));
        let Some((file, progressive)) = std::mem::replace(&mut self.of_file, next) else { return };
        if let Some(quality) = progressive.quality() {
            let FileAt { name, samples } = file;
            self.meter
                .print(&format!("{name}: {samples} samples, before training on them: {}", shown(&quality)));
        }
    }

    /// Validates after an epoch. Returns whether to train another one.
    fn validate(&mut self, model: &mut Trained) -> anyhow::Result<bool> {
        let Args { epochs, early_stop, save_best, .. } = *self.args;
        // The evaluation of the written version follows a single epoch at once.
        if epochs == 1 && early_stop.is_none() && !save_best {
            return Ok(true);
        }
        let quality = evaluate::trained(self.args, self.feed, model)?;
        let Some(quality) = quality.filter(|_| !self.feed.stop.interrupted()) else { return Ok(true) };
        let epoch = self.place.epoch;
        let better = self.validation.add(epoch, quality.log_loss);
        let auc = quality.auc.map_or("-".to_owned(), |auc| format!("{auc:.4}"));
        let best = if better { " (best so far)" } else { "" };
        let (rows, log_loss) = (quality.rows, quality.log_loss);
        self.meter.print(&format!(
            "epoch {epoch} of {epochs}: validation: {rows} rows, AUC {auc}, log loss {log_loss:.4}{best}"
        ));
        self.validated.push((epoch, quality));
        if let Some(best) = self.validation.best.as_mut().filter(|_| better && save_best) {
            best.version = Some(model.save(&self.args.models, &self.args.name)?.0);
        }
        let bad = u64::from(self.validation.bad_epochs);
        if early_stop.is_some_and(|limit| bad >= u64::from(limit)) {
            self.meter.print(&format!("early stop: {bad} epoch(s) without a smaller log loss"));
            return Ok(false);
        }
        Ok(true)
    }

    /// The version of the best epoch, if it was written.
    #[must_use]
    pub(crate) fn best_version(&self) -> Option<Version> {
        self.validation.best.and_then(|best| best.version).map(Version)
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
