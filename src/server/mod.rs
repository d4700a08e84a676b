//! The network: gRPC on one port and HTTP on another, for a set of models.
//!
//! The server knows a model only as [`Predict`], and calls each through its own batcher. [`Server::bind`]
//! binds both ports, so that a port in use is reported before anything runs. [`Server::run`] serves until its
//! shutdown future ends, and then drains. [`Registry`] changes the served models meanwhile (`models.rs`,
//! `not_served.rs`). Services and ports share one state (`state.rs`). Two protocols, the native one
//! (`ctr.rs`) and KServe v2 (`kserve/`), share the path of a scored request (`pending.rs`, `model.rs`),
//! streams of requests (`stream.rs`), and one table of their methods (`methods.rs`).
//!
//! **The drain.** `docs/api.md` (Shutdown) has the view of the operator. The order inside:
//!
//! 1. Readiness and health change, and nothing else for `server.drain_delay_seconds`. Then the listeners
//!    close, connections get GOAWAY, and streams take no more requests.
//! 2. Calls in flight finish, for at most `server.drain_seconds`. Then health watches end, because each keeps
//!    its connection open, and connections close.
//! 3. The batchers answer queued requests, or abandon them when the time is over. The logs of learned samples
//!    are closed. HTTP stops last.

mod account;
mod answer;
mod charge;
mod connection;
mod connection_state;
mod convert;
mod ctr;
mod descriptors;
mod drain;
#[cfg(test)]
#[cfg(not(flechette_loom))]
mod fuzz;
mod gate;
mod http_port;
mod kserve;
mod labels;
mod learn_log;
mod listener;
mod meter;
mod methods;
mod metrics_port;
mod model;
mod models;
mod not_served;
mod origin;
mod pending;
mod periodic;
mod pressure;
mod received;
mod registry;
mod report;
mod repository;
mod retired;
mod route;
mod security;
mod serving_engine;
mod shadow;
mod socket;
#[cfg_attr(not(feature = "otel"), path = "no_spans.rs")]
mod spans;
mod state;
mod status;
mod status_page;
mod stream;
mod stuck;
mod traffic;
mod ungated;
mod unread;
mod web;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::transport::server::TcpIncoming;
use tonic_health::pb::health_server::{Health, HealthServer};

use crate::config::{AuthConfig, Batchers, LearnConfig, OtelConfig, ServerConfig, TlsConfig};
use crate::metrics::Metrics;
use crate::predict::Predict;

use connection::GrpcPort;
pub(crate) use convert::clip;
use drain::Drain;
use http_port::{AnswerTimes, HttpPort};
use listener::{ConnectionLimit, Limited};
use methods::Method;
pub(crate) use metrics_port::MetricsPort;
use models::Models;
pub(crate) use models::{LoadedVersions, MissingVersion, NotChanged, RefusedVersions};
use not_served::NotServed;
use periodic::{set_health, update_status};
use report::Slow;
pub(crate) use repository::{Change, ChangeError, Made, Repository, Requested};
use route::GrpcService;
use security::{Guard, Security};
use spans::Spans;
use state::ServerState;
pub(crate) use traffic::{LabelChange, LabelTargets, Labels};
use ungated::{MessageTime, Ungated};

pub(crate) use registry::Registry;
pub use security::FileError;
pub(crate) use security::{token_lines, unusable_files};

/// The messages and services of `proto/flechette/v1/ctr.proto`.
#[allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::expect_used)]
pub mod proto {
    include!("../../proto/generated/flechette.v1.rs");

    /// The descriptors of both protocols, for reflection.
    pub(crate) const DESCRIPTORS: &[u8] = include_bytes!("../../proto/generated/descriptors.bin");
}

/// The messages and services of `proto/inference/kserve.proto`.
#[allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::expect_used)]
pub mod inference {
    include!("../../proto/generated/inference.rs");
}

/// TCP asks a silent peer of a gRPC connection at this interval whether it exists.
const TCP_KEEPALIVE: Duration = Duration::from_secs(30);

/// Most bytes of a health or reflection request, which contains only names.
const SMALL_MESSAGE: usize = 16 << 10;

/// The parts of a server.
#[allow(missing_docs)]
pub struct ServerParts {
    /// Models with different names. More can be added while the server runs.
    pub models: Vec<Arc<dyn Predict>>,
    pub metrics: Arc<Metrics>,
    pub server: ServerConfig,
    /// `None`: nothing is encrypted.
    pub tls: Option<TlsConfig>,
    pub auth: AuthConfig,
    pub batchers: Batchers,
    /// Where samples of Learn calls are stored; `None`: no model takes them.
    pub learning: Option<Learning>,
    /// A request that takes this long is logged; `None`: none is.
    pub slow: Option<Duration>,
    /// Where spans are sent; `None`: there are none.
    pub otel: Option<OtelConfig>,
}

