//! The errors of a batcher: a request is refused, or queued and not scored.

use std::time::Duration;

use super::TooLate;
use super::queue::{QueueRefusal, Size};
use crate::predict::PredictError;

/// Why a request got no scores.
#[allow(missing_docs)] // the error texts document the variants
#[derive(Debug, thiserror::Error)]
pub(crate) enum BatchError {
    #[error("batcher.queue_samples: limit {limit}, {queued} queued, request has {size}")]
    QueueSamples { limit: usize, queued: usize, size: usize },
    #[error("batcher.queue_bytes: limit {limit}, {queued} queued, request has {size}")]
    QueueBytes { limit: usize, queued: usize, size: usize },
    #[error(
        "batcher: overloaded: the requests before this one take about {} ms, it may wait {} ms (a twentieth \
         of its time until the deadline)", .0.wait.as_millis(), .0.limit.as_millis()
    )]
    Overloaded(TooLate),
    #[error(
        "batcher: the model computes nothing: a request before this one has waited {} s (limit \
         batcher.default_deadline_ms)", .waits.as_secs()
    )]
    Stuck { waits: Duration },
    #[error("batcher: overloaded: requests of a higher priority took the place of this one in the queue")]
    Displaced,
    #[error("the server is draining, or the model is being unloaded: no more requests are accepted")]
    Closed,
    #[error("no time was left to compute it before its deadline, after {waited_us} us in the queue")]
    Expired { waited_us: u128 },
    #[error(transparent)]
    Predict(#[from] PredictError),
    #[error("the version changed {times} times while the parts of the request were computed")]
    VersionChanged { times: usize },
    /// The model panicked, or returned another number of scores than samples.
    #[error("model failed: {0}")]
    Failed(String),
}

impl BatchError {
    /// The error of a request that a queue with this limit has refused.
    pub(super) fn of(refusal: QueueRefusal, limit: Size) -> Self {
        match refusal {
            QueueRefusal::Closed => Self::Closed,
            QueueRefusal::TooLate(late) => Self::Overloaded(late),
            QueueRefusal::Stuck { waits } => Self::Stuck { waits },
            QueueRefusal::Full { queued, size } if queued.samples + size.samples > limit.samples => {
                Self::QueueSamples { limit: limit.samples, queued: queued.samples, size: size.samples }
            }
            QueueRefusal::Full { queued, size } => {
                Self::QueueBytes { limit: limit.bytes, queued: queued.bytes, size: size.bytes }
            }
        }
    }
}
