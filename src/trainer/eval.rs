//! The quality of scores against labels: AUC, log loss and normalized entropy.
//!
//! The trainer evaluates logits ([`Quality::of_logits`]). A client has only the f32 probabilities that a
//! server returns ([`Quality::of`]). Both rank the f32 probabilities, so both get the same AUC. The trainer's
//! log loss is exact for any logit. The client's log loss contains the rounding error of the probability. For
//! ordinary scores the two agree to about 7 digits. But a logit above 17 rounds to a probability of exactly
//! 1, and then a sample without a click has an infinite loss. The mean is reported as infinite too, and such
//! samples are counted ([`Quality::infinite`]).

use crate::model::loss::{binary_cross_entropy, sigmoid};

/// The quality of scores against labels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Quality {
    /// Number of samples.
    pub rows: u64,
    /// Area under the ROC curve; `None` when all labels are equal.
    pub auc: Option<f64>,
    /// Mean binary cross-entropy in nats; infinite if the loss of any sample is infinite.
    pub log_loss: f64,
    /// Log loss divided by the entropy of the mean label (He et al., 2014); `None` when all labels are equal.
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
            if is_click(label) { -probability.ln() } else { -(-probability).ln_1p() }
        });
        Self::from_losses(losses, probabilities, labels)
    }

    /// The quality of logits. The slices have the same length.
    #[must_use]
    pub(crate) fn of_logits(logits: &[f32], labels: &[f32]) -> Self {
        let losses = logits.iter().zip(labels).map(|(&logit, &label)| match (logit, is_click(label)) {
            (f32::INFINITY, true) | (f32::NEG_INFINITY, false) => 0.0,
            (f32::INFINITY, false) | (f32::NEG_INFINITY, true) => f64::INFINITY,
            (logit, click) => binary_cross_entropy(f64::from(logit), if click { 1.0 } else { 0.0 }),
        });
        let probabilities: Vec<f32> = logits.iter().map(|&logit| sigmoid(logit)).collect();
        Self::from_losses(losses, &probabilities, labels)
    }

    fn from_losses(losses: impl Iterator<Item = f64>, probabilities: &[f32], labels: &[f32]) -> Self {
        let rows = probabilities.len().min(labels.len());
        let (mut sum, mut infinite) = (0.0, 0);
        for loss in losses {
            sum += loss;
            infinite += u64::from(loss.is_infinite());
        }
        let log_loss = sum / rows.max(1) as f64;
        let clicks = labels.iter().filter(|label| is_click(**label)).count();
        let rate = clicks as f64 / rows.max(1) as f64;
        let both = clicks > 0 && clicks < rows;
        let entropy = -(rate * rate.ln() + (1.0 - rate) * (1.0 - rate).ln());
        Self {
            rows: rows as u64,
            auc: both.then(|| auc(probabilities, labels, clicks)),
            log_loss,
            normalized_entropy: both.then(|| log_loss / entropy),
            infinite,
        }
    }
}

fn is_click(label: f32) -> bool {
    label > 0.5
}

/// The Mann-Whitney statistic: the share of (click, no click) pairs that the scores rank correctly. A tie
/// counts half.
fn auc(probabilities: &[f32], labels: &[f32], clicks: usize) -> f64 {
    let mut sorted: Vec<(f32, bool)> =
        probabilities.iter().zip(labels).map(|(&p, &y)| (p, is_click(y))).collect();
    sorted.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let (mut below, mut twice) = (0u64, 0u128);
    for tied in sorted.chunk_by(|a, b| a.0 == b.0) {
        let clicked = tied.iter().filter(|(_, click)| *click).count() as u64;
        let not = tied.len() as u64 - clicked;
        twice += u128::from(clicked) * u128::from(2 * below + not);
        below += not;
    }
    let pairs = clicks as f64 * (labels.len() - clicks) as f64;
    twice as f64 / 2.0 / pairs
}

#[cfg(test)]
mod tests;
