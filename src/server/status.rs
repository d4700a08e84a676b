//! The status code of every error.

use tonic::{Code, Status};

use super::convert::{ConvertError, truncated};
use super::kserve::answers::OutputError;
use super::kserve::tensors::TensorError;
use super::repository::ChangeError;
use crate::batcher::BatchError;
use crate::learnlog::LearnError;
use crate::predict::PredictError;

/// Most bytes of an error message, so that it fits in the headers of every client.
const MESSAGE_BYTES: usize = 1024;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error("model: no model {model:?} is served here")]
    NoModel { model: String },
    #[error("version: model {model:?} serves version {serving}, got {requested}")]
    NoVersion { model: String, serving: u64, requested: u64 },
    #[error("model_version: expected a number, or nothing for the version that serves, got {got:?}")]
    VersionText { got: String },
    #[error(transparent)]
    Convert(#[from] ConvertError),
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error(transparent)]
    Change(#[from] ChangeError),
    #[error("learn.enabled: model {model:?} takes no samples here")]
    NoLearning { model: String },
    #[error(transparent)]
    Learn(#[from] LearnError),
    #[error(transparent)]
    Batch(#[from] BatchError),
}

impl CallError {
    #[must_use]
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::NoModel { .. } | Self::NoVersion { .. } => Code::NotFound,
            Self::Convert(ConvertError::TooManySamples { .. })
            | Self::Tensor(TensorError::TooManySamples { .. }) => Code::ResourceExhausted,
            Self::Batch(BatchError::Predict(error)) => predict_code(error),
            Self::Convert(_) | Self::Tensor(_) | Self::Output(_) | Self::VersionText { .. } => {
                Code::InvalidArgument
            }
            Self::Change(error) => error.code(),
            Self::NoLearning { .. } => Code::FailedPrecondition,
            Self::Learn(error) if error.is_full() => Code::ResourceExhausted,
            Self::Learn(_) => Code::Unavailable,
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
        // The server has checked the shape, so a wrong shape is a failure of the server.
        PredictError::Shape { .. } => Code::Internal,
        PredictError::Store(_) => Code::Unavailable,
    }
}

impl From<CallError> for Status {
    fn from(error: CallError) -> Self {
        Self::new(error.code(), truncated(error.to_string(), MESSAGE_BYTES))
    }
}
