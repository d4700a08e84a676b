//! A served model, and the path of a scored request that all protocols share: check the version, convert the
//! message to a batch, queue the batch, await the scores.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use tonic::Code;

use super::RequestLimits;
use super::convert::Inputs;
use super::pressure::Pressure;
use super::status::CallError;
use crate::batcher::{Batcher, Terms, Ticket};
use crate::learnlog::Learner;
use crate::metrics::ModelMetrics;
use crate::predict::Predict;
use crate::schema::Schema;
use crate::types::{Batch, Scores};

/// A served model.
pub(crate) struct Served {
    pub predict: Arc<dyn Predict>,
    pub batcher: Batcher,
    pub metrics: Arc<ModelMetrics>,
    /// `None` if the model takes no samples.
    pub learner: Option<Learner>,
    pub limits: RequestLimits,
    pub pressure: Arc<Pressure>,
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
        let pressure = Arc::new(Pressure::new());
        Self { predict, batcher, metrics, learner: None, limits, pressure, inputs }
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

    /// Checks that the requested version serves.
    ///
    /// # Errors
    /// [`CallError::NoVersion`].
    pub(crate) fn check_version(&self, requested: Option<u64>, serving: u64) -> Result<(), CallError> {
        match requested {
            Some(requested) if requested != serving => {
                Err(CallError::NoVersion { model: self.predict.describe().model, serving, requested })
            }
            _ => Ok(()),
        }
    }

    /// Queues the batch that `encode` writes.
    ///
    /// # Errors
    /// When another version serves, the request cannot be converted, or the queue is full.
    pub(crate) fn queue(
        &self,
        asked: Asked,
        encode: impl FnOnce(&Inputs, &mut Batch) -> Result<(), CallError>,
    ) -> Result<Queued, CallError> {
        let description = self.predict.describe();
        self.check_version(asked.version, description.version.0)?;
        let inputs = self.inputs(&description.schema);
        let started = Instant::now();
        let mut batch = self.batcher.spare();
        encode(&inputs, &mut batch)?;
        batch.logits = asked.logits;
        self.metrics.statistics.input.add(1, started.elapsed());
        let ticket = self.batcher.submit(batch, asked.terms)?;
        Ok(Queued { ticket, inputs, requested: asked.version })
    }

    /// Awaits the scores of a queued request.
    ///
    /// # Errors
    /// When the batch failed, or another version than the requested one has computed it.
    pub(crate) async fn scores(&self, queued: Queued) -> Result<(Scores, Arc<Inputs>), CallError> {
        let scores = queued.ticket.await?;
        // The version may have changed while the request was queued.
        self.check_version(queued.requested, scores.version.0)?;
        Ok((scores, queued.inputs))
    }
}

/// What a request asks for, besides its samples.
#[derive(Clone, Copy)]
pub(crate) struct Asked {
    /// The version that must compute the scores; `None`: the one that serves.
    pub version: Option<u64>,
    pub terms: Terms,
    pub logits: bool,
}

/// A request in the queue.
pub(crate) struct Queued {
    ticket: Ticket,
    inputs: Arc<Inputs>,
    requested: Option<u64>,
}

/// Counts and times one scored request when it is dropped, even if its client has disconnected.
pub(crate) struct Account {
    pub served: Arc<Served>,
    started: Instant,
    terms: Terms,
    /// `None` if the request is dropped before its answer.
    code: Option<Code>,
}

impl Account {
    pub(crate) fn new(served: Arc<Served>, started: Instant, terms: Terms) -> Self {
        Self { served, started, terms, code: None }
    }

    /// Sets the code of the answer.
    pub(crate) fn close<T>(&mut self, result: &Result<T, CallError>) {
        self.code = Some(result.as_ref().map_or_else(CallError::code, |_| Code::Ok));
        if result.as_ref().is_err_and(|error| error.retry().is_some()) {
            self.served.pressure.refused(self.terms.priority);
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let now = Instant::now();
        let expired = self.terms.deadline.is_some_and(|deadline| deadline <= now);
        let unanswered = if expired { Code::DeadlineExceeded } else { Code::Cancelled };
        let (code, took) = (self.code.unwrap_or(unanswered), now.saturating_duration_since(self.started));
        let metrics = &self.served.metrics;
        metrics.requests.count(code as i32);
        metrics.batches.request_seconds.record(took);
        let statistics = &metrics.statistics;
        let total = if code == Code::Ok { &statistics.success } else { &statistics.fail };
        total.add(1, took);
    }
}
