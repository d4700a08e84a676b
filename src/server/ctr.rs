//! The native service, `flechette.v1.Ctr`.
//!
//! A call finds the model, converts the message, queues the batch, awaits the ticket and converts the scores.
//! A guard ([`Account`]) counts and times each Predict call of a loaded model once, even if the client
//! disconnects.

use std::sync::Arc;
use std::time::Instant;

use tonic::{Code, Request, Response, Status};

use super::gate::Call;
use super::proto::ctr_server::Ctr;
use super::proto::{
    GetModelRequest, GetModelResponse, Label, LearnRequest, LearnResponse, Limits, PredictRequest,
    PredictResponse, SetLabelRequest, SetLabelResponse,
};
use super::served::{Account, Served};
use super::status::CallError;
use super::traffic::Ask;
use super::{Shared, convert, labels};
use crate::learnlog::name_of;
use crate::metrics::ModelMetrics;
use crate::types::Follow;

impl Account {
    async fn predict(&mut self, mut request: PredictRequest) -> Result<PredictResponse, CallError> {
        let ask = Ask {
            version: (request.version != 0).then_some(request.version),
            label: std::mem::take(&mut request.label),
            id: std::mem::take(&mut request.request_id),
        };
        let queued = self.queue(&ask, |inputs, batch| Ok(inputs.encode(request, batch)?))?;
        let (scores, inputs) = self.scores(queued).await?;
        Ok(convert::response(scores, &inputs.schema))
    }
}

impl Served {
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
        let mut message = request.into_inner();
        let model = self.0.find(std::mem::take(&mut message.model))?;
        let mut account = Account::new(self.0.clone(), model, started, deadline);
        call.iter().for_each(Call::count);
        let result = account.predict(message).await;
        account.close(&result);
        Ok(Response::new(result?))
    }

    async fn learn(&self, mut request: Request<LearnRequest>) -> Result<Response<LearnResponse>, Status> {
        let call = request.extensions_mut().remove::<Call>();
        let mut message = request.into_inner();
        let model = self.0.find(std::mem::take(&mut message.model))?;
        let served = model.main();
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
        let model = self.0.find(request.into_inner().model)?;
        call.iter().for_each(Call::count);
        let served = model.stable();
        served.metrics.requests.count(Code::Ok as i32);
        let limits = Limits {
            max_samples: served.limits.max_samples as u32,
            max_bytes: served.limits.max_bytes as u64,
        };
        let labels = model.named().map(|(label, follow, version)| Label {
            label: label.to_owned(),
            version: version.unwrap_or(0),
            latest: follow == Follow::Latest,
        });
        Ok(Response::new(GetModelResponse {
            versions: model.versions().into_iter().map(|(version, _)| version).collect(),
            labels: labels.collect(),
            ..convert::description(&served.predict.describe(), limits)
        }))
    }

    async fn set_label(
        &self,
        mut request: Request<SetLabelRequest>,
    ) -> Result<Response<SetLabelResponse>, Status> {
        let call: Option<Call> = request.extensions_mut().remove();
        let request = request.into_inner();
        let model = self.0.models.get(&request.model);
        let changed = labels::set(&self.0, request).await;
        if let (Some(call), Some(model)) = (call, model) {
            call.count();
            let code = changed.as_ref().map_or_else(CallError::code, |_| Code::Ok);
            model.main().metrics.requests.count(code as i32);
        }
        Ok(Response::new(SetLabelResponse { version: changed?.map_or(0, |version| version.0) }))
    }
}
