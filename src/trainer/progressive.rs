//! Progressive validation: every batch is scored before it is trained on, so the scores of the last samples
//! measure the model on data that it has not seen (Blum, Kalai and Langford, COLT 1999). A window of the last
//! samples is kept, in pieces that its copies share. So a copy is made fast, while training waits.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Progress;
use super::eval::{Quality, SCORES_OF_TURN};
use crate::model::loss::sigmoid;
use crate::pace::give_way_every;

/// The logits and labels of the last samples, taken before the model was trained on them.
#[derive(Clone, Debug)]
pub(crate) struct Progressive {
    /// The most samples that are measured.
    window: usize,
    /// Full except the last one. The first one may begin with samples that are no longer in the window.
    pieces: VecDeque<Arc<Vec<Scored>>>,
    /// Samples of all pieces.
    kept: usize,
}

/// The logit and the label of a sample.
#[derive(Clone, Copy, Debug)]
struct Scored {
    logit: f32,
    label: f32,
}

/// The most samples of a piece.
const PIECE: usize = 4096;
/// A window has at least this many pieces.
const PIECES: usize = 8;

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
        Self { window: window.max(1), pieces: VecDeque::new(), kept: 0 }
    }

    /// Adds the samples of a step.
    pub(crate) fn add(&mut self, progress: &Progress<'_>) {
        self.push(progress.logits, progress.labels);
    }

    /// Adds samples. The slices have the same length.
    pub(crate) fn push(&mut self, logits: &[f32], labels: &[f32]) {
        let piece = (self.window / PIECES).clamp(1, PIECE);
        for (&logit, &label) in logits.iter().zip(labels) {
            if self.pieces.back().is_none_or(|last| last.len() >= piece) {
                self.pieces.push_back(Arc::default());
            }
            if let Some(last) = self.pieces.back_mut() {
                Arc::make_mut(last).push(Scored { logit, label });
                self.kept += 1;
            }
        }
        while let Some(first) = self.pieces.front()
            && self.kept - first.len() >= self.window
        {
            self.kept -= first.len();
            self.pieces.pop_front();
        }
    }

    /// The quality of all samples that are kept; `None` if there are none.
    #[must_use]
    pub(crate) fn quality(&self) -> Option<ProgressiveQuality> {
        self.last(self.window)
    }

    /// The quality of the last `samples` samples, or of all that are kept if there are fewer; `None` for no
    /// samples.
    #[must_use]
    pub(crate) fn last(&self, samples: usize) -> Option<ProgressiveQuality> {
        let samples = samples.min(self.window).min(self.kept);
        if samples == 0 {
            return None;
        }
        let mut scored = give_way_every(SCORES_OF_TURN);
        let last = self.pieces.iter().flat_map(|piece| piece.iter()).skip(self.kept - samples);
        let (logits, labels): (Vec<f32>, Vec<f32>) =
            last.map(|&Scored { logit, label }| (logit, label)).unzip();
        let clicks: f64 = labels.iter().copied().map(f64::from).sum();
        let mut expected =
            || logits.iter().inspect(|_| scored()).map(|&logit| f64::from(sigmoid(logit))).sum::<f64>();
        Some(ProgressiveQuality {
            quality: Quality::of_logits(&logits, &labels),
            calibration: (clicks > 0.0).then(|| expected() / clicks),
        })
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
