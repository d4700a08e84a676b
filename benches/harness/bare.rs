//! A bare tonic server of the native service: no gate, no batcher and no model.

use std::io::Read;

use flechette::config::{Config, Flags};
use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::ctr_server::{Ctr, CtrServer};
use flechette::server::proto::{
    GetModelRequest, GetModelResponse, LearnRequest, LearnResponse, PredictRequest, PredictResponse,
    PredictStreamResponse, SetLabelRequest, SetLabelResponse,
};
use tokio::net::TcpListener;
use tonic::transport::Channel;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

/// What the server answers.
pub struct Bare {
    pub predict: fn(PredictRequest) -> Result<PredictResponse, Status>,
    /// The server that describes its models; without one there are none.
    pub described: Option<String>,
}

impl Bare {
    /// In a child process: prints `grpc=` and the address, and serves until standard input ends.
    pub fn serve(self) -> anyhow::Result<()> {
        let config = Config::resolve(&Flags::default(), [], None)?;
        flechette::cli::serve::runtime(&config)?.block_on(async {
            let described = match self.described {
                Some(of) => Some(CtrClient::connect(format!("http://{of}")).await?),
                None => None,
            };
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            println!("grpc={}", listener.local_addr()?);
            let end = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
            let service = CtrServer::new(Service { predict: self.predict, described });
            tonic::transport::Server::builder()
                .max_concurrent_streams(config.server.max_streams)
                .serve_with_incoming_shutdown(
                    service.max_decoding_message_size(config.server.max_bytes),
                    TcpIncoming::from(listener).with_nodelay(Some(true)),
                    async { drop(end.await) },
                )
                .await?;
            Ok(())
        })
    }
}

struct Service {
    predict: fn(PredictRequest) -> Result<PredictResponse, Status>,
    described: Option<CtrClient<Channel>>,
}

fn missing<T>() -> Result<T, Status> {
    Err(Status::unimplemented("a bare server has no model"))
}

#[tonic::async_trait]
impl Ctr for Service {
    async fn predict(&self, request: Request<PredictRequest>) -> Result<Response<PredictResponse>, Status> {
        (self.predict)(request.into_inner()).map(Response::new)
    }

    type PredictStreamStream = tokio_stream::Empty<Result<PredictStreamResponse, Status>>;

    async fn predict_stream(
        &self,
        _: Request<Streaming<PredictRequest>>,
    ) -> Result<Response<Self::PredictStreamStream>, Status> {
        missing()
    }

    async fn learn(&self, _: Request<LearnRequest>) -> Result<Response<LearnResponse>, Status> {
        missing()
    }

    async fn set_label(&self, _: Request<SetLabelRequest>) -> Result<Response<SetLabelResponse>, Status> {
        missing()
    }

    async fn get_model(
        &self,
        request: Request<GetModelRequest>,
    ) -> Result<Response<GetModelResponse>, Status> {
        match &self.described {
            Some(described) => described.clone().get_model(request.into_inner()).await,
            None => missing(),
        }
    }
}
