//! Section `server`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::ConfigError;
use super::layers::Layers;
use super::security::SWITCH;
use super::values::GIB;

/// Section `server`.
#[allow(missing_docs)] // settings/ has the meaning of each key
#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    pub grpc: SocketAddr,
    pub http: SocketAddr,
    /// Whether metrics are kept.
    pub metrics: bool,
    pub models: Option<PathBuf>,
    /// Limit of one request.
    pub max_samples: usize,
    /// Limit of one request message.
    pub max_bytes: usize,
    /// Limit of the places of calls in flight, over all connections.
    pub max_requests: usize,
    /// Limit of the memory for the messages of all calls in flight, and for their answers.
    pub max_inflight_bytes: usize,
    /// Limit of each port.
    pub max_connections: usize,
    /// How long a client may take for the HTTP/2 preface or its first HTTP request, and for the body of a
    /// request, and how long an answer may take to leave.
    pub handshake: Duration,
    pub body: Duration,
    pub write: Duration,
    pub http_idle: Duration,
    /// `None`: gRPC connections without calls stay open.
    pub grpc_idle: Option<Duration>,
    /// A stream that gets no request for this long is ended.
    pub stream_idle: Duration,
    /// Limit of one connection.
    pub max_streams: u32,
    pub reflection: bool,
    /// Whether clients can load and unload models, and set labels.
    pub admin: bool,
    /// Between SIGTERM and the drain.
    pub drain_delay: Duration,
    pub drain: Duration,
}

/// Most memory of a message of this size, as the server counts it (`server/meter.rs`): the bytes themselves,
/// 64 for an empty string, which takes 2, and more for each tensor, output and parameter of KServe, which
/// take 2 as well. A native message takes less. `SPARE` is for capacity of vectors that is not used.
pub(crate) fn message_bytes(max_bytes: u64) -> u64 {
    const MOST_TENSORS: u64 = 20_001;
    const MOST_OTHERS: u64 = 20_001 + 100;
    const SPARE: u64 = 1024;
    let entries = max_bytes / 2;
    let tensors = entries.min(MOST_TENSORS);
    33 * max_bytes + SPARE + 976 * tensors + 288 * (entries - tensors).min(MOST_OTHERS)
}

impl Layers {
    pub(super) fn server(&self) -> Result<ServerConfig, ConfigError> {
        let max_bytes = self.bytes("server.max_bytes", 1024, GIB)?;
        let count = |key| self.whole(key, 1, 1 << 20).map(|count| count as usize);
        let seconds = |key, least| self.whole(key, least, 86_400).map(Duration::from_secs);
        let least = message_bytes(max_bytes);
        let inflight = self.optional("server.max_inflight_bytes", |key| self.room(key, least, max_bytes))?;
        let grpc = self.address("server.grpc")?;
        Ok(ServerConfig {
            grpc,
            http: self.address_besides("server.http", "server.grpc", grpc)?,
            metrics: self.choice("server.metrics", SWITCH)?,
            models: self.path("server.models")?,
            max_samples: count("server.max_samples")?,
            max_bytes: max_bytes as usize,
            max_requests: count("server.max_requests")?,
            max_inflight_bytes: inflight.unwrap_or(GIB.max(least)) as usize,
            max_connections: count("server.max_connections")?,
            handshake: seconds("server.handshake_seconds", 1)?,
            body: seconds("server.body_seconds", 1)?,
            write: seconds("server.write_seconds", 1)?,
            http_idle: seconds("server.http_idle_seconds", 1)?,
            grpc_idle: Some(seconds("server.grpc_idle_seconds", 0)?).filter(|idle| !idle.is_zero()),
            stream_idle: seconds("server.stream_idle_seconds", 1)?,
            max_streams: count("server.max_streams")? as u32,
            reflection: self.administration("server.reflection")?,
            admin: self.administration("server.admin")?,
            drain_delay: seconds("server.drain_delay_seconds", 0)?,
            drain: seconds("server.drain_seconds", 0)?,
        })
    }
}
