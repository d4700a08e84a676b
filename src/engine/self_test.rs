//! The trial of a device before it serves: generated batches are scored by it and by the store, first when its cache
//! misses and again when it hits, and the scores must be the same to the bit. A GPU, a driver or a compiler that does not
//! do what the kernels count on so costs speed, and never a score.

use std::sync::PoisonError;

use super::on_device::DeviceFront;
use super::{Engine, LookupTier, Spent};
use crate::mem::mix64;
use crate::schema::Arity;
use crate::types::{Batch, Jagged};

/// Batches that a device is tried with, how often each, their samples, and most ids of a bag.
const TRIALS: u64 = 2;
const TRIAL_ROUNDS: usize = 3;
const TRIAL_SAMPLES: usize = 96;
const TRIAL_IDS: u32 = 8;

/// Why a device is not trusted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum SelfTestError {
    /// It did not score.
    #[error("the device failed at its trial: {0}")]
    Failed(String),
    /// It scored otherwise than the store.
    #[error(
        "the device scored sample {sample} of its trial otherwise than the host: expected {expected}, got {got}"
    )]
    Differs {
        /// The first sample.
        sample: usize,
        /// The host's score.
        expected: f32,
        /// The device's.
        got: f32,
    },
}

impl Engine {
    /// Tries the device, where there is one: whether it scores as the store does, to the bit. A device that does not
    /// is given up. For a time before batches; the metrics do not count it.
    ///
    /// # Errors
    /// [`SelfTestError`] when the device fails, or its scores are not the store's.
    pub(crate) fn try_device(&self) -> Result<(), SelfTestError> {
        let LookupTier::Device(front) = &self.front else { return Ok(()) };
        let tried = (0..TRIALS).try_for_each(|seed| self.trial(front, &self.trial_batch(seed)));
        if let Err(error) = &tried {
            front.lose(error);
        }
        *self.counted.lock().unwrap_or_else(PoisonError::into_inner) = front.stats();
        tried
    }

    fn trial(&self, front: &DeviceFront, batch: &Batch) -> Result<(), SelfTestError> {
        let spent = Spent::default();
        let expected = self.score_from_store(batch, &spent);
        // The first time rows are missing; later they are not, once the cache has let them in.
        for _ in 0..TRIAL_ROUNDS {
            let scores = self.score_on_device(front, batch, &spent);
            let scores = scores.map_err(|error| SelfTestError::Failed(error.to_string()))?;
            if front.is_lost() {
                return Err(SelfTestError::Failed("see the error before".to_owned()));
            }
            let differs = |s: &usize| scores[*s].to_bits() != expected[*s].to_bits();
            if let Some(sample) = (0..batch.samples).find(differs) {
                let (got, expected) = (scores[sample], expected[sample]);
                return Err(SelfTestError::Differs { sample, expected, got });
            }
        }
        Ok(())
    }

    /// A batch of a seed: rows of all tables, some twice, bags of all sizes.
    fn trial_batch(&self, seed: u64) -> Batch {
        let mut state = mix64(seed);
        let mut draw = |below: u64| {
            state = mix64(state);
            state % below.max(1)
        };
        let samples = TRIAL_SAMPLES.min(self.max_samples);
        let dense = (0..samples * self.schema.dense_width()).map(|_| draw(1 << 12) as f32 / 1024.0).collect();
        let mut batch = Batch { samples, dense, features: Vec::new() };
        for (f, feature) in self.schema.features.iter().enumerate() {
            let of_feature = self.lookups.iter().filter(|l| l.feature == f);
            let rows = of_feature.map(|l| self.schema.tables[l.table.index()].rows).min().unwrap_or(1);
            let mut column = Jagged::default();
            for _ in 0..samples {
                let ids = match feature.arity {
                    Arity::OneHot => 1,
                    Arity::MultiHot { max } => draw(u64::from(max.min(TRIAL_IDS)) + 1),
                };
                // Half of them among few rows, so that they repeat.
                column.push(
                    &(0..ids)
                        .map(|i| if i % 2 == 0 { draw(rows) } else { draw(rows.min(7)) })
                        .collect::<Vec<_>>(),
                );
            }
            batch.features.push(column);
        }
        batch
    }
}