/// Which models take samples, and where they are stored.
#[derive(Clone, Debug)]
pub struct Learning {
    /// The directory of the models.
    pub models: PathBuf,
    /// Limits of each log, and whether every model takes samples.
    pub config: LearnConfig,
    /// The models that take samples if not every model does.
    pub only: Vec<String>,
}

impl Learning {
    fn takes(&self, model: &str) -> bool {
        self.config.enabled || self.only.iter().any(|name| name == model)
    }
}

#[allow(missing_docs)] // the error texts document the variants
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("model {0:?} is given twice")]
    DuplicateModel(String),
    #[error("{key}: cannot listen on {address}: {error}")]
    Listen { key: &'static str, address: SocketAddr, error: io::Error },
    #[error("batcher.workers: cannot start a thread: {0}")]
    Thread(io::Error),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("otel.endpoint: {0}")]
    Otel(String),
    #[error("reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    #[error("{task} ended by itself: {reason}")]
    Ended { task: &'static str, reason: String },
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Calls that were cut off after `server.drain_seconds`.
    pub unfinished: usize,
}

/// A server whose two ports are bound.
pub struct Server {
    state: Arc<ServerState>,
    grpc: TcpListener,
    http: TcpListener,
    shares: descriptors::Shares,
}

impl Server {
    /// Binds the ports and starts the batchers. Requests are answered only by [`Server::run`].
    ///
    /// # Errors
    /// When a file of certificates or tokens cannot be used, a port cannot be bound (the error names its key
    /// and address), or a thread cannot be started.
    pub async fn bind(parts: ServerParts) -> Result<Self, ServerError> {
        let ServerParts {
            models: predicts,
            metrics,
            server: config,
            tls,
            auth,
            batchers,
            learning,
            slow,
            otel,
        } = parts;
        let security = Arc::new(Security::open(&config, tls.as_ref(), &auth, &metrics)?);
        let grpc = listen("server.grpc", config.grpc).await?;
        let http = listen("server.http", config.http).await?;
        let models = Models::new(metrics.clone(), batchers, config.max_samples, learning);
        predicts.into_iter().try_for_each(|predict| models.add(predict))?;
        let spans = otel.map(|otel| Spans::start(&otel, &metrics)).transpose()?;
        let state = ServerState {
            models,
            not_served: NotServed::default(),
            metrics,
            history: status_page::History::default(),
            security,
            slow: Slow::new(slow),
            spans,
            grpc_addr: bound("server.grpc", &grpc, config.grpc)?,
            http_addr: bound("server.http", &http, config.http)?,
            config,
            draining: AtomicBool::new(false),
            closing: watch::Sender::new(false),
            repository: OnceLock::new(),
            in_flight: AtomicUsize::new(0),
            places: AtomicUsize::new(0),
            learn_places: AtomicUsize::new(0),
            callers: AtomicUsize::new(0),
            in_flight_bytes: AtomicUsize::new(0),
        };
        let shares = descriptors::shares(descriptors::raise(), state.config.max_connections);
        Ok(Self { state: Arc::new(state), grpc, http, shares })
    }

    /// The address of the gRPC port, with the real port if port 0 was configured.
    #[must_use]
    pub fn grpc_addr(&self) -> SocketAddr {
        self.state.grpc_addr
    }

    /// The address of the HTTP port, with the real port if port 0 was configured.
    #[must_use]
    pub fn http_addr(&self) -> SocketAddr {
        self.state.http_addr
    }

    /// Adds and removes models while the server runs.
    #[must_use]
    pub(crate) fn registry(&self) -> Registry {
        Registry::new(self.state.clone())
    }

