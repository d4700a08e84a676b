//! What a server says of a model: the status of a call, the row in the list of models, whether it is ready.

use flechette::server::inference::RepositoryIndexRequest;
use flechette::server::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use flechette::server::inference::repository_index_response::ModelIndex;
use flechette::server::proto::GetModelRequest;
use flechette::server::proto::ctr_client::CtrClient;

use crate::program::Served;
use crate::serving::channel;

/// The status of a call for a model.
pub(super) fn call(served: &Served, model: &str) -> Result<(), tonic::Status> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = CtrClient::new(channel(served.grpc).await);
        client.get_model(GetModelRequest { model: model.to_owned() }).await.map(drop)
    })
}

/// Name, version, state and reason of each row of KServe's list of models.
pub(super) fn index(served: &Served) -> Vec<[String; 4]> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let index = runtime.block_on(async {
        let mut client = GrpcInferenceServiceClient::new(channel(served.grpc).await);
        client.repository_index(RepositoryIndexRequest::default()).await.unwrap().into_inner()
    });
    let row = |row: ModelIndex| [row.name, row.version, row.state, row.reason];
    index.models.into_iter().map(row).collect()
}

pub(super) fn is_ready(served: &Served) -> bool {
    served.get("/readyz") == (200, "ready\n".to_owned())
}
