//! How a pipeline is made, and what of that cannot be had.

use crate::trainer::TrainError;
use crate::trainer::pipeline::plan::Windows;
use crate::trainer::pipeline::policy::{Policy, SEEN_AHEAD};
use crate::trainer::pipeline::scratchpad::ScratchpadSize;
use crate::trainer::replicas::MOST_REPLICAS;

/// How a pipeline is made.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineSettings {
    /// How large the scratchpad is.
    pub scratchpad: ScratchpadSize,
    /// Which rows leave it first.
    pub policy: Policy,
    /// What the random policy draws from.
    pub seed: u64,
    /// Batches that are planned together: cDLRM's look-ahead window; at least 1.
    pub lookahead: usize,
    /// Items that may wait between two stages.
    pub buffered: usize,
    /// Bytes of all staging buffers together.
    pub staging_bytes: usize,
    /// Threads that move rows between store and staging.
    pub threads: usize,
    /// Whether stages overlap. If not, each item is planned when the one before has trained: a baseline, and the same bytes.
    pub overlap: bool,
    /// Makes every stage sleep at random.
    pub jitter: Option<u64>,
    /// Data-parallel workers that each batch is cut for, 1 to [`MOST_REPLICAS`]. Each has dense weights of
    /// its own and a copy of the window's rows, which is no larger than the scratchpad and comes on top of
    /// it.
    pub replicas: usize,
    /// Steps after which replicas average rows and their state; at least 1. With 1 they exchange gradients in
    /// place of that. The end of a window averages too, so that no replica is by itself for more than
    /// `lookahead` steps.
    pub lambda: u64,
}

impl PipelineSettings {
    /// Whether what is trained is what one worker trains: with one replica to the byte, and with several at
    /// lambda = 1 to rounding, because a sum is then cut where the batch is. Not at any other lambda, where
    /// each replica goes on for some steps by itself.
    #[must_use]
    pub(crate) fn exact(&self) -> bool {
        self.replicas == 1 || self.lambda == 1
    }

    /// Whether what is asked for can be had of any model.
    ///
    /// # Errors
    /// [`TrainError::Lookahead`], [`TrainError::Replicas`] or [`TrainError::Lambda`].
    pub(crate) fn check(&self) -> Result<(), TrainError> {
        let most = SEEN_AHEAD / (1 + Windows::of(self.buffered).future as usize);
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

    /// The most steps that replicas take before they average: `lambda`, but no more than a window has.
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
