//! The KServe v2 protocol, `inference.GRPCInferenceService`.
//!
//! - `request`: a request as the server reads it;
//! - `tensors`: from input tensors to a batch;
//! - `terms`: the deadline, the priority and the label of a request;
//! - `answers`: responses: scores, descriptions of models, statistics;
//! - `repository`: the list of models, and loading and unloading them.
//!
//! A request, alone or in a stream, takes the path of a native one (`pending.rs`, `stream.rs`), so its
//! scores are the same to the bit, and the same limits, deadlines and metrics apply.

pub(crate) mod answers;
mod repository;
pub(crate) mod request;
pub(crate) mod tensors;
pub(crate) mod terms;

use std::sync::Arc;
use std::time::Duration;

use tonic::{Code, Request, Response, Status, Streaming};

use super::ServerState;
use super::convert::clip;
use super::gate::Call;
use super::inference::*;
use super::model::{EngineIndex, Model};
use super::pending::{MAX_ID, Pending, ScoreRequest};
use super::repository::Change;
use super::serving_engine::{NotQueued, Queued};
use super::status::CallError;
use super::stream::Answers;
use super::traffic::RequestOptions;
use crate::batcher::{Priority, Terms};
use crate::schema::Schema;
use crate::types::{Scores, Version};
use answers::Form;
pub(crate) use repository::wait_for;
pub(crate) use request::{InferHead, InferRequest};
use service::grpc_inference_service_server::GrpcInferenceService;
pub(crate) use service::grpc_inference_service_server::GrpcInferenceServiceServer;
use tensors::EncodedInputs;

/// The service of `proto/inference/kserve.proto`, with [`InferRequest`] for its `ModelInferRequest`.
#[allow(unreachable_pub, clippy::all, clippy::unwrap_used, clippy::expect_used)]
mod service {
    include!("../../../proto/generated/server/inference.rs");
}

/// The service.
pub(crate) struct KserveService(pub Arc<ServerState>);

/// The version that a request names; `None`: the one that serves.
fn version(text: String) -> Result<Option<Version>, CallError> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(|number| Some(Version(number))).map_err(|_| CallError::VersionText { got: clip(text) })
}

impl ScoreRequest for InferRequest {
    type Form = Form;
    type Response = ModelInferResponse;
    type Answer = ModelStreamInferResponse;

    const TIMEOUT_FIELD: &'static str = "parameters: timeout";

    fn take_model(&mut self) -> String {
        std::mem::take(&mut self.head.model_name)
    }

    fn timeout(&self) -> Option<Duration> {
        terms::timeout(&self.head)
    }

    fn priority(&self) -> Result<Priority, CallError> {
        terms::priority(&self.head)
    }

    fn take_id(&mut self) -> String {
        std::mem::take(&mut self.head.id)
    }

    fn queue(self, id: &str, model: &Model, terms: Terms) -> Result<(Queued, Form), NotQueued> {
        let Self { head, message } = self;
        terms::check_timeout(&head)?;
        let label = terms::label(&head)?;
        let outputs = answers::outputs(&head.outputs)?;
        let version = version(head.model_version)?;
        let parts = EncodedInputs::find(&message)?;
        let raw = parts.are_raw();
        let options = RequestOptions { version, label, id, terms, logits: outputs.logit };
        let queued = model.queue(&options, |inputs, batch| parts.encode(inputs, batch))?;
        Ok((queued, Form { model: model.name().to_owned(), id: id.to_owned(), raw, outputs }))
    }

    fn response(form: Form, scores: Scores, schema: &Schema) -> ModelInferResponse {
        form.response(scores, schema)
    }

    fn answer(
        &self,
    ) -> impl FnOnce(Result<ModelInferResponse, CallError>) -> ModelStreamInferResponse + use<> {
        let id = Some(&self.head.id).filter(|id| id.len() <= MAX_ID).cloned().unwrap_or_default();
        |answered| answers::of_stream(answered, id)
    }
}

impl KserveService {
    /// The served model, and its engine of the version that the request names, if it names one. Counts the
    /// call.
    fn describe(
        &self,
        call: &Call,
        name: String,
        text: String,
    ) -> Result<(Arc<Model>, Option<EngineIndex>), CallError> {
        let model = self.0.find(name)?;
        call.count();
        let find = |requested| {
            let found = model.find(requested);
            found.map_err(|error| self.0.unless_loading(model.name(), error))
        };
        let engine = version(text).and_then(|requested| requested.map(find).transpose());
        let code = engine.as_ref().map_or_else(CallError::code, |_| Code::Ok);
        model.main().metrics.requests.count(code as i32);
        Ok((model, engine?))
    }
}

