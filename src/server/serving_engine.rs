//! An engine that serves, and a request in its queue.

use std::sync::Arc;
use std::time::Instant;

use super::convert::Inputs;
use super::learn_log::LearnLog;
use super::model::EngineIndex;
use super::shadow::Compare;
use super::status::CallError;
use crate::batcher::{Batcher, Ticket};
use crate::metrics::{LabelMetrics, ModelMetrics};
use crate::predict::Predict;
use crate::types::Version;

/// An engine that serves.
pub(crate) struct ServingEngine {
    pub predict: Arc<dyn Predict>,
    /// `None` for the main engine, whose version changes.
    pub version: Option<Version>,
    pub batcher: Batcher,
    pub metrics: Arc<ModelMetrics>,
    /// `None` if the model takes no samples.
    pub learn_log: Option<Arc<LearnLog>>,
    /// The inputs of its schema, which never changes.
    pub inputs: Arc<Inputs>,
}

impl ServingEngine {
    /// `max_samples` is `server.max_samples`.
    pub(crate) fn new(
        predict: Arc<dyn Predict>,
        batcher: Batcher,
        metrics: Arc<ModelMetrics>,
        max_samples: usize,
    ) -> Self {
        let inputs = Arc::new(Inputs::new(predict.describe().schema, max_samples));
        Self { predict, version: None, batcher, metrics, learn_log: None, inputs }
    }

    /// An engine of one version, which does not change.
    pub(crate) fn fixed(self) -> Self {
        let version = Some(self.predict.describe().version);
        Self { version, ..self }
    }

    pub(crate) fn with_learn_log(self, learn_log: Option<LearnLog>) -> Self {
        Self { learn_log: learn_log.map(Arc::new), ..self }
    }

    /// Whether it can score, and its worker is not stuck.
    pub(crate) fn ready(&self) -> bool {
        self.predict.ready() && !self.batcher.is_stuck()
    }
}

/// A request in the queue of an engine.
pub(crate) struct Queued {
    pub ticket: Ticket,
    pub samples: usize,
    /// Most bytes of its scores.
    pub answer_bytes: usize,
    pub inputs: Arc<Inputs>,
    pub engine: EngineIndex,
    /// The version that must compute the scores.
    pub version: Option<Version>,
    /// The shadow scores it too.
    pub shadow: Option<Compare>,
    /// `None` if it is counted for no label.
    pub label: Option<LabelledRequest>,
}

/// A request that is not queued.
#[derive(Debug)]
pub(crate) struct NotQueued {
    /// The engine that should have scored it, or the main one if none was chosen.
    pub engine: EngineIndex,
    pub error: CallError,
}

impl NotQueued {
    /// The error of a request for this engine.
    pub(crate) fn at<E: Into<CallError>>(engine: EngineIndex) -> impl Fn(E) -> Self {
        move |error| Self { engine, error: error.into() }
    }
}

impl<E: Into<CallError>> From<E> for NotQueued {
    fn from(error: E) -> Self {
        Self { engine: EngineIndex::MAIN, error: error.into() }
    }
}

/// A request that is counted for a label: as failed, if this is dropped before the request has scores.
pub(crate) struct LabelledRequest {
    metrics: Arc<LabelMetrics>,
    /// When it was decoded.
    since: Instant,
    scored: bool,
}

impl LabelledRequest {
    pub(crate) fn begin(metrics: &Arc<LabelMetrics>, since: Instant) -> Self {
        metrics.requests.increment(1);
        Self { metrics: metrics.clone(), since, scored: false }
    }

    /// It has its scores.
    pub(crate) fn scored(mut self) {
        self.metrics.seconds.record(self.since.elapsed());
        self.scored = true;
    }
}

impl Drop for LabelledRequest {
    fn drop(&mut self) {
        if !self.scored {
            self.metrics.failures.increment(1);
        }
    }
}
