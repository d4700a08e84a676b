//! The native service, `flechette.v1.Ctr`.
//!
//! A call finds the model, converts the message, queues the batch, awaits the ticket and converts the scores.
//! A guard ([`Account`]) counts and times each Predict call of a loaded model once, even if the client
//! disconnects.

use std::sync::Arc;
use std::time::Instant;

use tonic::{Code, Request, Response, Status};

use super::Shared;
use super::convert;
use super::gate::Call;
use super::proto::ctr_server::Ctr;
use super::proto::{
    GetModelRequest, GetModelResponse, LearnRequest, LearnResponse, Limits, PredictRequest, PredictResponse,
};
use super::served::{Account, Served};
use super::status::CallError;
use crate::batcher::Terms;
use crate::learnlog::name_of;
use crate::metrics::ModelMetrics;

impl Served {
    async fn predict(&self, request: PredictRequest, terms: Terms) -> Result<PredictResponse, CallError> {
        let requested = (request.version != 0).then_some(request.version);
        let queued = self.queue(requested, terms, |inputs, batch| Ok(inputs.encode(request, batch)?))?;
        let (scores, inputs) = self.scores(queued).await?;
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

/// The service.
pub(crate) struct CtrService(pub Arc<Shared>);

#[tonic::async_trait]
impl Ctr for CtrService {
    async fn predict(
        &self,
        mut request: Request<PredictRequest>,
    ) -> Result<Response<PredictResponse>, Status> {
        let started = Instant::now();
        let call = request.extensions_mut().remove::<Call>();
        let deadline = call.as_ref().and_then(|call| call.deadline);
        let terms = Terms { deadline, ..Terms::default() };
        let mut message = request.into_inner();
        let served = self.0.find(std::mem::take(&mut message.model))?;
        let mut account = Account::new(served, started, terms);
        call.iter().for_each(Call::count);
        let result = account.served.predict(message, terms).await;
        account.close(&result);
        Ok(Response::new(result?))
    }

    async fn learn(&self, mut request: Request<LearnRequest>) -> Result<Response<LearnResponse>, Status> {
        let call = request.extensions_mut().remove::<Call>();
        let mut message = request.into_inner();
        let served = self.0.find(std::mem::take(&mut message.model))?;
        // The gate's timer drops this future at the deadline.
        let mut account = LearnAccount(&served.metrics, Code::Cancelled);
        if let Some(deadline) = call.as_ref().and_then(|call| call.deadline)
            && deadline <= Instant::now()
        {
            account.1 = Code::DeadlineExceeded;
            return Err(Status::deadline_exceeded("deadline passed before the samples were stored"));
        }
        call.iter().for_each(Call::count);
        let result = served.learn(message).await;
        account.1 = result.as_ref().map_or_else(CallError::code, |_| Code::Ok);
        Ok(Response::new(result?))
    }

    async fn get_model(
        &self,
        mut request: Request<GetModelRequest>,
    ) -> Result<Response<GetModelResponse>, Status> {
        let call = request.extensions_mut().remove::<Call>();
        let served = self.0.find(request.into_inner().model)?;
        call.iter().for_each(Call::count);
        served.metrics.requests.count(Code::Ok as i32);
        let limits = Limits {
            max_samples: served.limits.max_samples as u32,
            max_bytes: served.limits.max_bytes as u64,
        };
        Ok(Response::new(convert::description(&served.predict.describe(), limits)))
    }
}
