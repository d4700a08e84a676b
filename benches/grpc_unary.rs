//! gRPC requests per second at batch 1 with 64 in flight, compared with an echo server that only decodes the
//! same requests and answers with the same type of message. The echo server shows what tonic can do on this
//! machine.
//!
//! The client is this process. Each server is a child process (this program with `--serve`) with the same
//! number of threads, HTTP/2 settings and connections. A request has Criteo's 13 dense values and 26 strings,
//! which the server hashes. The model is the Criteo DLRM of `init` (dim 16) with initial weights, default
//! settings and the cache off.
//!
//! `--pairs N` (11), `--window-ms N` (1000), `--in-flight N` (64), `--connections N` (4), `--rows N` per
//! table (100,000), `--json`.

mod harness;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use anyhow::Context;
use flechette::cli::serve::Serving;
use flechette::config::{Config, Flags};
use flechette::schema::preset::{ArchKind, criteo};
use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::ctr_server::{Ctr, CtrServer};
use flechette::server::proto::{
    FeatureColumn, GetModelRequest, GetModelResponse, LearnRequest, LearnResponse, PredictRequest,
    PredictResponse, PredictStreamResponse, SetLabelRequest, SetLabelResponse,
};
use flechette::trainer::initialise;
use flechette::trainer::optim::{self, Optimizer};
use harness::{Draw, Options, Report};
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status, Streaming};

fn main() -> anyhow::Result<()> {
    let options = Options::read(1000);
    match options.value("--serve").as_deref() {
        Some("ours") => serve_ours(&options),
        Some("echo") => serve_echo(),
        Some(other) => anyhow::bail!("--serve: expected ours or echo, got {other}"),
        None => compare(&options),
    }
}

/// A child process that serves until its standard input ends.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(kind: &str, options: &Options) -> anyhow::Result<Self> {
        let rows = options.number("--rows", 100_000).to_string();
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--serve", kind, "--rows", &rows])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("no output")?).read_line(&mut line)?;
        let address = line.trim().to_owned();
        anyhow::ensure!(!address.is_empty(), "the {kind} server did not start");
        Ok(Self { child, address })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The child ends when its standard input is closed.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// In a child process: waits until the parent closes its standard input.
fn parent_gone() {
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

fn serve_ours(options: &Options) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let schema = criteo(ArchKind::Dlrm, 16, options.number("--rows", 100_000) as u64);
    let optimizer = Optimizer::new(optim::Kind::Sgd, 0.1);
    initialise(&schema, optimizer, 0)?.save(dir.path(), "criteo")?;
    let flags = Flags {
        grpc: Some("127.0.0.1:0".into()),
        http: Some("127.0.0.1:0".into()),
        cache_mode: Some("off".into()),
        ..Flags::default()
    };
    let config = Config::load(&flags)?;
    let serving = Serving::load(&config, dir.path())?;
    flechette::cli::serve::runtime(&config)?.block_on(async {
        let server = serving.bind(&config).await?;
        println!("{}", server.grpc_addr());
        server.run(async { tokio::task::spawn_blocking(parent_gone).await.unwrap_or(()) }).await?;
        Ok(())
    })
}

/// Answers every request with one score.
struct Echo;

#[tonic::async_trait]
impl Ctr for Echo {
    async fn predict(&self, request: Request<PredictRequest>) -> Result<Response<PredictResponse>, Status> {
        let request = request.into_inner();
        let scores = request.dense.first().copied().into_iter().collect();
        Ok(Response::new(PredictResponse { scores, version: 1, ..PredictResponse::default() }))
    }

    type PredictStreamStream = tokio_stream::Empty<Result<PredictStreamResponse, Status>>;

    async fn predict_stream(
        &self,
        _: Request<Streaming<PredictRequest>>,
    ) -> Result<Response<Self::PredictStreamStream>, Status> {
        Err(Status::unimplemented("the bench sends single requests"))
    }

    async fn learn(&self, _: Request<LearnRequest>) -> Result<Response<LearnResponse>, Status> {
        Err(Status::unimplemented("an echo has no model"))
    }

    async fn set_label(&self, _: Request<SetLabelRequest>) -> Result<Response<SetLabelResponse>, Status> {
        Err(Status::unimplemented("an echo has no model"))
    }

