//! The settings of a pipeline and their limits.

use crate::trainer::TrainError;
use crate::trainer::pipeline::plan::HazardWindows;
use crate::trainer::pipeline::policy::{SEEN_AHEAD, ScratchpadPolicy};
use crate::trainer::pipeline::scratchpad::ScratchpadSize;
use crate::trainer::replicas::MOST_REPLICAS;

/// The settings of a pipeline.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineSettings {
    /// Size of the scratchpad.
    pub scratchpad: ScratchpadSize,
    /// Chooses the rows that are evicted first.
    pub policy: ScratchpadPolicy,
    /// Seed of the random policy.
    pub seed: u64,
    /// Batches that are planned together: cDLRM's look-ahead window; at least 1.
    pub lookahead: usize,
    /// Items that may wait between two stages.
    pub buffered: usize,
    /// Bytes of all staging buffers together.
    pub staging_bytes: usize,
    /// Threads that move rows between the working file and staging buffers.
    pub threads: usize,
    /// Whether stages overlap. If not, an item is planned only after the previous item has trained. That is
    /// a baseline for measurements and trains the same bytes.
    pub overlap: bool,
    /// Seed of random sleeps in every stage; `None` for no sleeps.
    pub jitter: Option<u64>,
    /// Data-parallel workers that share each batch, 1 to [`MOST_REPLICAS`]. Each has its own dense weights
    /// and its own copy of the window's rows. The copy is outside the scratchpad and no larger than it.
    pub replicas: usize,
    /// Replicas average rows and their state after every `lambda` steps; at least 1. At 1 they exchange
    /// gradients instead. Replicas also average at the end of a window, so each takes at most `lookahead`
    /// steps by itself.
    pub lambda: u64,
}

impl PipelineSettings {
    /// Whether the result is that of one worker. With one replica all bytes are equal. With several replicas
    /// at lambda = 1 the result is equal except for rounding, because sums are split where the batch is
    /// split. At any other lambda the replicas differ between averages.
    #[must_use]
    pub(crate) fn exact(&self) -> bool {
        self.replicas == 1 || self.lambda == 1
    }

    /// Checks the settings that do not depend on a model.
    ///
    /// # Errors
    /// [`TrainError::Lookahead`], [`TrainError::Replicas`] or [`TrainError::Lambda`].
    pub(crate) fn check(&self) -> Result<(), TrainError> {
        let most = SEEN_AHEAD / (1 + HazardWindows::of(self.buffered).future_items as usize);
        if !(1..=most).contains(&self.lookahead) {
            return Err(TrainError::Lookahead { got: self.lookahead, most });
        }
        if !(1..=MOST_REPLICAS).contains(&self.replicas) {
            return Err(TrainError::Replicas { got: self.replicas, most: MOST_REPLICAS });
        }
        if self.lambda == 0 {
            return Err(TrainError::Lambda { got: self.lambda });
        }
        Ok(())
    }

    /// The most steps that replicas take before they average: `lambda`, or `lookahead` if that is less.
    #[must_use]
    pub(crate) fn steps_apart(&self) -> u64 {
        self.lambda.min(self.lookahead as u64)
    }
}

impl Default for PipelineSettings {
    fn default() -> Self {
        Self {
            scratchpad: ScratchpadSize::Fraction(0.1),
            policy: ScratchpadPolicy::default(),
            seed: 0,
            lookahead: 1,
            buffered: 0,
            staging_bytes: 64 << 20,
            threads: 4,
            overlap: true,
            jitter: None,
            replicas: 1,
            lambda: 1,
        }
    }
}
