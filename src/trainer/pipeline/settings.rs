//! How a pipeline is made, and the limits of that.

use crate::trainer::TrainError;
use crate::trainer::pipeline::plan::HazardWindows;
use crate::trainer::pipeline::policy::{Policy, SEEN_AHEAD};
use crate::trainer::pipeline::scratchpad::ScratchpadSize;
use crate::trainer::replicas::MOST_REPLICAS;

/// How a pipeline is made.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineSettings {
    pub scratchpad: ScratchpadSize,
    /// Chooses the rows that are evicted first.
    pub policy: Policy,
    /// Seed of the random policy.
    pub seed: u64,
    /// Batches that are planned together: cDLRM's look-ahead window; at least 1.
    pub lookahead: usize,
    /// Items that may wait between two stages.
    pub buffered: usize,
    /// Bytes of all staging buffers together.
    pub staging_bytes: usize,
    /// Threads that move rows between store and staging buffers.
    pub threads: usize,
    /// Whether stages overlap. If not, each item is planned after the item before it has trained: a baseline
    /// that trains the same bytes.
    pub overlap: bool,
    /// Seed of random sleeps in every stage; none without it.
    pub jitter: Option<u64>,
    /// Data-parallel workers that share each batch, 1 to [`MOST_REPLICAS`]. Each has its own dense weights
    /// and its own copy of the window's rows. The copy is no larger than the scratchpad and is not part of
    /// it.
    pub replicas: usize,
    /// Steps after which replicas average rows and their state; at least 1. At 1 they exchange gradients
    /// instead. The end of a window averages too, so a replica takes at most `lookahead` steps by itself.
    pub lambda: u64,
}

impl PipelineSettings {
    /// Whether the trained bytes are those of one worker: to the byte with one replica, and to rounding with
    /// several at lambda = 1, which cut sums where they cut the batch. At any other lambda the replicas
    /// diverge for some steps.
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

    /// The most steps that replicas take before they average: `lambda`, or a window if that is shorter.
    #[must_use]
    pub(crate) fn steps_apart(&self) -> u64 {
        self.lambda.min(self.lookahead as u64)
    }
}

impl Default for PipelineSettings {
    fn default() -> Self {
        Self {
            scratchpad: ScratchpadSize::Fraction(0.1),
            policy: Policy::default(),
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
