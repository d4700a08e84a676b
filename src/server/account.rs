//! A request for scores, from its arrival to its end: what is counted, logged and traced of it.

use std::sync::Arc;
use std::time::Instant;

use tonic::Code;

use super::gate::{Arrival, Call};
use super::model::{EngineIndex, Model};
use super::report::{self, Instants, Report, Steps};
use super::serving_engine::Queued;
use super::status::CallError;
use crate::batcher::{QueueProgress, Terms};
use crate::types::{Scores, Times, Version};

/// Who sent a request, and when.
pub(crate) struct Sender {
    arrival: Arc<Arrival>,
    /// Its own id, or an empty text.
    id: String,
    /// When its message was decoded.
    decoded: Instant,
    /// Whether it is one of a stream.
    of_stream: bool,
}

impl Sender {
    /// The sender of a request that is decoded now. Its own id may be empty.
    pub(crate) fn new(call: &Call, id: String) -> Self {
        let (arrival, of_stream) = (call.arrival.clone(), call.charge.is_stream());
        Self { arrival, id, decoded: Instant::now(), of_stream }
    }

    /// The request found no model.
    pub(crate) fn refused(&self, error: &CallError) {
        let text = report::wants_errors(&self.arrival.state).then(|| error.to_string());
        Report { code: error.code(), error: text.as_deref(), ..self.report(None) }.tell();
    }

    /// When the request arrived. Only the client knows when it sent a message of a stream.
    pub(crate) fn arrived(&self) -> Instant {
        if self.of_stream { self.decoded } else { self.arrival.at }
    }

    /// Whether an error is reported with its reason.
    fn reports(&self, fault: bool) -> bool {
        fault || report::wants_errors(&self.arrival.state)
    }

    /// A request that ends now, of no model.
    fn report(&self, steps: Option<Steps>) -> Report<'_> {
        let Self { arrival, id, decoded, .. } = self;
        Report {
            arrival,
            id,
            model: None,
            version: None,
            samples: 0,
            code: Code::Ok,
            error: None,
            fault: false,
            times: Instants { arrived: self.arrived(), decoded: *decoded, steps, ended: Instant::now() },
        }
    }
}

/// Counts, times and reports a request for a loaded model when it is dropped, even if its client has
/// disconnected.
pub(crate) struct Account {
    pub model: Arc<Model>,
    /// The engine that scores it.
    engine: EngineIndex,
    sender: Sender,
    terms: Terms,
    samples: usize,
    /// `None` until it is queued.
    progress: Option<QueueProgress>,
    /// Those of its batches, if it was scored.
    times: Times,
    version: Option<Version>,
    result: CallResult,
}

/// How a request or a Learn call ends.
#[derive(Default)]
struct CallResult {
    /// `None` if it is dropped before its answer.
    code: Option<Code>,
    /// Kept if it is reported.
    error: Option<String>,
    /// Whether the server is at fault.
    fault: bool,
}

impl CallResult {
    fn ok() -> Self {
        Self { code: Some(Code::Ok), ..Self::default() }
    }

    fn failed(error: &CallError, sender: &Sender) -> Self {
        let fault = error.is_fault();
        let text = sender.reports(fault).then(|| error.to_string());
        Self { code: Some(error.code()), error: text, fault }
    }

    /// The code, also if there was no answer.
    fn code(&self, deadline: Option<Instant>, ended: Instant) -> Code {
        self.code.unwrap_or_else(|| {
            let expired = deadline.is_some_and(|deadline| deadline <= ended);
            if expired { Code::DeadlineExceeded } else { Code::Cancelled }
        })
    }
}

impl Account {
    pub(crate) fn new(model: Arc<Model>, sender: Sender, terms: Terms) -> Self {
        let (samples, progress, times) = (0, None, Times::default());
        let (engine, version, result) = (EngineIndex::MAIN, None, CallResult::default());
        Self { model, engine, sender, terms, samples, progress, times, version, result }
    }

    /// The request's own id.
    pub(crate) fn id(&self) -> &str {
        &self.sender.id
    }

    /// The request was queued.
    pub(crate) fn queued(&mut self, queued: &mut Queued) {
        self.engine = queued.engine;
        self.samples = queued.samples;
        self.progress = queued.ticket.take_progress();
    }

    /// The request was refused before it was queued at this engine.
    pub(crate) fn not_queued(&mut self, engine: EngineIndex, error: &CallError) {
        self.engine = engine;
        self.failed(error);
    }

    /// The request was scored.
    pub(crate) fn scored(&mut self, scores: &Scores) {
        self.version = Some(scores.version);
        self.times = scores.times;
        self.result = CallResult::ok();
    }

    /// The answer is an error.
    pub(crate) fn failed(&mut self, error: &CallError) {
        self.result = CallResult::failed(error, &self.sender);
        // Not if the memory of all calls is taken, which says nothing about this model.
        if matches!(error, CallError::Batch(_)) && error.retry().is_some() {
            self.model.pressure().refused(self.terms.priority);
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let steps = self.progress.as_ref().map(|progress| Steps {
            queued: progress.queued,
            taken: progress.taken(),
            times: self.times,
        });
        let report = self.sender.report(steps);
        let Instants { decoded, ended, .. } = report.times;
        let code = self.result.code(self.terms.deadline, ended);
        let took = ended.saturating_duration_since(decoded);
        let metrics = &self.model.engine(self.engine).metrics;
        metrics.requests.count(code as i32);
        metrics.batches.request_seconds.record(took);
        let statistics = &metrics.statistics;
        let total = if code == Code::Ok { &statistics.success } else { &statistics.fail };
        total.add(1, took);
        let Self { samples, version, result: CallResult { ref error, fault, .. }, .. } = *self;
        let (model, error) = (Some(self.model.name()), error.as_deref());
        Report { model, version, samples, code, error, fault, ..report }.tell();
    }
}

/// Counts and reports a Learn call for a loaded model when it is dropped.
pub(crate) struct LearnAccount {
    model: Arc<Model>,
    sender: Sender,
    deadline: Option<Instant>,
    samples: usize,
    result: CallResult,
}

impl LearnAccount {
    pub(crate) fn new(model: Arc<Model>, sender: Sender, call: &Call, samples: u32) -> Self {
        let (deadline, samples) = (call.deadline, samples as usize);
        Self { model, sender, deadline, samples, result: CallResult::default() }
    }

    pub(crate) fn ended<T>(&mut self, result: &Result<T, CallError>) {
        self.result = match result {
            Ok(_) => CallResult::ok(),
            Err(error) => CallResult::failed(error, &self.sender),
        };
    }
}

impl Drop for LearnAccount {
    fn drop(&mut self) {
        let report = self.sender.report(None);
        let code = self.result.code(self.deadline, report.times.ended);
        self.model.main().metrics.requests.count(code as i32);
        let Self { samples, result: CallResult { ref error, fault, .. }, .. } = *self;
        let (model, error) = (Some(self.model.name()), error.as_deref());
        Report { model, samples, code, error, fault, ..report }.tell();
    }
}
