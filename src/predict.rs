//! The interface between the batcher, which calls a model, and the engine, which implements it.

use std::sync::Arc;

use crate::schema::{AbsentIdError, Schema};
use crate::types::{Batch, Scores, Version};

/// A served model.
#[derive(Clone, Debug)]
pub struct Description {
    /// The model's name.
    pub model: String,
    /// The version that new batches use.
    pub version: Version,
    /// The schema of that version.
    pub schema: Arc<Schema>,
    /// Most samples of one [`Predict::predict`] call.
    pub max_samples: usize,
}

#[allow(missing_docs)] // the error texts document the variants
#[derive(Debug, thiserror::Error)]
pub enum PredictError {
    #[error(transparent)]
    AbsentId(#[from] AbsentIdError),
    #[error("{field}: expected {expected}, got {got}")]
    Shape { field: String, expected: u64, got: u64 },
    /// `field` is the setting with the limit. `needed` and `limit` are in the unit of that setting.
    #[error("{field}: needs {needed}, limit {limit}")]
    Capacity { field: &'static str, needed: u64, limit: u64 },
    /// The input values are finite, but the computed score is not.
    #[error(
        "score of sample {sample} is not finite: its values or the model's weights are too large for f32"
    )]
    NotFinite { sample: usize },
    #[error("store: {0}")]
    Store(String),
}

/// Scores that are all finite.
///
/// # Errors
/// [`PredictError::NotFinite`] for the first one that is not.
pub fn finite(scores: Scores) -> Result<Scores, PredictError> {
    match scores.probabilities.iter().position(|p| !p.is_finite()) {
        Some(sample) => Err(PredictError::NotFinite { sample }),
        None => Ok(scores),
    }
}

/// Scores batches with one model.
pub trait Predict: Send + Sync {
    /// Scores every sample of the batch. A score depends only on its sample and the version. One that is not
    /// finite is NaN, so that the scores of the other samples are not lost: [`finite`] makes it an error.
    ///
    /// # Errors
    /// When the batch does not have the schema's shape, or rows cannot be read.
    fn predict(&self, batch: &Batch) -> Result<Scores, PredictError>;

    /// The model's name, version, schema and limits.
    fn describe(&self) -> Description;

    /// Whether the model is loaded and its cache is warm.
    fn ready(&self) -> bool;

    /// Updates the metrics that are too expensive to update for every batch. Called before `/metrics` is
    /// rendered.
    fn measure(&self) {}
}
