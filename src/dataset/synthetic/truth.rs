//! The ground truth of generated labels. Every (feature, id) and every dense input has a hidden weight, a
//! pure function of the truth's seed. The click probability of a sample is the sigmoid of the sum of its
//! weights. So the best AUC that any model can reach on the data can be computed.

use super::random::{Purpose, Stream, bell};
use crate::schema::{Schema, Transform};

/// Logit of a sample whose weights sum to 0. With this value a quarter to a third of the samples click.
const BIAS: f64 = -1.4;
/// Standard deviation of what the ids add to the logit, if every feature has one id per sample and all its
/// ids are equally frequent.
const ID_SCALE: f64 = 1.5;
/// Standard deviation of what the dense features add to the logit.
const DENSE_SCALE: f64 = 0.8;

/// A known click probability for every sample of a schema.
#[derive(Clone, Debug)]
pub(crate) struct Truth {
    /// The weights of each feature's ids.
    features: Vec<Stream>,
    id_scale: f64,
    /// Weight, mean and standard deviation of each dense input, after its transform.
    dense: Vec<[f64; 3]>,
}

impl Truth {
    /// The truth of a seed for a schema's features.
    #[must_use]
    pub(crate) fn new(schema: &Schema, seed: u64) -> Self {
        let per_root = |scale: f64, count: usize| scale / (count.max(1) as f64).sqrt();
        let dense_scale = per_root(DENSE_SCALE, schema.dense.len());
        let dense = schema.dense.iter().enumerate().map(|(i, input)| {
            let (mean, deviation) = match input.transform {
                Transform::Log1p => (LOG_MEAN, LOG_DEVIATION),
                Transform::None | Transform::Standardize { .. } => (0.0, 1.0),
            };
            [dense_scale * bell(Stream::new(seed, Purpose::DenseWeight, i as u64).word(0)), mean, deviation]
        });
        let weights = |i| Stream::new(seed, Purpose::IdWeight, i as u64);
        Self {
            features: (0..schema.features.len()).map(weights).collect(),
            id_scale: per_root(ID_SCALE, schema.features.len()),
            dense: dense.collect(),
        }
    }

    /// The click probability of a sample of an encoded batch of the schema.
    #[must_use]
    #[cfg(test)]
    pub(crate) fn probability(&self, batch: &crate::types::Batch, sample: usize) -> f64 {
        let width = self.dense.len();
        let dense = &batch.dense[sample * width..(sample + 1) * width];
        let logit = self.dense_part(dense)
            + (batch.features.iter().enumerate())
                .map(|(i, f)| self.feature_part(i, f.sample(sample)))
                .sum::<f64>();
        sigmoid(logit)
    }

    /// The bias plus the contribution of transformed dense values to the logit.
    pub(crate) fn dense_part(&self, dense: &[f32]) -> f64 {
        let part = |(&value, [weight, mean, deviation]): (&f32, &[f64; 3])| {
            weight * (f64::from(value) - mean) / deviation
        };
        BIAS + dense.iter().zip(&self.dense).map(part).sum::<f64>()
    }

    /// The contribution of a feature's ids to the logit: the scaled mean of their weights.
    pub(crate) fn feature_part(&self, feature: usize, ids: &[u64]) -> f64 {
        let weight = |id: &u64| bell(self.features[feature].word(*id));
        self.id_scale * ids.iter().map(weight).sum::<f64>() / ids.len().max(1) as f64
    }
}

/// Mean of `ln(1 + x)` of the generated values of a log1p input.
pub(crate) const LOG_MEAN: f64 = 2.0;
/// Standard deviation of `ln(1 + x)` of those values.
pub(crate) const LOG_DEVIATION: f64 = 1.5;

pub(crate) fn sigmoid(logit: f64) -> f64 {
    1.0 / (1.0 + (-logit).exp())
}
