//! How good scores are: AUC, log loss and normalized entropy.
//!
//! All three are computed from probabilities as a server returns them, so that the trainer's own
//! evaluation and a client's of the same rows give the same numbers.

/// Probabilities nearer to 0 or 1 than this count as this far away, so that one sure mistake does
/// not make a log loss infinite: the spacing of f32 below 1.
const CLIP: f64 = 1.0 / (1u64 << 24) as f64;

/// The quality of scores against labels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quality {
    /// How many samples.
    pub rows: u64,
    /// Area under the ROC curve; none when all labels are alike.
    pub auc: Option<f64>,
    /// Mean binary cross-entropy, in nats.
    pub log_loss: f64,
    /// Log loss over the entropy of the mean label (He et al., 2014); none when all labels are
    /// alike.
    pub normalized_entropy: Option<f64>,
}

impl Quality {
    /// Of these scores. The slices are of one length.
    #[must_use]
    pub(crate) fn of(probabilities: &[f32], labels: &[f32]) -> Self {
        let rows = probabilities.len().min(labels.len());
        let log_loss: f64 = probabilities.iter().zip(labels).map(|(&p, &y)| cross_entropy(p, y)).sum();
        let log_loss = log_loss / rows.max(1) as f64;
        let clicks = labels.iter().filter(|y| **y > 0.5).count();
        let rate = clicks as f64 / rows.max(1) as f64;
        let both = clicks > 0 && clicks < rows;
        let entropy = -(rate * rate.ln() + (1.0 - rate) * (1.0 - rate).ln());
        Self {
            rows: rows as u64,
            auc: both.then(|| auc(probabilities, labels, clicks)),
            log_loss,
            normalized_entropy: both.then(|| log_loss / entropy),
        }
    }
}

fn cross_entropy(probability: f32, label: f32) -> f64 {
    let p = f64::from(probability).clamp(CLIP, 1.0 - CLIP);
    if label > 0.5 { -p.ln() } else { -(1.0 - p).ln() }
}

/// The Mann-Whitney statistic: the share of (click, no click) pairs that the scores order rightly;
/// a tie counts half.
fn auc(probabilities: &[f32], labels: &[f32], clicks: usize) -> f64 {
    let mut sorted: Vec<(f32, bool)> =
        probabilities.iter().zip(labels).map(|(&p, &y)| (p, y > 0.5)).collect();
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
