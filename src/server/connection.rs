//! The gRPC port: one task for each connection, and the limits on what its client may leave undone.
//!
//! * The HTTP/2 preface must arrive, after the TLS handshake (`socket.rs`), within
//!   `server.handshake_seconds`.
//! * An answer must leave within `server.write_seconds`, otherwise its connection is closed. A client that
//!   reads nothing, or grants no window, would hold memory, and calls in flight that others may need.
//! * A connection without calls for `server.grpc_idle_seconds` gets GOAWAY, and is closed soon after. Open
//!   health watches and reflection streams do not keep it (`ungated.rs`).
//! * A connection that resets calls faster than the server can end them is read more slowly
//!   (`connection_state.rs`).
//! * The calls of a connection leave a part of what is free to other connections (`charge.rs`).
//!
//! Answers count towards `server.max_inflight_bytes` until they have left (`answer.rs`).

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::body::Body;
use tonic::codegen::BoxFuture;
use tonic::codegen::http::{Request, Response};

use super::answer::Answer;
use super::connection_state::{ClientState, ConnectionState, CountedCall, NewCall, OpenCallCount};
use super::listener::{Connection, Limited, Permit};
use super::route::GrpcService;
use super::socket::Socket;
use super::unread::{self, Rest, Windows};
use super::{ServerState, stopped};
use crate::config::ServerConfig;

/// Each connection is pinged at this interval, and closed if no answer arrives within this timeout.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Most bytes of a request's headers.
const HEADER_BYTES: u32 = 16 << 10;

/// Most calls that a client may cancel before they are accepted; with more the connection ends, with all its
/// calls. The default is 20, but a proxy may cancel many calls at once when its own client has gone. So the
/// limit is more than the calls in the 16 KiB that are read at once (`connection_state.rs`), at 26 bytes for
/// each.
const RESETS_AT_ONCE: usize = 2048;

/// Most calls that HTTP/2 itself resets in the whole life of a connection. Each takes memory until the client
/// reads the reset, so their number needs a limit. h2 0.4.20 remembers only 50 calls that it has reset, and
/// for each later frame of another one it resets that call once more. Therefore the rest of a refused call is
/// read instead (`unread.rs`), and an honest client has next to no faults.
const FAULTS: usize = 100_000;

/// Most bytes of each answer that HTTP/2 takes before the socket does.
const SEND_BUFFER: usize = 64 << 10;

/// How often the limits of a connection are checked: several times within the shortest of them, but neither
/// all the time nor too late.
const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(10);
const MAX_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Accepts connections until `stop`, and serves them until they are closed.
pub(crate) struct GrpcPort<S> {
    pub state: Arc<ServerState>,
    pub service: S,
    pub times: ClientTimes,
    pub http2: Http2,
    pub stop: watch::Receiver<bool>,
}

/// What HTTP/2 allows a connection.
#[derive(Clone, Copy)]
pub(crate) struct Http2 {
    max_streams: u32,
    windows: Windows,
}

impl Http2 {
    pub(crate) fn new(config: &ServerConfig) -> Self {
        Self { max_streams: config.max_streams, windows: Windows::new(config) }
    }
}

/// How long a client may take.
#[derive(Clone, Copy)]
pub(crate) struct ClientTimes {
    pub handshake: Duration,
    pub write: Duration,
    pub idle: Option<Duration>,
}

impl ClientTimes {
    pub(crate) fn new(config: &ServerConfig) -> Self {
        Self { handshake: config.handshake, write: config.write, idle: config.grpc_idle }
    }

    fn check_every(&self) -> Duration {
        let shortest = self.handshake.min(self.write).min(self.idle.unwrap_or(Duration::MAX));
        (shortest / 4).clamp(MIN_CHECK_INTERVAL, MAX_CHECK_INTERVAL)
    }
}

impl<S: GrpcService> GrpcPort<S> {
    /// Ends when `stop` is set and all connections are closed.
    pub(crate) async fn serve(self, port: Limited) {
        let (stop, http2) = (self.stop.clone(), http2(self.http2));
        port.serve(stop, move |stream, permit| self.connection(stream, permit, &http2)).await;
    }

