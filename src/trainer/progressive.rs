//! Progressive validation: every batch is scored before it is trained on, so the scores of the last samples
//! measure the model on data that it has not seen (Blum, Kalai and Langford, COLT 1999). A window of the last
//! samples is kept.

use super::Progress;
use super::eval::Quality;
use crate::model::loss::sigmoid;

/// The logits and labels of the last samples, taken before the model was trained on them.
#[derive(Clone, Debug)]
pub(crate) struct Progressive {
    /// The most samples that are kept.
    window: usize,
    logits: Vec<f32>,
    labels: Vec<f32>,
    /// Where the next sample is kept once the window is full.
    next: usize,
}

/// The quality of the scores of the last samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ProgressiveQuality {
    pub quality: Quality,
    /// The sum of all probabilities divided by the number of clicks; `None` without clicks.
    pub calibration: Option<f64>,
}

impl Progressive {
    /// Keeps the last `window` samples, at least one.
    #[must_use]
    pub(crate) fn new(window: usize) -> Self {
        Self { window: window.max(1), logits: Vec::new(), labels: Vec::new(), next: 0 }
    }

    /// Adds the samples of a step.
    pub(crate) fn add(&mut self, progress: &Progress<'_>) {
        self.push(progress.logits, progress.labels);
    }

    /// Adds samples. The slices have the same length.
    pub(crate) fn push(&mut self, logits: &[f32], labels: &[f32]) {
        for (&logit, &label) in logits.iter().zip(labels) {
            if self.labels.len() < self.window {
                self.logits.push(logit);
                self.labels.push(label);
            } else {
                self.logits[self.next] = logit;
                self.labels[self.next] = label;
                self.next = (self.next + 1) % self.window;
            }
        }
    }

    /// The quality of all samples that are kept; `None` if there are none.
    #[must_use]
    pub(crate) fn quality(&self) -> Option<ProgressiveQuality> {
        self.last(self.labels.len())
    }

    /// The quality of the last `samples` samples, or of all that are kept if there are fewer; `None` for no
    /// samples.
    #[must_use]
    pub(crate) fn last(&self, samples: usize) -> Option<ProgressiveQuality> {
        let kept = self.labels.len();
        let first = self.next + kept - samples.min(kept);
        let of =
            |values: &[f32]| -> Vec<f32> { (first..self.next + kept).map(|at| values[at % kept]).collect() };
        if kept == 0 || samples == 0 {
            return None;
        }
        let (logits, labels) = (of(&self.logits), of(&self.labels));
        let clicks: f64 = labels.iter().copied().map(f64::from).sum();
        let expected = || logits.iter().map(|&logit| f64::from(sigmoid(logit))).sum::<f64>();
        Some(ProgressiveQuality {
            quality: Quality::of_logits(&logits, &labels),
            calibration: (clicks > 0.0).then(|| expected() / clicks),
        })
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