#[tonic::async_trait]
impl GrpcInferenceService for KserveService {
    type ModelStreamInferStream = Answers<InferRequest>;

    async fn server_live(
        &self,
        _: Request<ServerLiveRequest>,
    ) -> Result<Response<ServerLiveResponse>, Status> {
        Ok(Response::new(ServerLiveResponse { live: true }))
    }

    async fn server_ready(
        &self,
        _: Request<ServerReadyRequest>,
    ) -> Result<Response<ServerReadyResponse>, Status> {
        Ok(Response::new(ServerReadyResponse { ready: self.0.ready() }))
    }

    async fn model_ready(
        &self,
        request: Request<ModelReadyRequest>,
    ) -> Result<Response<ModelReadyResponse>, Status> {
        let ModelReadyRequest { name, version: text } = request.into_inner();
        let requested = version(text)?;
        // An unknown model is not an error: clients ask whether it is there.
        let ready = self.0.models.get(&name).is_some_and(|model| match requested {
            None => model.stable().ready(),
            Some(version) => model.find(version).is_ok_and(|engine| model.engine(engine).ready()),
        });
        Ok(Response::new(ModelReadyResponse { ready }))
    }

    async fn server_metadata(
        &self,
        _: Request<ServerMetadataRequest>,
    ) -> Result<Response<ServerMetadataResponse>, Status> {
        Ok(Response::new(answers::server_metadata()))
    }

    async fn model_metadata(
        &self,
        mut request: Request<ModelMetadataRequest>,
    ) -> Result<Response<ModelMetadataResponse>, Status> {
        let call = Call::of(&mut request)?;
        let ModelMetadataRequest { name, version } = request.into_inner();
        let (model, _) = self.describe(&call, name, version)?;
        Ok(Response::new(answers::model_metadata(&model)))
    }

    async fn model_infer(
        &self,
        mut request: Request<InferRequest>,
    ) -> Result<Response<ModelInferResponse>, Status> {
        let call = Call::of(&mut request)?;
        let pending = Pending::begin(&self.0, request.into_inner(), &call)?;
        Ok(Response::new(pending.finish().await?))
    }

    async fn model_stream_infer(
        &self,
        mut request: Request<Streaming<InferRequest>>,
    ) -> Result<Response<Self::ModelStreamInferStream>, Status> {
        let call = Call::of(&mut request)?;
        Ok(Response::new(Answers::new(self.0.clone(), request.into_inner(), call)))
    }

    async fn model_statistics(
        &self,
        mut request: Request<ModelStatisticsRequest>,
    ) -> Result<Response<ModelStatisticsResponse>, Status> {
        let call = Call::of(&mut request)?;
        let ModelStatisticsRequest { name, version } = request.into_inner();
        let (models, engine) = if name.is_empty() {
            (self.0.models.all(), None)
        } else {
            let (model, engine) = self.describe(&call, name, version)?;
            (vec![model], engine)
        };
        let of = |model: &Arc<Model>| match engine {
            Some(engine) => vec![answers::statistics(model.engine(engine))],
            None => model.versions().iter().map(|loaded| answers::statistics(loaded.engine)).collect(),
        };
        let model_stats = models.iter().flat_map(of).collect();
        Ok(Response::new(ModelStatisticsResponse { model_stats }))
    }

    async fn repository_index(
        &self,
        mut request: Request<RepositoryIndexRequest>,
    ) -> Result<Response<RepositoryIndexResponse>, Status> {
        let _call = Call::of(&mut request)?;
        Ok(Response::new(repository::index(&self.0, request.into_inner()).await?))
    }

    async fn repository_model_load(
        &self,
        mut request: Request<RepositoryModelLoadRequest>,
    ) -> Result<Response<RepositoryModelLoadResponse>, Status> {
        let call = Call::of(&mut request)?;
        let RepositoryModelLoadRequest { repository_name, model_name, parameters } = request.into_inner();
        repository::check(repository_name, parameters.into_keys(), &[])?;
        repository::change(&self.0, Change::Load, model_name, call.id()).await?;
        Ok(Response::new(RepositoryModelLoadResponse {}))
    }

    async fn repository_model_unload(
        &self,
        mut request: Request<RepositoryModelUnloadRequest>,
    ) -> Result<Response<RepositoryModelUnloadResponse>, Status> {
        let call = Call::of(&mut request)?;
        let RepositoryModelUnloadRequest { repository_name, model_name, parameters } = request.into_inner();
        // No model depends on another one.
        repository::check(repository_name, parameters.into_keys(), &["unload_dependents"])?;
        repository::change(&self.0, Change::Unload, model_name, call.id()).await?;
        Ok(Response::new(RepositoryModelUnloadResponse {}))
    }
}