    fn connection(
        &self,
        stream: Socket,
        permit: Permit,
        http2: &http2::Builder<TokioExecutor>,
    ) -> impl Future<Output = ()> + Send + 'static + use<S> {
        let connection_state = Arc::new(ConnectionState::new(self.http2.max_streams as usize));
        let metrics = permit.metrics.clone();
        let stream = TokioIo::new(Connection::grpc(stream, permit, connection_state.clone()));
        let calls = Calls {
            service: self.service.clone(),
            state: self.state.clone(),
            connection_state: connection_state.clone(),
        };
        let connection = http2.serve_connection(stream, calls);
        let (times, mut stop) = (self.times, self.stop.clone());
        async move {
            let mut connection = pin!(connection);
            let mut checks = tokio::time::interval(times.check_every());
            let mut leaving: Option<Instant> = None;
            loop {
                tokio::select! {
                    // An error of the connection is the client's.
                    _ = poll_fn(|cx| {
                        connection_state.read_more();
                        connection.as_mut().poll(cx)
                    }) => return,
                    () = stopped(&mut stop), if leaving.is_none() => {
                        if !connection_state.greeted() {
                            return;
                        }
                        connection.as_mut().graceful_shutdown();
                        leaving = Some(Instant::now());
                    }
                    now = checks.tick() => match connection_state.client(&times, now) {
                        ClientState::Good => {}
                        ClientState::Idle if leaving.is_none() => {
                            connection.as_mut().graceful_shutdown();
                            leaving = Some(now);
                        }
                        // A client that does not close its end after GOAWAY gets no more time.
                        ClientState::Idle if leaving.is_some_and(|since| now < since + times.handshake) => {}
                        ClientState::Idle => return,
                        ClientState::Overdue(setting) => {
                            tracing::debug!("{setting}: a gRPC connection is closed");
                            metrics.overdue.increment(1);
                            return;
                        }
                    },
                }
            }
        }
    }
}

fn http2(Http2 { max_streams, windows }: Http2) -> http2::Builder<TokioExecutor> {
    let mut http2 = http2::Builder::new(TokioExecutor::new());
    http2
        .timer(TokioTimer::new())
        .max_concurrent_streams(max_streams)
        .max_pending_accept_reset_streams(RESETS_AT_ONCE)
        .max_local_error_reset_streams(FAULTS)
        .max_send_buf_size(SEND_BUFFER)
        .initial_connection_window_size(windows.connection)
        .initial_stream_window_size(windows.call)
        .keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .max_header_list_size(HEADER_BYTES);
    http2
}

/// The calls of a connection.
struct Calls<S> {
    service: S,
    state: Arc<ServerState>,
    connection_state: Arc<ConnectionState>,
}

impl<S: GrpcService> hyper::service::Service<Request<Incoming>> for Calls<S> {
    type Response = Response<Answer>;
    type Error = Infallible;
    type Future = Answering;

    fn call(&self, mut request: Request<Incoming>) -> Answering {
        let new = Some(NewCall::new(self.connection_state.clone()));
        let open = Arc::new(OpenCallCount::new(self.connection_state.clone()));
        request.extensions_mut().insert(self.connection_state.clone());
        let (head, body) = request.into_parts();
        let (body, rest) = unread::Body::new(body);
        // Every service of the chain is always ready.
        let answer = self.service.clone().call(Request::from_parts(head, Body::new(body)));
        Answering { new, open, answer, rest, state: self.state.clone() }
    }
}

/// A call before its answer.
struct Answering {
    /// `None` when it has begun.
    new: Option<NewCall>,
    /// Ends before the [`ExcludedCall`](super::connection_state::ExcludedCall) in `answer`, as in an answered
    /// call.
    open: Arc<OpenCallCount>,
    answer: BoxFuture<Response<Body>, Infallible>,
    rest: Rest,
    state: Arc<ServerState>,
}

impl Future for Answering {
    type Output = Result<Response<Answer>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.new = None;
        let mut response = ready!(self.answer.as_mut().poll(cx))?;
        let counted = CountedCall::new(self.open.clone(), response.extensions_mut().remove());
        self.rest.read(cx, counted.clone());
        Poll::Ready(Ok(Answer::of(response, self.state.clone(), counted)))
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
