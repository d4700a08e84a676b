//! A real server on free ports, with a model whose scores a test can compute.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use flechette::config::{BatcherConfig, ServerConfig};
use flechette::metrics::Metrics;
use flechette::predict::{Description, Predict, PredictError};
use flechette::schema::Schema;
use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::{FeatureColumn, PredictRequest};
use flechette::server::{Drained, Server, ServerError, ServerParts};
use flechette::types::{AbsentId, Batch, Scores, Version};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::Channel;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Dense values that make the model panic and fail.
pub const PANIC: f32 = 666.0;
pub const FAIL: f32 = 13.0;

/// A model whose score is a hash of the sample's values, so that mixed-up samples get other scores.
pub struct Fake {
    pub schema: Arc<Schema>,
    pub version: AtomicU64,
    pub ready: AtomicBool,
    /// The number of samples of every successful call.
    pub calls: Mutex<Vec<usize>>,
    /// Number of calls that have begun, and whether they may continue.
    door: Mutex<(usize, bool)>,
    opened: Condvar,
}

impl Fake {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            schema: Arc::new(schema()),
            version: AtomicU64::new(7),
            ready: AtomicBool::new(true),
            calls: Mutex::default(),
            door: Mutex::new((0, true)),
            opened: Condvar::new(),
        })
    }

    /// Lets calls begin, but not finish.
    pub fn hold(&self) {
        self.door.lock().unwrap().1 = false;
    }

    pub fn release(&self) {
        self.door.lock().unwrap().1 = true;
        self.opened.notify_all();
    }

    pub fn begun(&self) -> usize {
        self.door.lock().unwrap().0
    }

    pub fn computed(&self) -> usize {
        self.calls.lock().unwrap().iter().sum()
    }
}

pub fn score(dense: &[f32], ids: &[&[u64]]) -> f32 {
    let mut bytes = Vec::new();
    for value in dense {
        bytes.extend(value.to_bits().to_le_bytes());
    }
    for ids in ids {
        bytes.push(ids.len() as u8);
        bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
    }
    (xxh3_64_with_seed(&bytes, 1) % (1 << 24)) as f32 / (1u32 << 24) as f32
}

impl Predict for Fake {
    fn predict(&self, batch: &Batch) -> Result<Scores, PredictError> {
        let mut door = self.door.lock().unwrap();
        door.0 += 1;
        while !door.1 {
            door = self.opened.wait(door).unwrap();
        }
        drop(door);
        let width = self.schema.dense_width();
        let mut scores = Scores {
            version: Version(self.version.load(Ordering::SeqCst)),
            probabilities: Vec::new(),
            absent: Vec::new(),
        };
        for sample in 0..batch.samples {
            let dense = &batch.dense[sample * width..][..width];
            assert!(dense[0] != PANIC, "sample {sample} makes the model panic");
            if dense[0] == FAIL {
                return Err(PredictError::Store("disk gone".to_owned()));
            }
            let ids: Vec<&[u64]> = batch.features.iter().map(|f| f.sample(sample)).collect();
            scores.probabilities.push(score(dense, &ids));
            for (feature, table) in self.schema.tables.iter().enumerate() {
                let absent = ids[feature].iter().filter(|id| **id >= table.rows);
                let (sample, feature) = (sample as u32, feature as u32);
                scores.absent.extend(absent.map(|_| AbsentId { sample, feature }));
            }
        }
        self.calls.lock().unwrap().push(batch.samples);
        Ok(scores)
    }

    fn describe(&self) -> Description {
        Description {
            model: "ads".to_owned(),
            version: Version(self.version.load(Ordering::SeqCst)),
            schema: self.schema.clone(),
            max_samples: 4096,
        }
    }

    fn ready(&self) -> bool {
        self.ready.load(Ordering::SeqCst)
    }
}

/// `user`: one-hot, ids or strings. `tags`: up to 3 ids. `strict`: one-hot, refuses absent ids.
/// Table `i` belongs to feature `i`.
const INPUTS: &str = r#"
    [[dense]]
    name = "price"
    [[dense]]
    name = "age"
    transform = "log1p"
    [[features]]
    name = "user"
    table = "users"
    hash = { seed = 3, modulus = 1000 }
    [[features]]
    name = "tag"
    table = "tags"
    arity = { multi_hot = { max = 3 } }
    [[features]]
    name = "strict"
    table = "stricts"
    hash = { seed = 4, modulus = 10 }
    [[tables]]
    name = "users"
    rows = 1000
    dim = 4
    [[tables]]
    name = "tags"
    rows = 50
    dim = 4
    default = { row = 0 }
    [[tables]]
    name = "stricts"
    rows = 10
    dim = 4
    default = "error"
"#;

fn schema() -> Schema {
    Schema::parse(&format!("[architecture]\nkind = \"dlrm\"\nbottom = [8]\ntop = [8]\n{INPUTS}")).unwrap()
}

/// The same inputs for a network that multiplies them, so that huge values overflow.
pub fn crossed_schema() -> Schema {
    Schema::parse(&format!("[architecture]\nkind = \"dcn\"\ncross_layers = 3\ndeep = [8]\n{INPUTS}")).unwrap()
}

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
        // Kept off the two values that make the model fail.
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
        version: 0,
        samples: samples as u32,
        dense,
        features: columns.into(),
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
        http_idle: Duration::from_secs(600),
        max_streams: 1000,
        drain: Duration::from_secs(20),
    }
}

pub fn batcher_config() -> BatcherConfig {
    BatcherConfig {
        max_samples: 256,
        max_delay: Duration::ZERO,
        queue_samples: 4096,
        queue_bytes: 16 << 20,
        workers: 1,
    }
}

pub fn parts(model: &Arc<Fake>) -> ServerParts {
    ServerParts {
        models: vec![model.clone()],
        metrics: Arc::new(Metrics::new().unwrap()),
        server: server_config(),
        batcher: batcher_config(),
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
        let server = Server::bind(parts).await.unwrap();
        let (grpc, http) = (server.grpc_addr(), server.http_addr());
        let (stop, stopped) = oneshot::channel();
        let server = tokio::spawn(server.run(async {
            let _ = stopped.await;
        }));
        let client = CtrClient::new(channel(grpc).await);
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

    /// Sends a request in a new task.
    pub fn send(&self, request: PredictRequest) -> JoinHandle<Result<Vec<f32>, tonic::Status>> {
        let mut client = self.client.clone();
        tokio::spawn(async move { client.predict(request).await.map(|r| r.into_inner().scores) })
    }
}

pub async fn channel(address: SocketAddr) -> Channel {
    Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap()
}

pub async fn http_get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Waits for a condition. Panics if it does not hold after a long time.
pub async fn until(happened: impl AsyncFn() -> bool) {
    for _ in 0..30_000 {
        if happened().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("the condition never held");
}
