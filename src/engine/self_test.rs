//! The self-test of a device before it serves. Generated batches are scored by the device and from the store,
//! first with cache misses and then with hits, and the scores must be equal to the bit. If a GPU, a driver or
//! a compiler breaks an assumption of the kernels, the device is not used: serving is slower, but no score is
//! wrong.

use super::gpu::GpuLookupTier;
use super::{Engine, LookupTier, Spent};
use crate::mem::mix64;
use crate::schema::Arity;
use crate::sync::EvenPoisoned;
use crate::types::{Batch, Jagged};

const BATCHES: u64 = 2;
/// How many times each batch is scored on the device.
const ROUNDS: usize = 3;
const SAMPLES: usize = 96;
/// Most ids of a bag.
const BAG_IDS: u32 = 8;

/// Why a device does not pass the self-test.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum SelfTestError {
    #[error("the device failed in its self-test: {0}")]
    Failed(String),
    #[error(
        "self-test: the device scored sample {sample} differently from the host: expected {expected}, \
         got {got}"
    )]
    Differs { sample: usize, expected: f32, got: f32 },
}

impl Engine {
    /// Tests whether scores from the device, if there is one, equal scores from the store to the bit. A
    /// device that fails is abandoned. Must be called before the first batch. The metrics do not count its
    /// lookups.
    ///
    /// # Errors
    /// [`SelfTestError`] when the device fails, or its scores differ from the store's.
    pub(crate) fn self_test(&self) -> Result<(), SelfTestError> {
        let LookupTier::Gpu(tier) = &self.lookup_tier else { return Ok(()) };
        let result = (0..BATCHES).try_for_each(|seed| self.test_batch(tier, &self.generate_batch(seed)));
        if let Err(error) = &result {
            tier.lose(error);
        }
        *self.counted.lock().even_poisoned() = tier.stats();
        result
    }

    fn test_batch(&self, tier: &GpuLookupTier, batch: &Batch) -> Result<(), SelfTestError> {
        let spent = Spent::default();
        let expected = self.score_from_store(batch, &spent).probabilities;
        // The first round misses all rows. Later rounds hit the rows that were admitted.
        for _ in 0..ROUNDS {
            let scores = self.score_on_gpu(tier, batch, &spent);
            let scored = scores.map_err(|error| SelfTestError::Failed(error.to_string()))?;
            let scores = scored.probabilities;
            if tier.is_lost() {
                return Err(SelfTestError::Failed("see the previous error".to_owned()));
            }
            let differs = |s: &usize| scores[*s].to_bits() != expected[*s].to_bits();
            if let Some(sample) = (0..batch.samples).find(differs) {
                let (got, expected) = (scores[sample], expected[sample]);
                return Err(SelfTestError::Differs { sample, expected, got });
            }
        }
        Ok(())
    }

    /// A batch that the seed determines: rows of all tables, some of them repeated, and bags of several
    /// sizes.
    pub(crate) fn generate_batch(&self, seed: u64) -> Batch {
        let mut state = mix64(seed);
        let mut draw = |below: u64| {
            state = mix64(state);
            state % below.max(1)
        };
        let samples = SAMPLES.min(self.max_samples);
        let dense = (0..samples * self.schema.dense_width()).map(|_| draw(1 << 12) as f32 / 1024.0).collect();
        let mut batch = Batch { samples, dense, ..Batch::default() };
        for (f, feature) in self.schema.features.iter().enumerate() {
            let of_feature = self.lookups.iter().filter(|l| l.feature == f);
            let rows = of_feature.map(|l| self.schema.tables[l.table.index()].rows).min().unwrap_or(1);
            let mut column = Jagged::default();
            for _ in 0..samples {
                let ids = match feature.arity {
                    Arity::OneHot => 1,
                    Arity::MultiHot { max } => draw(u64::from(max.min(BAG_IDS)) + 1),
                };
                // Half of the ids are from at most 7 rows, so that they repeat.
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
