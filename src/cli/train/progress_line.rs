//! The progress line of `train`: epoch, share done, time left, speed, and the quality of the last samples.
//! On a terminal it is one line that changes. Otherwise it is a line from time to time.

use std::fmt::Write as _;
use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::cli::{note, or_dash};
use crate::trainer::Progress;
use crate::trainer::progressive::{Progressive, ProgressiveQuality};

/// How often the line on a terminal changes.
const REFRESH: Duration = Duration::from_millis(500);
/// How often a line is written elsewhere.
const LINE: Duration = Duration::from_secs(10);

/// Measuring the last samples sorts them. For a large window that is done less often: the time until the next
/// measurement is at least this many times what the last one took.
const MEASURE_SHARE: u32 = 100;

/// How long to wait after a measurement that took this long. `least` is the usual interval.
pub(crate) fn until_next_measure(least: Duration, took: Duration) -> Duration {
    least.max(took.saturating_mul(MEASURE_SHARE))
}

/// The samples and the time of training, and the line that shows them.
pub(crate) struct ProgressLine {
    bar: Option<ProgressBar>,
    /// The model, if lines go to the log, without progress.
    in_log: Option<String>,
    epochs: u32,
    epoch: u32,
    /// The share of all work at the first step of this run, which is above 0 if the run continues another.
    first_share: Option<f64>,
    /// Samples that were trained in this run.
    samples: u64,
    /// Samples of this epoch before the present call of the trainer.
    before: u64,
    /// The time of all earlier epochs.
    trained: Duration,
    epoch_began: Instant,
    /// When the line is shown again.
    show_at: Instant,
    pub progressive: Progressive,
}

/// What is done of the work.
struct Done {
    /// Of all epochs, if the length of the data is known.
    share: Option<f64>,
    /// The share at the first step of this run.
    first_share: f64,
    /// Samples of this epoch, and those that this run trained, in these seconds.
    of_epoch: u64,
    of_run: u64,
    seconds: f64,
}

impl ProgressLine {
    pub(crate) fn new(epochs: u32, window: usize) -> Self {
        let bar = stderr().is_terminal().then(ProgressBar::new_spinner);
        if let (Some(bar), Ok(style)) = (&bar, ProgressStyle::with_template("{spinner} {elapsed} {msg}")) {
            bar.set_style(style);
        }
        let now = Instant::now();
        let refresh = if bar.is_some() { REFRESH } else { LINE };
        let progressive = Progressive::new(window);
        Self {
            bar,
            in_log: None,
            epochs,
            epoch: 1,
            first_share: None,
            samples: 0,
            before: 0,
            trained: Duration::ZERO,
            epoch_began: now,
            show_at: now + refresh,
            progressive,
        }
    }

    /// Without progress, and with all other lines in the log.
    #[must_use]
    pub(crate) fn into_log(self, model: &str) -> Self {
        self.finish();
        Self { bar: None, in_log: Some(model.to_owned()), ..self }
    }

    /// Begins an epoch. Earlier runs trained on its first `samples` samples.
    pub(crate) fn begin(&mut self, epoch: u32, samples: u64) {
        (self.epoch, self.before) = (epoch, samples);
        self.epoch_began = Instant::now();
    }

    /// Ends an epoch, or the part of it that was trained, with this number of samples.
    pub(crate) fn end(&mut self, samples: u64) {
        self.samples += samples;
        self.trained += self.epoch_began.elapsed();
    }

    /// Samples that were trained in this run.
    pub(crate) fn samples(&self) -> u64 {
        self.samples
    }

    /// Seconds of training, without validation.
    pub(crate) fn seconds(&self) -> f64 {
        self.trained.as_secs_f64()
    }

    /// Adds a step, and shows the line if it is time.
    pub(crate) fn step(&mut self, progress: &Progress<'_>) {
        self.progressive.add(progress);
        let (done, begun) = (self.done(progress), Instant::now());
        if self.in_log.is_some() || begun < self.show_at {
            return;
        }
        let mut line = self.line(&done);
        // Writing to a string cannot fail.
        if let Some(quality) = self.progressive.quality() {
            let _ = write!(line, ", {}", shown(&quality));
        }
        match &self.bar {
            Some(bar) => {
                bar.set_message(line);
                bar.tick();
            }
            None => note(&line),
        }
        let refresh = if self.bar.is_some() { REFRESH } else { LINE };
        self.show_at = Instant::now() + until_next_measure(refresh, begun.elapsed());
    }

    /// What is done after a step.
    fn done(&mut self, progress: &Progress<'_>) -> Done {
        let share =
            progress.position.share.map(|share| (f64::from(self.epoch - 1) + share) / f64::from(self.epochs));
        Done {
            share,
            first_share: *self.first_share.get_or_insert(share.unwrap_or(0.0)),
            of_epoch: self.before + progress.samples,
            of_run: self.samples + progress.samples,
            seconds: (self.trained + self.epoch_began.elapsed()).as_secs_f64(),
        }
    }

