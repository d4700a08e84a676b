//! Which status code an error is, in one place.

use tonic::{Code, Status};

use super::convert::{ConvertError, truncated};
use crate::batcher::BatchError;
use crate::predict::PredictError;

/// Most bytes of a message, so that it fits the headers any client takes.
const MESSAGE_BYTES: usize = 1024;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// A model that is not served.
    #[error("model: no model {model:?} is served here")]
    NoModel {
        /// What was asked for.
        model: String,
    },
    /// A version that does not serve.
    #[error("version: model {model:?} serves version {serving}, got {asked}")]
    NoVersion {
        /// The model.
        model: String,
        /// The version that serves.
        serving: u64,
        /// What was asked for.
        asked: u64,
    },
    /// The message is not a batch.
    #[error(transparent)]
    Convert(#[from] ConvertError),
    /// The batch got no scores.
    #[error(transparent)]
    Batch(#[from] BatchError),
}

impl CallError {
    /// The status code of this error.
    #[must_use]
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::NoModel { .. } | Self::NoVersion { .. } => Code::NotFound,
            Self::Convert(ConvertError::TooManySamples { .. }) => Code::ResourceExhausted,
            Self::Batch(BatchError::Predict(error)) => predict_code(error),
            Self::Convert(_) => Code::InvalidArgument,
            Self::Batch(BatchError::QueueSamples { .. } | BatchError::QueueBytes { .. }) => {
                Code::ResourceExhausted
            }
            Self::Batch(BatchError::Closed) => Code::Unavailable,
            Self::Batch(BatchError::Expired { .. }) => Code::DeadlineExceeded,
            Self::Batch(BatchError::Failed(_)) => Code::Internal,
        }
    }
}

fn predict_code(error: &PredictError) -> Code {
    match error {
        PredictError::AbsentId { .. } | PredictError::NotFinite { .. } => Code::InvalidArgument,
        PredictError::Capacity { .. } => Code::ResourceExhausted,
        // The server has checked the shape, so a batch of the wrong one is our fault.
        PredictError::Shape { .. } => Code::Internal,
        PredictError::Store(_) => Code::Unavailable,
    }
}

impl From<CallError> for Status {
    fn from(error: CallError) -> Self {
        Self::new(error.code(), truncated(error.to_string(), MESSAGE_BYTES))
    }
}
