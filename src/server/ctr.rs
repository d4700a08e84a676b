//! The native service, `flechette.v1.Ctr`.
//!
//! A call finds the model, converts the message, queues the batch, awaits the ticket and converts the scores.
//! A guard ([`Account`]) counts and times each Predict call of a loaded model once, even if the client
//! disconnects.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use tonic::{Code, Request, Response, Status};

use super::convert::{self, Inputs, clip};
use super::gate::Call;
use super::not_served::Reason;
use super::proto::ctr_server::Ctr;
use super::proto::{
    GetModelRequest, GetModelResponse, LearnRequest, LearnResponse, Limits, PredictRequest, PredictResponse,
};
use super::status::CallError;
use super::{RequestLimits, Shared};
use crate::batcher::Batcher;
use crate::learnlog::{Learner, name_of};
use crate::metrics::ModelMetrics;
use crate::predict::Predict;
use crate::schema::Schema;

/// A served model.
pub(crate) struct Served {
    pub predict: Arc<dyn Predict>,
    pub batcher: Batcher,
    pub metrics: Arc<ModelMetrics>,
    /// `None` if the model takes no samples.
    pub learner: Option<Learner>,
    inputs: RwLock<Arc<Inputs>>,
    limits: RequestLimits,
}

impl Served {
    pub(crate) fn new(
        predict: Arc<dyn Predict>,
        batcher: Batcher,
        metrics: Arc<ModelMetrics>,
        limits: RequestLimits,
    ) -> Self {
        let description = predict.describe();
        let limits = RequestLimits { max_samples: limits.max_samples.min(description.max_samples), ..limits };
        let inputs = RwLock::new(Arc::new(Inputs::new(description.schema, limits.max_samples)));
        Self { predict, batcher, metrics, learner: None, inputs, limits }
    }

    pub(crate) fn with_learner(self, learner: Option<Learner>) -> Self {
        Self { learner, ..self }
    }

    /// The inputs of `schema`. They are rebuilt when the model serves a version with a new schema.
    fn inputs(&self, schema: &Arc<Schema>) -> Arc<Inputs> {
        let known = self.inputs.read().unwrap_or_else(PoisonError::into_inner).clone();
        if Arc::ptr_eq(&known.schema, schema) {
            return known;
        }
        let inputs = Arc::new(Inputs::new(schema.clone(), self.limits.max_samples));
        *self.inputs.write().unwrap_or_else(PoisonError::into_inner) = inputs.clone();
        inputs
    }

    async fn score(
        &self,
        request: PredictRequest,
        deadline: Option<Instant>,
    ) -> Result<PredictResponse, CallError> {
        let description = self.predict.describe();
        let requested = request.version;
        let check = |serving: u64| {
            let model = || self.predict.describe().model;
            let wrong = requested != 0 && requested != serving;
            if wrong { Err(CallError::NoVersion { model: model(), serving, requested }) } else { Ok(()) }
        };
        check(description.version.0)?;
        let inputs = self.inputs(&description.schema);
        let mut batch = self.batcher.spare();
        inputs.encode(request, &mut batch)?;
        let scores = self.batcher.submit(batch, deadline)?.await?;
        // The version may have changed while the request was queued.
        check(scores.version.0)?;
        Ok(convert::response(scores, &inputs.schema))
    }

    async fn learn(&self, request: LearnRequest) -> Result<LearnResponse, CallError> {
        let description = self.predict.describe();
        let Some(learner) = &self.learner else {
            return Err(CallError::NoLearning { model: description.model });
        };
        // The batch shows that the samples can be trained on. The log keeps the values before hashing.
        let record = self.inputs(&description.schema).record(request, &mut self.batcher.spare())?;
        let samples = record.samples;
        let at = learner.learn(record).await?;
        Ok(LearnResponse { samples, segment: name_of(at.segment), position: at.samples })
    }
}

