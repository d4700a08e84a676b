//! A bare tonic server that refuses every Predict call, for what a refusal costs there.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Command, Stdio};

use anyhow::Context;
use flechette::config::{Config, Flags};
use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::ctr_server::{Ctr, CtrServer};
use flechette::server::proto::{
    GetModelRequest, GetModelResponse, LearnRequest, LearnResponse, PredictRequest, PredictResponse,
    PredictStreamResponse, SetLabelRequest, SetLabelResponse,
};
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use super::harness::program::{Running, on_core, processor_seconds};

/// The server as a child process on core 0.
pub struct Refusing {
    process: Running,
    pub address: SocketAddr,
}

impl Refusing {
    /// Starts it. It describes the models that the server at `of` serves.
    pub fn start(of: SocketAddr) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--refuse-as", &of.to_string()]);
        let child = on_core(0, &command).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut process = Running(child);
        let mut line = String::new();
        BufReader::new(process.0.stdout.take().context("stdout")?).read_line(&mut line)?;
        Ok(Self { process, address: line.trim().parse().context("the address of the refusing server")? })
    }

    /// Processor time of a refusal, in seconds. `load` sends requests, and returns how many.
    pub fn seconds_of_a_refusal(&self, load: impl FnOnce() -> anyhow::Result<f64>) -> anyhow::Result<f64> {
        let process = self.process.0.id();
        let before = processor_seconds(process)?;
        let sent = load()?;
        anyhow::ensure!(sent > 0.0, "no request was sent");
        Ok((processor_seconds(process)? - before) / sent)
    }
}

/// In the child process: serves until standard input ends.
pub fn serve(of: &str) -> anyhow::Result<()> {
    let config = Config::load(&Flags::default())?;
    flechette::cli::serve::runtime(&config)?.block_on(async {
        let described = CtrClient::connect(format!("http://{of}")).await?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?);
        let end = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
        tonic::transport::Server::builder()
            .max_concurrent_streams(config.server.max_streams)
            .serve_with_incoming_shutdown(
                CtrServer::new(Refuse { described }).max_decoding_message_size(config.server.max_bytes),
                TcpIncoming::from(listener).with_nodelay(Some(true)),
                async { drop(end.await) },
            )
            .await?;
        Ok(())
    })
}

struct Refuse {
    described: CtrClient<tonic::transport::Channel>,
}

fn refused<T>() -> Result<T, Status> {
    Err(Status::resource_exhausted("a server that only refuses"))
}

#[tonic::async_trait]
impl Ctr for Refuse {
    async fn predict(&self, _: Request<PredictRequest>) -> Result<Response<PredictResponse>, Status> {
        refused()
    }

    type PredictStreamStream = tokio_stream::Empty<Result<PredictStreamResponse, Status>>;

    async fn predict_stream(
        &self,
        _: Request<Streaming<PredictRequest>>,
    ) -> Result<Response<Self::PredictStreamStream>, Status> {
        refused()
    }

    async fn learn(&self, _: Request<LearnRequest>) -> Result<Response<LearnResponse>, Status> {
        refused()
    }

    async fn set_label(&self, _: Request<SetLabelRequest>) -> Result<Response<SetLabelResponse>, Status> {
        refused()
    }

    async fn get_model(
        &self,
        request: Request<GetModelRequest>,
    ) -> Result<Response<GetModelResponse>, Status> {
        self.described.clone().get_model(request.into_inner()).await
    }
}
