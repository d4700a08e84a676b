//! The seam between the batcher, which drives a model, and the engine, which implements it.

use std::sync::Arc;

use crate::schema::{AbsentId, Schema};
use crate::types::{Batch, Scores, Version};

/// What a server tells of a model it serves.
#[derive(Clone, Debug)]
pub struct Description {
    /// The model's name.
    pub model: String,
    /// The version that scores now.
    pub version: Version,
    /// Its features, tables and architecture.
    pub schema: Arc<Schema>,
    /// Most samples in one call of [`Predict::predict`].
    pub max_samples: usize,
}

/// Why a batch got no scores.
#[derive(Debug, thiserror::Error)]
pub enum PredictError {
    #[error(transparent)]
    AbsentId(#[from] AbsentId),
    /// The batch does not have the schema's shape.
    #[error("{field}: expected {expected}, got {got}")]
    Shape {
        /// Which part of the batch.
        field: String,
        /// What the schema asks for.
        expected: u64,
        /// What came.
        got: u64,
    },
    /// The engine's memory limit cannot hold the batch.
    #[error("{field}: needs {needed}, limit {limit}")]
    Capacity {
        /// The config key of the limit.
        field: &'static str,
        /// What the batch needs, in the key's unit.
        needed: u64,
        /// The limit.
        limit: u64,
    },
    /// The values of a sample are finite and what the model makes of them is not.
    #[error("score of sample {sample} is not finite: its values or the model's are too large for 32 bits")]
    NotFinite {
        /// Which sample of the batch.
        sample: usize,
    },
    /// The rows could not be read.
    #[error("store: {0}")]
    Store(String),
}

/// Scores batches with one model: the batcher drives it and the engine implements it.
pub trait Predict: Send + Sync {
    /// Scores every sample of the batch. A sample's score depends on nothing but itself and the
    /// version.
    ///
    /// # Errors
    /// [`PredictError`] when the batch is not of the schema's shape, its rows cannot be read, or a score
    /// would not be a number.
    fn predict(&self, batch: &Batch) -> Result<Scores, PredictError>;

    /// The model's name, version, schema and limits.
    fn describe(&self) -> Description;

    /// Whether the model is loaded and warm.
    fn ready(&self) -> bool;

    /// Brings its metrics up to date: called before they are read, not for every batch.
    fn measure(&self) {}
}
