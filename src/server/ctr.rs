//! The native service, `flechette.v1.Ctr`.
//!
//! A Predict call, and each request of a PredictStream call, takes the path of a scored request
//! (`pending.rs`). A Learn call is checked like one, and stored.

mod request;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tonic::{Code, Request, Response, Status, Streaming};

use super::account::{LearnAccount, Sender};
use super::gate::Call;
use super::labels::Changed;
use super::model::{Model, ShownLabel};
use super::pending::{Pending, ScoreRequest};
use super::proto::predict_stream_response::Result as PredictResult;
use super::proto::{
    self, GetModelRequest, GetModelResponse, Label, LearnResponse, Limits, PredictError, PredictResponse,
    PredictStreamResponse, SetLabelRequest, SetLabelResponse,
};
use super::serving_engine::{NotQueued, Queued, ServingEngine};
use super::status::CallError;
use super::stream::Answers;
use super::traffic::RequestOptions;
use super::{ServerState, convert, labels};
use crate::batcher::{Priority, Terms};
use crate::learnlog::name_of;
use crate::schema::Schema;
use crate::types::{Scores, Version, VersionSelector};

#[cfg(test)]
pub(crate) use request::PredictHead;
pub(crate) use request::{LearnHead, LearnMessage, PredictMessage};
use service::ctr_server::Ctr;
pub(crate) use service::ctr_server::CtrServer;

/// The service of `proto/flechette/v1/ctr.proto`, with [`PredictMessage`] for its `PredictRequest`, and
/// [`LearnMessage`] for its `LearnRequest`.
#[allow(unreachable_pub, clippy::all, clippy::unwrap_used, clippy::expect_used)]
mod service {
    include!("../../proto/generated/server/flechette.v1.rs");
}

impl ScoreRequest for PredictMessage {
    type Form = ();
    type Response = PredictResponse;
    type Answer = PredictStreamResponse;

    const TIMEOUT_FIELD: &'static str = "timeout_ms";

    fn take_model(&mut self) -> String {
        std::mem::take(&mut self.head.model)
    }

    fn timeout(&self) -> Option<Duration> {
        (self.head.timeout_ms > 0).then(|| Duration::from_millis(self.head.timeout_ms.into()))
    }

    fn priority(&self) -> Result<Priority, CallError> {
        match proto::Priority::try_from(self.head.priority) {
            Ok(proto::Priority::Normal) => Ok(Priority::Normal),
            Ok(proto::Priority::High) => Ok(Priority::High),
            Ok(proto::Priority::Low) => Ok(Priority::Low),
            Err(_) => Err(CallError::UnknownPriority { got: self.head.priority }),
        }
    }

    fn take_id(&mut self) -> String {
        std::mem::take(&mut self.head.request_id)
    }

    fn queue(mut self, id: &str, model: &Model, terms: Terms) -> Result<(Queued, ()), NotQueued> {
        let options = RequestOptions {
            version: (self.head.version != 0).then_some(Version(self.head.version)),
            label: std::mem::take(&mut self.head.label),
            id,
            terms,
            logits: self.head.logits,
        };
        let queued = model.queue(&options, |inputs, batch| Ok(inputs.encode(&self, batch)?))?;
        Ok((queued, ()))
    }

    fn response((): (), scores: Scores, schema: &Schema) -> PredictResponse {
        convert::response(scores, schema)
    }

    fn answer(&self) -> impl FnOnce(Result<PredictResponse, CallError>) -> PredictStreamResponse + use<> {
        |answered| {
            let result = match answered {
                Ok(response) => PredictResult::Response(response),
                Err(error) => PredictResult::Error(error.into()),
            };
            PredictStreamResponse { result: Some(result) }
        }
    }
}

impl From<CallError> for PredictError {
    fn from(error: CallError) -> Self {
        // At least 1, because 0 means that the request was not refused because of overload.
        let retry_ms = error.retry().map_or(0, |retry| retry.as_millis().max(1) as u64);
        let status = Status::from(error);
        Self { code: status.code() as i32, message: status.message().to_owned(), retry_ms }
    }
}