/// Counts one Learn call when it is dropped.
struct LearnAccount<'a>(&'a ModelMetrics, Code);

impl Drop for LearnAccount<'_> {
    fn drop(&mut self) {
        self.0.requests.count(self.1 as i32);
    }
}

/// Counts and times one Predict call when it is dropped.
struct Account<'a> {
    metrics: &'a ModelMetrics,
    started: Instant,
    deadline: Option<Instant>,
    /// `None` if the call is dropped before its answer.
    code: Option<Code>,
}

impl Drop for Account<'_> {
    fn drop(&mut self) {
        let now = Instant::now();
        let expired = self.deadline.is_some_and(|deadline| deadline <= now);
        let unanswered = if expired { Code::DeadlineExceeded } else { Code::Cancelled };
        self.metrics.requests.count(self.code.unwrap_or(unanswered) as i32);
        self.metrics.batches.request_seconds.record(now.saturating_duration_since(self.started));
    }
}

/// The service.
pub(crate) struct CtrService(pub Arc<Shared>);

impl CtrService {
    fn find(&self, model: String) -> Result<Arc<Served>, CallError> {
        match self.0.models.get(&model) {
            Some(served) => Ok(served),
            None => Err(match self.0.not_served.get(&model) {
                None => CallError::NoModel { model: clip(model) },
                Some(Reason::Loading) => CallError::Loading { model },
                Some(Reason::Refused(_)) => CallError::Refused { model },
            }),
        }
    }
}

#[tonic::async_trait]
impl Ctr for CtrService {
    async fn predict(
        &self,
        mut request: Request<PredictRequest>,
    ) -> Result<Response<PredictResponse>, Status> {
        let started = Instant::now();
        let call = request.extensions_mut().remove::<Call>();
        let deadline = call.as_ref().and_then(|call| call.deadline);
        let mut message = request.into_inner();
        let served = self.find(std::mem::take(&mut message.model))?;
        let mut account = Account { metrics: &served.metrics, started, deadline, code: None };
        if let Some(call) = call {
            call.counted.store(true, Ordering::Relaxed);
        }
        let result = served.score(message, deadline).await;
        if result.as_ref().is_err_and(|error| error.retry().is_some()) {
            self.0.pressure.refused();
        }
        account.code = Some(result.as_ref().map_or_else(CallError::code, |_| Code::Ok));
        Ok(Response::new(result?))
    }

    async fn learn(&self, mut request: Request<LearnRequest>) -> Result<Response<LearnResponse>, Status> {
        let call = request.extensions_mut().remove::<Call>();
        let mut message = request.into_inner();
        let served = self.find(std::mem::take(&mut message.model))?;
        // The gate's timer drops this future at the deadline.
        let mut account = LearnAccount(&served.metrics, Code::Cancelled);
        if let Some(deadline) = call.as_ref().and_then(|call| call.deadline)
            && deadline <= Instant::now()
        {
            account.1 = Code::DeadlineExceeded;
            return Err(Status::deadline_exceeded("deadline passed before the samples were stored"));
        }
        if let Some(call) = call {
            call.counted.store(true, Ordering::Relaxed);
        }
        let result = served.learn(message).await;
        account.1 = result.as_ref().map_or_else(CallError::code, |_| Code::Ok);
        Ok(Response::new(result?))
    }

    async fn get_model(
        &self,
        mut request: Request<GetModelRequest>,
    ) -> Result<Response<GetModelResponse>, Status> {
        let call = request.extensions_mut().remove::<Call>();
        let served = self.find(request.into_inner().model)?;
        if let Some(call) = call {
            call.counted.store(true, Ordering::Relaxed);
        }
        served.metrics.requests.count(Code::Ok as i32);
        let limits = Limits {
            max_samples: served.limits.max_samples as u32,
            max_bytes: served.limits.max_bytes as u64,
        };
        Ok(Response::new(convert::description(&served.predict.describe(), limits)))
    }
}
