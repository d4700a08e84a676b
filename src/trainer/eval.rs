//! The quality of scores against labels: AUC, log loss and normalized entropy.
//!
//! The trainer evaluates logits ([`Quality::of_logits`]). A client has only the f32 probabilities that a
//! server returns ([`Quality::of`]). Both rank the f32 probabilities, so both get the same AUC. The trainer's
//! log loss is exact for any logit. The client's log loss contains the rounding error of the probability. For
//! ordinary scores the two agree to about 7 digits. But a logit above 17 rounds to a probability of exactly
//! 1, and then a sample without a click has an infinite loss. The mean is reported as infinite too, and such
//! samples are counted ([`Quality::infinite`]).
//!
//! Labels are from 0 to 1. A sample with label y counts as y of a click, and as 1 - y of a sample without
//! one, as in the loss that training minimises.

use crate::model::loss::{binary_cross_entropy, sigmoid};
use crate::pace::{self, give_way_every};

/// Scores or losses that are computed between two calls of the scheduler.
pub(super) const SCORES_OF_TURN: u32 = 1024;

/// The quality of scores against labels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Quality {
    pub samples: u64,
    /// Area under the ROC curve; `None` when all labels are 0, all are 1, or there is one sample.
    pub auc: Option<f64>,
    /// Mean binary cross-entropy in nats; infinite if the loss of any sample is infinite.
    pub log_loss: f64,
    /// Log loss divided by the entropy of the mean label (He et al., 2014); `None` when the mean is 0 or 1.
    pub normalized_entropy: Option<f64>,
    /// Samples with infinite loss: the score is exactly 0 or 1, and the label is the opposite.
    pub infinite: u64,
}

impl Quality {
    /// The quality of probabilities. The slices have the same length.
    #[must_use]
    pub(crate) fn of(probabilities: &[f32], labels: &[f32]) -> Self {
        let losses = probabilities.iter().zip(labels).map(|(&probability, &label)| {
            let probability = f64::from(probability);
            // `ln_1p` keeps the digits of a small probability.
            weighted(label, -probability.ln()) + weighted(1.0 - label, -(-probability).ln_1p())
        });
        Self::from_losses(losses, probabilities, labels)
    }

    /// The quality of logits. The slices have the same length.
    #[must_use]
    pub(crate) fn of_logits(logits: &[f32], labels: &[f32]) -> Self {
        let losses = logits.iter().zip(labels).map(|(&logit, &label)| match logit {
            f32::INFINITY => weighted(1.0 - label, f64::INFINITY),
            f32::NEG_INFINITY => weighted(label, f64::INFINITY),
            _ => binary_cross_entropy(f64::from(logit), f64::from(label)),
        });
        let mut scored = give_way_every(SCORES_OF_TURN);
        let probabilities: Vec<f32> =
            logits.iter().inspect(|_| scored()).map(|&logit| sigmoid(logit)).collect();
        Self::from_losses(losses, &probabilities, labels)
    }

    fn from_losses(losses: impl Iterator<Item = f64>, probabilities: &[f32], labels: &[f32]) -> Self {
        let samples = probabilities.len().min(labels.len());
        let (mut sum, mut infinite) = (0.0, 0);
        let mut summed = give_way_every(SCORES_OF_TURN);
        for loss in losses {
            summed();
            sum += loss;
            infinite += u64::from(loss.is_infinite());
        }
        let log_loss = sum / samples.max(1) as f64;
        let rate = labels.iter().copied().map(f64::from).sum::<f64>() / samples.max(1) as f64;
        let entropy = -(rate * rate.ln() + (1.0 - rate) * (1.0 - rate).ln());
        Self {
            samples: samples as u64,
            auc: auc(probabilities, labels),
            log_loss,
            normalized_entropy: (rate > 0.0 && rate < 1.0).then(|| log_loss / entropy),
            infinite,
        }
    }
}

/// A loss with this weight. Without weight it is 0, also if it is infinite.
fn weighted(weight: f32, loss: f64) -> f64 {
    if weight == 0.0 { 0.0 } else { f64::from(weight) * loss }
}

/// The Mann-Whitney statistic: the share of pairs (click, no click) of different samples that the scores rank
/// correctly. A tie counts half.
fn auc(probabilities: &[f32], labels: &[f32]) -> Option<f64> {
    let mut sorted: Vec<(f32, f64)> =
        probabilities.iter().zip(labels).map(|(&p, &y)| (p, f64::from(y))).collect();
    pace::sort_unstable_by(&mut sorted, |a, b| a.0.total_cmp(&b.0));
    let (mut clicks, mut others, mut right, mut own) = (0.0, 0.0, 0.0, 0.0);
    for tied in sorted.chunk_by(|a, b| a.0 == b.0) {
        let clicked: f64 = tied.iter().map(|(_, y)| y).sum();
        let not: f64 = tied.iter().map(|(_, y)| 1.0 - y).sum();
        // A sample whose label is between 0 and 1 makes a pair with itself, which does not count.
        let with_itself: f64 = tied.iter().map(|(_, y)| y * (1.0 - y)).sum();
        right += clicked * others + (clicked * not - with_itself) / 2.0;
        clicks += clicked;
        others += not;
        own += with_itself;
    }
    let pairs = clicks * others - own;
    // A single sample has no pair, but the difference may be a rounding error.
    (sorted.len() > 1 && pairs > 0.0).then(|| right / pairs)
}

#[cfg(test)]
mod tests;
