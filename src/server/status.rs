//! The status code of every error.

use std::time::Duration;

use tonic::{Code, Status};

use super::charge::TooManyBytes;
use super::convert::{ConvertError, truncated};
use super::kserve::answers::OutputError;
use super::kserve::tensors::TensorError;
use super::pressure::overloaded;
use super::repository::ChangeError;
use crate::batcher::BatchError;
use crate::config::LABEL_FORM;
use crate::learnlog::LearnError;
use crate::predict::PredictError;
use crate::types::Version;

/// When a call may be sent again that found a queue, or all places, full.
pub(crate) const FULL: Duration = Duration::from_millis(100);

/// Most bytes of an error message, so that it fits in the headers of every client.
const MESSAGE_BYTES: usize = 1024;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error("model: no model {model:?} is served here")]
    NoModel { model: String },
    #[error("model: {model:?} is loading")]
    Loading { model: String },
    #[error("version: model {model:?} is still loading its versions")]
    VersionsLoading { model: String },
    #[error("model: {model:?} could not be loaded; /readyz says why")]
    Refused { model: String },
    #[error("version: model {model:?} serves version {loaded}, got {requested}")]
    NoVersion { model: String, loaded: String, requested: Version },
    #[error("label: model {model:?} has the labels {labels}, got {got:?}")]
    NoLabel { model: String, labels: String, got: String },
    #[error("label: expected a version or a label, got both, label {label:?}")]
    Both { label: String },
    #[error("label: expected {LABEL_FORM}, got {got:?}")]
    LabelName { got: String },
    #[error("version: expected 0 to remove a label, got {got}")]
    VersionToRemove { got: u64 },
    #[error("parameters: label: expected a string")]
    LabelParameter,
    #[error("model_version: expected a number, or nothing for the version that serves, got {got:?}")]
    VersionText { got: String },
    #[error("parameters: priority: expected a number, 1 (high), 0 or 2 (normal), 3 or more (low), got {got}")]
    Priority { got: String },
    #[error("parameters: timeout: expected microseconds, a whole number from 0, got {got}")]
    Timeout { got: String },
    #[error("priority: expected 0 (normal), 1 (high) or 2 (low), got {got}")]
    UnknownPriority { got: i32 },
    #[error("request id: limit {limit} bytes, got {got}")]
    Id { limit: usize, got: usize },
    #[error("deadline passed before the answer: {limit:?} ({field})")]
    Late { field: &'static str, limit: Duration },
    #[error("no scores after {} s, the most for a request without a deadline", .limit.as_secs_f64())]
    NoScores { limit: Duration },
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
    #[error("learned samples: model {model:?} takes none: {reason}")]
    NoLearnLog { model: String, reason: String },
    #[error(transparent)]
    Learn(#[from] LearnError),
    #[error(transparent)]
    Batch(#[from] BatchError),
    #[error(transparent)]
    Bytes(#[from] TooManyBytes),
}

impl CallError {
    #[must_use]
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::NoModel { .. } | Self::NoVersion { .. } | Self::NoLabel { .. } => Code::NotFound,
            Self::Convert(ConvertError::TooManySamples { .. })
            | Self::Tensor(TensorError::TooManySamples { .. }) => Code::ResourceExhausted,
            Self::Batch(BatchError::Predict(error)) => predict_code(error),
            Self::Convert(_)
            | Self::Tensor(_)
            | Self::Output(_)
            | Self::VersionText { .. }
            | Self::Both { .. }
            | Self::LabelName { .. }
            | Self::VersionToRemove { .. }
            | Self::LabelParameter
            | Self::Priority { .. }
            | Self::Timeout { .. }
            | Self::UnknownPriority { .. }
            | Self::Id { .. } => Code::InvalidArgument,
            Self::Change(error) => error.code(),
            Self::NoLearning { .. } => Code::FailedPrecondition,
            Self::Loading { .. }
            | Self::VersionsLoading { .. }
            | Self::Refused { .. }
            | Self::NoScores { .. }
            | Self::NoLearnLog { .. } => Code::Unavailable,
            Self::Learn(error) if error.is_full() => Code::ResourceExhausted,
            Self::Learn(_) => Code::Unavailable,
            Self::Bytes(_)
            | Self::Batch(
                BatchError::QueueSamples { .. }
                | BatchError::QueueBytes { .. }
                | BatchError::Overloaded(_)
                | BatchError::Displaced,
            ) => Code::ResourceExhausted,
            Self::Batch(
                BatchError::Closed | BatchError::Stuck { .. } | BatchError::VersionChanged { .. },
            ) => Code::Unavailable,
            Self::Late { .. } | Self::Batch(BatchError::Expired { .. }) => Code::DeadlineExceeded,
            Self::Batch(BatchError::Failed(_)) => Code::Internal,
        }
    }

    /// Whether the call found no model, which would count its failure.
    pub(crate) fn is_of_no_model(&self) -> bool {
        matches!(self, Self::NoModel { .. } | Self::Loading { .. } | Self::Refused { .. })
    }

    /// Whether the server is at fault, and an operator should know.
    pub(crate) fn is_fault(&self) -> bool {
        match self {
            Self::NoScores { .. } | Self::NoLearnLog { .. } => true,
            Self::Learn(error @ (LearnError::Log(_) | LearnError::Failed | LearnError::Slow { .. })) => {
                !error.is_full()
            }
            Self::Batch(error) => matches!(
                error,
                BatchError::Failed(_)
                    | BatchError::VersionChanged { .. }
                    | BatchError::Predict(PredictError::Shape { .. } | PredictError::Store(_))
            ),
            _ => false,
        }
    }

    /// When the call may be sent again, if it was refused because of overload.
    pub(crate) fn retry(&self) -> Option<Duration> {
        match self {
            Self::Batch(BatchError::Overloaded(late)) => Some(late.wait),
            Self::Batch(
                BatchError::QueueSamples { .. } | BatchError::QueueBytes { .. } | BatchError::Displaced,
            )
            | Self::Bytes(_)
            | Self::Learn(LearnError::Behind { .. })
            | Self::Change(ChangeError::Busy | ChangeError::Lists { .. }) => Some(FULL),
            _ => None,
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
        let text = truncated(error.to_string(), MESSAGE_BYTES);
        match error.retry() {
            Some(retry) => overloaded(text, retry),
            None => Self::new(error.code(), text),
        }
    }
}
