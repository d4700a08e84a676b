//! A real server on free ports, with a fake model whose scores a test can compute.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use flechette::config::{AuthConfig, Batchers, ServerConfig};
use flechette::metrics::Metrics;
use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::{FeatureColumn, PredictRequest};
use flechette::server::{Drained, Server, ServerError, ServerParts};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::Channel;

use crate::fake::{Fake, batcher_config, score, until};

/// A request with values that depend on `seed`, and its scores.
pub fn request(samples: usize, seed: u64) -> (PredictRequest, Vec<f32>) {
    let value = |sample: usize, salt: u64| seed.wrapping_mul(31).wrapping_add(sample as u64 * 7 + salt);
    let mut dense = Vec::new();
    let mut columns = [(); 3].map(|()| FeatureColumn::default());
    for (column, name) in columns.iter_mut().zip(["user", "tag", "strict"]) {
        column.name = name.to_owned();
    }
    let mut scores = Vec::new();
    for sample in 0..samples {
        // Never `PANIC` or `FAIL`, because of the 0.5.
        let raw = [(value(sample, 1) % 100) as f32 + 0.5, (value(sample, 2) % 50) as f32];
        dense.extend(raw);
        let user = value(sample, 3) % 1000;
        let tags: Vec<u64> = (0..value(sample, 4) % 4).map(|t| (t * 5 + sample as u64) % 50).collect();
        let strict = value(sample, 5) % 10;
        columns[0].ids.push(user);
        columns[1].lengths.push(tags.len() as u32);
        columns[1].ids.extend(&tags);
        columns[2].ids.push(strict);
        scores.push(score(&[raw[0], raw[1].ln_1p()], &[&[user], &tags, &[strict]]));
    }
    let request = PredictRequest {
        model: "ads".to_owned(),
        samples: samples as u32,
        dense,
        features: columns.into(),
        ..PredictRequest::default()
    };
    (request, scores)
}

pub struct Running {
    pub model: Arc<Fake>,
    pub grpc: SocketAddr,
    pub http: SocketAddr,
    pub client: CtrClient<Channel>,
    stop: oneshot::Sender<()>,
    server: JoinHandle<Result<Drained, ServerError>>,
}

pub fn server_config() -> ServerConfig {
    ServerConfig {
        grpc: SocketAddr::from(([127, 0, 0, 1], 0)),
        http: SocketAddr::from(([127, 0, 0, 1], 0)),
        models: None,
        max_samples: 64,
        max_bytes: 64 << 10,
        max_requests: 1000,
        max_inflight_bytes: 64 << 20,
        max_connections: 1000,
        handshake: Duration::from_secs(600),
        body: Duration::from_secs(600),
        write: Duration::from_secs(600),
        http_idle: Duration::from_secs(600),
        grpc_idle: None,
        stream_idle: Duration::from_secs(600),
        max_streams: 1000,
        reflection: true,
        metrics: true,
        admin: true,
        drain_delay: Duration::ZERO,
        drain: Duration::from_secs(600),
    }
}

pub fn parts(model: &Arc<Fake>) -> ServerParts {
    ServerParts {
        models: vec![model.clone()],
        metrics: Arc::new(Metrics::new().unwrap()),
        server: server_config(),
        tls: None,
        auth: AuthConfig::default(),
        batchers: Batchers { common: batcher_config(), models: BTreeMap::new() },
        learning: None,
        slow: None,
        otel: None,
    }
}

impl Running {
    pub async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    pub async fn start_with(change: impl FnOnce(&mut ServerParts)) -> Self {
        let model = Fake::new();
        let mut parts = parts(&model);
        change(&mut parts);
        let encrypted = parts.tls.is_some();
        let server = Server::bind(parts).await.unwrap();
        let (grpc, http) = (server.grpc_addr(), server.http_addr());
        let (stop, stopped) = oneshot::channel();
        let server = tokio::spawn(server.run(async {
            let _ = stopped.await;
        }));
        let client = CtrClient::new(if encrypted { lazy_channel(grpc) } else { channel(grpc).await });
        Self { model, grpc, http, client, stop, server }
    }

    /// Begins the drain, and returns its future result.
    pub fn stop(self) -> JoinHandle<Result<Drained, ServerError>> {
        self.stop.send(()).unwrap();
        self.server
    }

    pub async fn get(&self, path: &str) -> (u16, String) {
        http_get(self.http, path).await
    }

    /// Waits until the metrics page has this line.
    pub async fn until_metric(&self, line: &str) {
        until(async || self.get("/metrics").await.1.lines().any(|l| l == line)).await;
    }

    /// The value of a series of the metrics page.
    pub async fn value(&self, series: &str) -> f64 {
        let page = self.get("/metrics").await.1;
        let value = page.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok());
        value.unwrap_or_else(|| panic!("no {series}"))
    }

    /// Shows the server that a sample takes a fifth of a second, until it believes that.
    pub async fn take_a_fifth_of_a_second(&self) {
        for _ in 0..4 {
            let begun = self.model.begun();
            self.model.hold();
            let slow = self.send(request(1, 0).0);
            until(async || self.model.begun() > begun).await;
            tokio::time::sleep(Duration::from_millis(200)).await;
            self.model.release();
            slow.await.unwrap().unwrap();
        }
    }

    /// Sends a request in a new task.
    pub fn send(&self, request: PredictRequest) -> JoinHandle<Result<Vec<f32>, tonic::Status>> {
        let mut client = self.client.clone();
        tokio::spawn(async move { client.predict(request).await.map(|r| r.into_inner().scores) })
    }
}

pub async fn channel(address: SocketAddr) -> Channel {
    Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap()
}

/// A plain connection that is never used, because its server wants TLS.
fn lazy_channel(address: SocketAddr) -> Channel {
    Channel::from_shared(format!("http://{address}")).unwrap().connect_lazy()
}

pub async fn http_get(address: SocketAddr, path: &str) -> (u16, String) {
    http_get_on(tokio::net::TcpStream::connect(address).await.unwrap(), path, "").await
}

/// Asks for a page on a connection, with further lines of the head.
pub async fn http_get_on(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    path: &str,
    lines: &str,
) -> (u16, String) {
    let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{lines}\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}