    async fn get_model(&self, _: Request<GetModelRequest>) -> Result<Response<GetModelResponse>, Status> {
        Err(Status::unimplemented("an echo has no model"))
    }
}

fn serve_echo() -> anyhow::Result<()> {
    let config = Config::load(&Flags::default())?;
    flechette::cli::serve::runtime(&config)?.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?);
        tonic::transport::Server::builder()
            .max_concurrent_streams(config.server.max_streams)
            .serve_with_incoming_shutdown(
                CtrServer::new(Echo),
                TcpIncoming::from(listener).with_nodelay(Some(true)),
                async { tokio::task::spawn_blocking(parent_gone).await.unwrap_or(()) },
            )
            .await?;
        Ok(())
    })
}

fn compare(options: &Options) -> anyhow::Result<()> {
    let (in_flight, connections) = (options.number("--in-flight", 64), options.number("--connections", 4));
    let baseline = "an echo server";
    let mut report = Report::new("grpc_unary", "requests", baseline, options);
    let (ours, echo) = (Server::start("ours", options)?, Server::start("echo", options)?);
    let runtime = tokio::runtime::Runtime::new()?;
    let requests = Arc::new(requests());
    let connect = |server: &Server| runtime.block_on(connect(&server.address, connections));
    let (ours_channels, echo_channels) = (connect(&ours)?, connect(&echo)?);
    let failed = AtomicU64::new(0);
    let window = |channels: &[Channel]| {
        let (rate, lost) = runtime.block_on(drive(channels, in_flight, &requests, options));
        failed.fetch_add(lost, Ordering::Relaxed);
        rate
    };
    let pairs = options.compare(|| window(&ours_channels), || window(&echo_channels));
    report.add(format!("batch 1, {in_flight} in flight, {connections} connections"), &pairs, Some(0.5));
    println!("failed requests: {}", failed.load(Ordering::Relaxed));
    report.finish();
    Ok(())
}

async fn connect(address: &str, connections: usize) -> anyhow::Result<Vec<Channel>> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?.tcp_nodelay(true);
    let mut channels = Vec::new();
    for _ in 0..connections {
        channels.push(endpoint.connect().await?);
    }
    Ok(channels)
}

/// Sends requests for one window. Each of `in_flight` tasks waits for an answer before its next request.
/// Returns successful answers per second, and the number of failures.
async fn drive(
    channels: &[Channel],
    in_flight: usize,
    requests: &Arc<Vec<PredictRequest>>,
    options: &Options,
) -> (f64, u64) {
    let stop = Arc::new(AtomicBool::new(false));
    let began = Instant::now();
    let tasks: Vec<_> = (0..in_flight)
        .map(|i| {
            let mut client = CtrClient::new(channels[i % channels.len()].clone());
            let (requests, stop) = (requests.clone(), stop.clone());
            tokio::spawn(async move {
                let (mut good, mut failed) = (0u64, 0u64);
                for n in (0..requests.len()).cycle().skip(i * 7) {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    match client.predict(requests[n].clone()).await {
                        Ok(answer) if answer.get_ref().scores.len() == 1 => good += 1,
                        _ => failed += 1,
                    }
                }
                (good, failed)
            })
        })
        .collect();
    tokio::time::sleep(options.window).await;
    stop.store(true, Ordering::Relaxed);
    let (mut good, mut failed) = (0, 0);
    for task in tasks {
        // If a task panicked, its successes are lost, and it counts as one failure.
        let (more, lost) = task.await.unwrap_or((0, 1));
        (good, failed) = (good + more, failed + lost);
    }
    (good as f64 / began.elapsed().as_secs_f64(), failed)
}

/// Requests of one sample, as `flechette score` sends them.
fn requests() -> Vec<PredictRequest> {
    let mut draw = Draw::new(0);
    let column = |i: usize, draw: &mut Draw| FeatureColumn {
        name: format!("C{i}"),
        lengths: Vec::new(),
        ids: Vec::new(),
        strings: vec![format!("{:08x}", draw.bits() as u32).into_bytes().into()],
    };
    let request = |_| PredictRequest {
        model: "criteo".into(),
        samples: 1,
        dense: (0..13).map(|_| draw.below(1000) as f32).collect(),
        features: (1..=26).map(|i| column(i, &mut draw)).collect(),
        ..PredictRequest::default()
    };
    (0..256).map(request).collect()
}