    /// Serves until `shutdown` ends, then drains.
    ///
    /// # Errors
    /// When the server stops without a shutdown, or reflection cannot be set up.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<Drained, ServerError> {
        let Self { state, grpc, http, shares } = self;
        let stop_http = watch::Sender::new(false);
        let (health, health_service) = tonic_health::server::health_reporter();
        let ready = state.ready();
        set_health(&health, ready).await;
        let services = services(&state, health_service)?;
        let mut updating = tokio::spawn(update_status(state.clone(), health.clone(), ready));
        let watching = tokio::spawn(state.security.clone().watch());
        let mut web = tokio::spawn(http_port(&state, http, shares.http).serve(stop_http.subscribe()));
        let calls = GrpcPort {
            state: state.clone(),
            service: services,
            times: connection::ClientTimes::new(&state.config),
            http2: connection::Http2::new(&state.config),
            stop: state.closing.subscribe(),
        };
        let mut calls = tokio::spawn(calls.serve(grpc_connections(&state, grpc, shares.grpc)));
        // Without one of these a server would only seem to work.
        let (task, ended) = tokio::select! {
            () = shutdown => ("", Ok(())),
            ended = &mut calls => ("the gRPC port", ended),
            ended = &mut web => ("the HTTP port", ended),
            ended = &mut updating => ("the health of the server", ended),
        };
        if !task.is_empty() {
            return Err(ServerError::Ended { task, reason: format!("{ended:?}") });
        }

        // Without readiness no client was sent here.
        let delay = if state.ready() { state.config.drain_delay } else { Duration::ZERO };
        state.draining.store(true, Ordering::Release);
        set_health(&health, false).await;
        tokio::time::sleep(delay).await;
        state.closing.send_replace(true);
        let drain = Drain { state: &state, health, until: Instant::now() + state.config.drain };
        let drained = drain.finish(calls).await;
        if let Some(spans) = &state.spans {
            spans.flush().await;
        }
        updating.abort();
        watching.abort();
        stop_http.send_replace(true);
        // A scraper that keeps its connection open must not keep the process alive.
        let _ = tokio::time::timeout(Duration::from_millis(200), web).await;
        Ok(drained)
    }
}

/// The HTTP port.
fn http_port(state: &Arc<ServerState>, listener: TcpListener, connections: usize) -> HttpPort {
    let limit = ConnectionLimit::new(connections, state.metrics.connections("http"));
    let port = http_port::connections("server.http", listener, state.security.clone(), limit);
    HttpPort::new(port, AnswerTimes::of(&state.config), web::routes(state.clone()))
}

/// The connections of the gRPC port.
fn grpc_connections(state: &Arc<ServerState>, listener: TcpListener, connections: usize) -> Limited {
    let security = state.security.clone();
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true)).with_keepalive(Some(TCP_KEEPALIVE));
    let limit = ConnectionLimit::new(connections, state.metrics.connections("grpc"));
    Limited::new("server.grpc", incoming, Box::new(move || security.grpc()), limit)
}

/// A future that ends at SIGTERM or SIGINT, for [`Server::run`].
///
/// # Errors
/// When signal handlers cannot be installed.
pub fn terminated() -> io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

async fn listen(key: &'static str, address: SocketAddr) -> Result<TcpListener, ServerError> {
    TcpListener::bind(address).await.map_err(|error| ServerError::Listen { key, address, error })
}

fn bound(key: &'static str, listener: &TcpListener, address: SocketAddr) -> Result<SocketAddr, ServerError> {
    listener.local_addr().map_err(|error| ServerError::Listen { key, address, error })
}

/// Ends when `stop` is set, or its sender is dropped.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

/// The chain of all gRPC services, behind the check of tokens. The last one added, `Ctr`, is compared first,
/// because it has the most calls; KServe is the second.
fn services(
    state: &Arc<ServerState>,
    health: HealthServer<impl Health>,
) -> Result<impl GrpcService, ServerError> {
    let config = &state.config;
    let ctr = ctr::CtrServer::new(ctr::CtrService(state.clone())).max_decoding_message_size(config.max_bytes);
    let kserve = |most| {
        let service = kserve::KserveService(state.clone());
        kserve::GrpcInferenceServiceServer::new(service).max_decoding_message_size(most)
    };
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let message = MessageTime { time: config.body, setting: "server.body_seconds" };
    let stream = MessageTime { time: config.stream_idle, setting: "server.stream_idle_seconds" };
    let kserve = route::Route::within(
        |path| Method::of(path).is_some_and(|method| method.kind().is_none()),
        Ungated::new(kserve(SMALL_MESSAGE), message),
        gate::Gate::new(kserve(config.max_bytes), state.clone(), &meter::KSERVE),
    );
    let old = reflection().build_v1alpha()?.max_decoding_message_size(SMALL_MESSAGE);
    let chain = route::Unknown(state.clone())
        .or(Ungated::new(old, stream))
        .or(Ungated::new(reflection().build_v1()?.max_decoding_message_size(SMALL_MESSAGE), stream))
        .or(Ungated::new(health.max_decoding_message_size(SMALL_MESSAGE), message))
        .or(kserve)
        .or(gate::Gate::new(ctr, state.clone(), &meter::CTR));
    Ok(Guard::new(chain, state.clone()))
}