impl ServingEngine {
    async fn learn(&self, request: LearnMessage) -> Result<LearnResponse, CallError> {
        let Some(log) = &self.learn_log else {
            return Err(CallError::NoLearning { model: self.predict.describe().model });
        };
        let learner = log.learner().inspect_err(|_| log.count_refused(request.head.labels.len()))?;
        // The batch shows that the samples can be trained on. The log keeps the values before hashing.
        let record = self.inputs.record(request, &mut self.batcher.spare())?;
        let samples = record.samples;
        // The disk may hang. Then the place of the call must become free, whatever its deadline is.
        let at = learner.learn(record, self.batcher.patience()).await?;
        Ok(LearnResponse { samples, segment: name_of(at.segment), position: at.samples })
    }
}

/// The service.
pub(crate) struct CtrService(pub Arc<ServerState>);

#[tonic::async_trait]
impl Ctr for CtrService {
    type PredictStreamStream = Answers<PredictMessage>;

    async fn predict(
        &self,
        mut request: Request<PredictMessage>,
    ) -> Result<Response<PredictResponse>, Status> {
        let call = Call::of(&mut request)?;
        let pending = Pending::begin(&self.0, request.into_inner(), &call)?;
        Ok(Response::new(pending.finish().await?))
    }

    async fn predict_stream(
        &self,
        mut request: Request<Streaming<PredictMessage>>,
    ) -> Result<Response<Self::PredictStreamStream>, Status> {
        let call = Call::of(&mut request)?;
        Ok(Response::new(Answers::new(self.0.clone(), request.into_inner(), call)))
    }

    async fn learn(&self, mut request: Request<LearnMessage>) -> Result<Response<LearnResponse>, Status> {
        let call = Call::of(&mut request)?;
        let mut message = request.into_inner();
        let sender = Sender::new(&call, String::new());
        call.reported();
        let name = std::mem::take(&mut message.head.model);
        let model = self.0.find(name).inspect_err(|error| sender.refused(error))?;
        call.count();
        let mut account = LearnAccount::new(model.clone(), sender, &call, message.head.samples);
        // The gate's timer drops this future at the deadline.
        let result = match call.deadline {
            Some(deadline) if deadline <= Instant::now() => Err(call.arrival.late(deadline)),
            _ => model.main().learn(message).await,
        };
        account.ended(&result);
        Ok(Response::new(result?))
    }

    async fn get_model(
        &self,
        mut request: Request<GetModelRequest>,
    ) -> Result<Response<GetModelResponse>, Status> {
        let call = Call::of(&mut request)?;
        let model = self.0.find(request.into_inner().model)?;
        call.count();
        let engine = model.stable();
        engine.metrics.requests.count(Code::Ok as i32);
        let config = &self.0.config;
        let limits = Limits { max_samples: config.max_samples as u32, max_bytes: config.max_bytes as u64 };
        let labels = model.shown_labels().map(|ShownLabel { label, target, version }| Label {
            label: label.to_owned(),
            version: version.map_or(0, |version| version.0),
            latest: target == VersionSelector::Latest,
        });
        Ok(Response::new(GetModelResponse {
            versions: model.versions().iter().map(|loaded| loaded.version.0).collect(),
            labels: labels.collect(),
            ..convert::description(&engine.predict.describe(), limits)
        }))
    }

    async fn set_label(
        &self,
        mut request: Request<SetLabelRequest>,
    ) -> Result<Response<SetLabelResponse>, Status> {
        let call = Call::of(&mut request)?;
        let request = request.into_inner();
        let name = request.model.clone();
        let changed = labels::set(&self.0, request, &call.id()).await;
        // Found only now: a change waits for the calls that have found the model before it.
        let model = self.0.models.get(&name);
        if let Some(model) = &model {
            call.count();
            let code = changed.as_ref().map_or_else(CallError::code, |_| Code::Ok);
            model.main().metrics.requests.count(code as i32);
        }
        let Changed { version, latest, not_kept } = changed?;
        let version = version.map_or(0, |version| version.0);
        Ok(Response::new(SetLabelResponse { version, not_kept: not_kept.unwrap_or_default(), latest }))
    }
}
