//! An engine that serves, and what is counted of each request for it.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use tonic::Code;

use super::RequestLimits;
use super::convert::Inputs;
use super::model::Model;
use super::shadow::Compare;
use super::status::CallError;
use crate::batcher::{Batcher, Terms, Ticket};
use crate::learnlog::Learner;
use crate::metrics::ModelMetrics;
use crate::predict::Predict;
use crate::schema::Schema;
use crate::types::Version;

/// An engine that serves.
pub(crate) struct Served {
    pub predict: Arc<dyn Predict>,
    /// `None` for the main engine, whose version changes.
    pub version: Option<Version>,
    pub batcher: Batcher,
    pub metrics: Arc<ModelMetrics>,
    /// `None` if the model takes no samples.
    pub learner: Option<Learner>,
    pub limits: RequestLimits,
    inputs: RwLock<Arc<Inputs>>,
}

impl Served {
    pub(crate) fn new(
        predict: Arc<dyn Predict>,
        batcher: Batcher,
        metrics: Arc<ModelMetrics>,
        limits: RequestLimits,
    ) -> Self {
        let description = predict.describe();
        let inputs = RwLock::new(Arc::new(Inputs::new(description.schema, limits.max_samples)));
        Self { predict, version: None, batcher, metrics, learner: None, limits, inputs }
    }

    /// An engine of one version, which does not change.
    pub(crate) fn fixed(self) -> Self {
        let version = Some(self.predict.describe().version);
        Self { version, ..self }
    }

    pub(crate) fn with_learner(self, learner: Option<Learner>) -> Self {
        Self { learner, ..self }
    }

    /// The inputs of `schema`. They are rebuilt when the model serves a version with a new schema.
    pub(crate) fn inputs(&self, schema: &Arc<Schema>) -> Arc<Inputs> {
        let known = self.inputs.read().unwrap_or_else(PoisonError::into_inner).clone();
        if Arc::ptr_eq(&known.schema, schema) {
            return known;
        }
        let inputs = Arc::new(Inputs::new(schema.clone(), self.limits.max_samples));
        *self.inputs.write().unwrap_or_else(PoisonError::into_inner) = inputs.clone();
        inputs
    }
}

/// A request in the queue of an engine.
pub(crate) struct Queued {
    pub ticket: Ticket,
    pub inputs: Arc<Inputs>,
    /// The index of the engine in its model.
    pub engine: usize,
    /// The version that must compute the scores.
    pub version: Option<u64>,
    /// The shadow scores it too.
    pub shadow: Option<Compare>,
}

/// Counts and times one scored request when it is dropped, even if its client has disconnected.
pub(crate) struct Account {
    pub model: Arc<Model>,
    /// The engine that scores it.
    engine: usize,
    started: Instant,
    terms: Terms,
    /// The client's name of the request, for the log.
    id: String,
    /// `None` if the request is dropped before its answer.
    code: Option<Code>,
}

impl Account {
    pub(crate) fn new(model: Arc<Model>, started: Instant, terms: Terms, id: String) -> Self {
        Self { model, engine: 0, started, terms, id, code: None }
    }

    /// The request was queued.
    pub(crate) fn queued(&mut self, queued: &Queued) {
        self.engine = queued.engine;
    }

    /// Sets the code of the answer.
    pub(crate) fn close<T>(&mut self, result: &Result<T, CallError>) {
        self.code = Some(result.as_ref().map_or_else(CallError::code, |_| Code::Ok));
        if result.as_ref().is_err_and(|error| error.retry().is_some()) {
            self.model.pressure().refused(self.terms.priority);
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let now = Instant::now();
        let expired = self.terms.deadline.is_some_and(|deadline| deadline <= now);
        let unanswered = if expired { Code::DeadlineExceeded } else { Code::Cancelled };
        let (code, took) = (self.code.unwrap_or(unanswered), now.saturating_duration_since(self.started));
        let metrics = &self.model.engine(self.engine).metrics;
        metrics.requests.count(code as i32);
        metrics.batches.request_seconds.record(took);
        let statistics = &metrics.statistics;
        let total = if code == Code::Ok { &statistics.success } else { &statistics.fail };
        total.add(1, took);
        let (model, id, took_us) = (self.model.name(), &self.id, took.as_micros());
        tracing::debug!(model, id, ?code, took_us, "request");
    }
}