    /// Epoch, share done, time left and speed.
    fn line(&self, done: &Done) -> String {
        let &Done { share, first_share, of_epoch, of_run, seconds } = done;
        let mut line = format!("epoch {} of {}, ", self.epoch, self.epochs);
        // Writing to a string cannot fail.
        if let Some(share) = share {
            let _ = write!(line, "{:.0} %, ", 100.0 * share);
            if share > first_share {
                let left = seconds * (1.0 - share).max(0.0) / (share - first_share);
                let _ = write!(line, "{} left, ", time(left));
            }
        }
        let _ = write!(line, "{of_epoch} samples, {:.0} samples/s", of_run as f64 / seconds);
        line
    }

    /// The progressive validation in words; `None` before the first sample.
    pub(crate) fn last_samples(&self) -> Option<String> {
        let last = self.progressive.quality()?;
        Some(format!("last {} samples, before training on them: {}", last.quality.samples, shown(&last)))
    }

    /// Prints a line between those of progress.
    pub(crate) fn print(&self, line: &str) {
        match (&self.bar, &self.in_log) {
            (Some(bar), _) => bar.suspend(|| note(line)),
            (None, Some(model)) => tracing::info!(model, "{line}"),
            (None, None) => note(line),
        }
    }

    /// Removes the progress line.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The quality of scores that were computed before training on their samples.
pub(crate) fn shown(progressive: &ProgressiveQuality) -> String {
    let (auc, calibration) = (or_dash(progressive.quality.auc, 4), or_dash(progressive.calibration, 4));
    format!("AUC {auc}, log loss {:.4}, calibration {calibration}", progressive.quality.log_loss)
}

/// A time in seconds, as hours, minutes and seconds.
fn time(seconds: f64) -> String {
    let seconds = seconds.min(1e9) as u64;
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    if hours > 0 { format!("{hours} h {minutes} min") } else { format!("{minutes} min {} s", seconds % 60) }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;
    use crate::trainer::BatchPosition;
    use crate::trainer::casting::Casting;

    /// The line of a run in the second of two epochs, with these samples of it and of the run.
    fn line(first_share: f64, share: Option<f64>, of_epoch: u64, of_run: u64) -> String {
        let mut progress = ProgressLine::new(2, 10);
        progress.begin(2, of_epoch);
        progress.line(&Done { share, first_share, of_epoch, of_run, seconds: 30.0 })
    }

    #[test]
    fn share_time_left_and_speed_are_those_of_all_epochs() {
        assert_eq!(
            line(0.0, Some(0.75), 500, 1500),
            "epoch 2 of 2, 75 %, 0 min 10 s left, 500 samples, 50 samples/s"
        );
    }

    #[test]
    fn a_run_that_continues_counts_only_its_own_samples_and_share() {
        assert_eq!(
            line(0.5, Some(0.75), 500, 300),
            "epoch 2 of 2, 75 %, 0 min 30 s left, 500 samples, 10 samples/s"
        );
    }

    #[test]
    fn the_second_epoch_counts_the_samples_and_the_time_of_both() {
        let mut line = ProgressLine::new(2, 10).into_log("m");
        let step = |line: &mut ProgressLine, samples: u64, share: f64| {
            let position = BatchPosition { share: Some(share), ..BatchPosition::default() };
            let (labels, casting) = ([0.0; 50], Casting::default());
            let (logits, position, casting) = (&labels, &position, &casting);
            let progress = Progress { samples, position, loss: 0.5, logits, labels: &labels, casting };
            line.step(&progress);
            line.done(&progress)
        };
        // As if each epoch had begun this many seconds ago.
        let begin = |line: &mut ProgressLine, epoch: u32, seconds: u64| {
            line.begin(epoch, 0);
            line.epoch_began -= Duration::from_secs(seconds);
        };
        begin(&mut line, 1, 20);
        let first = step(&mut line, 50, 0.5);
        assert_eq!((first.share, first.of_epoch, first.of_run), (Some(0.25), 50, 50));
        step(&mut line, 100, 1.0);
        line.end(100);
        assert!(line.samples() == 100 && line.seconds() >= 20.0);
        begin(&mut line, 2, 10);
        let second = step(&mut line, 50, 0.5);
        assert!(second.seconds >= 30.0);
        assert_eq!(
            line.line(&Done { seconds: 30.0, ..second }),
            "epoch 2 of 2, 75 %, 0 min 15 s left, 50 samples, 5 samples/s"
        );
        step(&mut line, 100, 1.0);
        line.end(100);
        assert!(line.samples() == 200 && line.seconds() >= 30.0);
    }

    #[test]
    fn a_measurement_that_takes_long_is_not_repeated_soon() {
        let [usual, short, long] = [500, 4, 70].map(Duration::from_millis);
        assert_eq!(until_next_measure(usual, short), usual);
        assert_eq!(until_next_measure(usual, long), long * MEASURE_SHARE);
        assert_eq!(until_next_measure(usual, Duration::MAX), Duration::MAX);
    }

    #[test]
    fn data_of_unknown_length_has_no_share() {
        assert_eq!(line(0.0, None, 500, 1500), "epoch 2 of 2, 500 samples, 50 samples/s");
    }
}
