//! The gRPC port: one task for each connection, and the limits on what its client may leave undone.
//!
//! * The HTTP/2 preface must arrive, after the TLS handshake (`socket.rs`), within
//!   `server.handshake_seconds`.
//! * An answer must leave within `server.write_seconds`, otherwise its connection is closed. A client that
//!   reads nothing, or grants no window, would hold memory, and calls in flight that others may need.
//! * A connection without calls for `server.grpc_idle_seconds` gets GOAWAY, and is closed soon after. Open
//!   health watches and reflection streams do not keep it (`ungated.rs`).
//! * A connection that resets calls faster than the server can end them is read more slowly
//!   ([`Link::poll_may_read`]).
//! * The calls of a connection leave a part of what is free to other connections (`charge.rs`).
//!
//! The bytes of an answer count towards `server.max_inflight_bytes` until they are written to the socket or
//! dropped. HTTP/2 keeps them as [`Bytes`], so their owner ([`Unsent`]) sees both. It also keeps the call's
//! [`Charge`], so the call is in flight until then.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use prost::bytes::Bytes;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::BoxFuture;
use tonic::codegen::http::{Request, Response};

use super::charge::Charge;
use super::listener::{Connection, Limited, Permit};
use super::route::GrpcService;
use super::socket::Socket;
use super::unread::{self, Rest, Windows};
use super::{Shared, stopped};
use crate::config::ServerConfig;

/// Each connection is pinged at this interval, and closed if no answer arrives within this timeout.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Most bytes of a request's headers.
const HEADER_BYTES: u32 = 16 << 10;

/// Most bytes that are read from a connection before the calls in them are accepted.
const READ: usize = 16 << 10;

/// With more accepted calls than this whose tasks have not begun, nothing is read. Those tasks and other
/// connections take turns, so this bounds how long a connection can keep others waiting.
const MOST_NEW: usize = 128;

/// Most calls that a client may cancel before they are accepted; with more the connection ends, with all its
/// calls. The default is 20, but a proxy may cancel many calls at once when its own client has gone. So the
/// limit is more than the calls in [`READ`] bytes, at 26 bytes for each.
const RESETS_AT_ONCE: usize = 2048;

/// Most calls that HTTP/2 itself resets in the whole life of a connection. Each takes memory until the client
/// reads the reset, so their number needs a limit. h2 0.4.20 remembers only 50 calls that it has reset, and
/// for each later frame of another one it resets that call once more. Therefore the rest of a refused call is
/// read instead (`unread.rs`), and an honest client has next to no faults.
const FAULTS: usize = 100_000;

/// Most bytes of each answer that HTTP/2 takes before the socket does.
const SEND_BUFFER: usize = 64 << 10;

/// The first bytes of every HTTP/2 client: a fixed text of 24 bytes, and the 9 bytes of a frame's head.
const PREFACE: usize = 24 + 9;

/// How often the limits of a connection are checked: several times within the shortest of them, but neither
/// all the time nor too late.
const CHECKS: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(2));

/// Accepts connections until `stop`, and serves them until they are closed.
pub(crate) struct GrpcPort<S> {
    pub shared: Arc<Shared>,
    pub service: S,
    pub limits: Limits,
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
pub(crate) struct Limits {
    handshake: Duration,
    write: Duration,
    idle: Option<Duration>,
}

impl Limits {
    pub(crate) fn new(config: &ServerConfig) -> Self {
        Self { handshake: config.handshake, write: config.write, idle: config.grpc_idle }
    }

    fn check_every(&self) -> Duration {
        let shortest = self.handshake.min(self.write).min(self.idle.unwrap_or(Duration::MAX));
        (shortest / 4).clamp(CHECKS.0, CHECKS.1)
    }
}

impl<S: GrpcService> GrpcPort<S> {
    /// Ends when `stop` is set and all connections are closed.
    pub(crate) async fn serve(self, mut port: Limited) {
        let mut stop = self.stop.clone();
        let http2 = http2(self.http2);
        // Each task of a connection has a sender, so the channel is closed when the last of them has ended.
        let (open, mut all_closed) = mpsc::channel::<Infallible>(1);
        loop {
            let (stream, permit) = tokio::select! {
                accepted = port.accept() => accepted,
                () = stopped(&mut stop) => break,
            };
            let task = self.connection(stream, permit, &http2);
            let open = open.clone();
            tokio::spawn(async move {
                task.await;
                drop(open);
            });
        }
        drop((port, open));
        all_closed.recv().await;
    }

    fn connection(
        &self,
        stream: Socket,
        permit: Permit,
        http2: &http2::Builder<TokioExecutor>,
    ) -> impl Future<Output = ()> + Send + 'static {
        let link = Arc::new(Link::new(self.http2.max_streams as usize));
        let stream = TokioIo::new(Connection::grpc(stream, permit, link.clone()));
        let calls = Calls { service: self.service.clone(), shared: self.shared.clone(), link: link.clone() };
        let connection = http2.serve_connection(stream, calls);
        let (limits, mut stop) = (self.limits, self.stop.clone());
        async move {
            let mut connection = pin!(connection);
            let mut checks = tokio::time::interval(limits.check_every());
            let mut leaving: Option<Instant> = None;
            loop {
                tokio::select! {
                    // An error of the connection is the client's.
                    _ = poll_fn(|cx| { link.read_more(); connection.as_mut().poll(cx) }) => return,
                    () = stopped(&mut stop), if leaving.is_none() => {
                        if !link.greeted() {
                            return;
                        }
                        connection.as_mut().graceful_shutdown();
                        leaving = Some(Instant::now());
                    }
                    now = checks.tick() => match link.state(&limits, now) {
                        State::Good => {}
                        State::Idle if leaving.is_none() => {
                            connection.as_mut().graceful_shutdown();
                            leaving = Some(now);
                        }
                        // A client that does not close its end after GOAWAY gets no more time.
                        State::Idle if leaving.is_some_and(|since| now < since + limits.handshake) => {}
                        State::Idle => return,
                        State::Overdue(setting) => {
                            tracing::debug!("{setting}: a gRPC connection is closed");
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

/// What a connection's client does.
enum State {
    Good,
    /// No call was open for the idle limit, except health and reflection.
    Idle,
    /// The limit of this setting has passed.
    Overdue(&'static str),
}

/// What is known about a connection: shared by its task, its socket and its calls.
pub(crate) struct Link {
    opened: Instant,
    /// Bytes that arrived, up to [`PREFACE`].
    received: AtomicUsize,
    /// Bytes that may be read before the task gives way. The task accepts the calls that have arrived only
    /// when there is nothing more to read.
    may_read: AtomicUsize,
    /// Calls that the gate let in, counted by [`Charge`].
    pub in_flight: AtomicUsize,
    /// The memory of their messages, and of the connection's answers.
    pub bytes: AtomicUsize,
    /// With more calls than this, nothing is read.
    max_calls: usize,
    activity: Mutex<Activity>,
}

struct Activity {
    calls: usize,
    /// Those of them that do not keep the connection open.
    aside: usize,
    /// Those of them whose tasks have not begun.
    new: usize,
    /// The last begin or end of a call.
    idle_since: Instant,
    /// Wakes the connection's task when there are few enough calls to read on.
    reader: Option<Waker>,
    /// The start of each message that has not left, by the order of their starts.
    unsent: BTreeMap<u64, Instant>,
    next: u64,
}

impl Link {
    pub(crate) fn new(max_calls: usize) -> Self {
        let now = Instant::now();
        let (unsent, reader) = (BTreeMap::new(), None);
        let activity = Activity { calls: 0, aside: 0, new: 0, idle_since: now, reader, unsent, next: 0 };
        let [received, may_read, in_flight, bytes] = [(); 4].map(|()| AtomicUsize::new(0));
        Self { opened: now, received, may_read, in_flight, bytes, max_calls, activity: Mutex::new(activity) }
    }

    /// That of the connection that a call has come on.
    pub(crate) fn of<T>(request: &Request<T>) -> Option<&Arc<Self>> {
        request.extensions().get()
    }

    /// A call does not keep the connection open, if there are fewer than `most` such calls.
    pub(crate) fn step_aside(self: &Arc<Self>, most: usize) -> Option<Aside> {
        let mut activity = self.activity();
        (activity.aside < most).then(|| {
            activity.aside += 1;
            Aside(self.clone())
        })
    }

    fn activity(&self) -> MutexGuard<'_, Activity> {
        self.activity.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the counts of calls, and lets the connection's task read on if it may.
    fn change(&self, counts: impl FnOnce(&mut Activity)) {
        let mut activity = self.activity();
        counts(&mut activity);
        let reader = if self.reads(&activity) { activity.reader.take() } else { None };
        drop(activity);
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    fn reads(&self, activity: &Activity) -> bool {
        activity.calls <= self.max_calls && activity.new <= MOST_NEW
    }

    fn read_more(&self) {
        self.may_read.store(READ, Ordering::Relaxed);
    }

    /// Waits until the connection may be read from.
    ///
    /// HTTP/2 no longer counts a call that its client, or HTTP/2 itself, has reset. But the call takes memory
    /// and a turn of the processor until its task has seen that. So with more calls than HTTP/2 allows, those
    /// that were reset are ended first, and with many new calls those are begun first. None of this needs
    /// anything that is still to be read.
    pub(crate) fn poll_may_read(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.may_read.load(Ordering::Relaxed) == 0 {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let mut activity = self.activity();
        if self.reads(&activity) {
            return Poll::Ready(());
        }
        activity.reader = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Only the connection's task calls this.
    pub(crate) fn received(&self, bytes: usize) {
        let may_read = self.may_read.load(Ordering::Relaxed);
        self.may_read.store(may_read.saturating_sub(bytes), Ordering::Relaxed);
        let before = self.received.load(Ordering::Relaxed);
        if before < PREFACE {
            self.received.store(before + bytes, Ordering::Relaxed);
        }
    }

    fn greeted(&self) -> bool {
        self.received.load(Ordering::Relaxed) >= PREFACE
    }

    fn state(&self, limits: &Limits, now: Instant) -> State {
        if !self.greeted() {
            let late = now >= self.opened + limits.handshake;
            return if late { State::Overdue("server.handshake_seconds") } else { State::Good };
        }
        let activity = self.activity();
        if activity.unsent.values().next().is_some_and(|start| now >= *start + limits.write) {
            return State::Overdue("server.write_seconds");
        }
        let idle = limits.idle.is_some_and(|limit| now >= activity.idle_since + limit);
        if idle && activity.calls <= activity.aside { State::Idle } else { State::Good }
    }
}

/// The calls of a connection.
struct Calls<S> {
    service: S,
    shared: Arc<Shared>,
    link: Arc<Link>,
}

impl<S: GrpcService> hyper::service::Service<Request<Incoming>> for Calls<S> {
    type Response = Response<Answer>;
    type Error = Infallible;
    type Future = Answering;

    fn call(&self, mut request: Request<Incoming>) -> Answering {
        let new = Some(NewCall::new(self.link.clone()));
        let open = Arc::new(OpenStream::new(self.link.clone()));
        request.extensions_mut().insert(self.link.clone());
        let (head, body) = request.into_parts();
        let (body, rest) = unread::Body::new(body);
        // Every service of the chain is always ready.
        let answer = self.service.clone().call(Request::from_parts(head, Body::new(body)));
        Answering { new, answer, rest, shared: self.shared.clone(), open }
    }
}

/// A call before its answer.
struct Answering {
    /// `None` when it has begun.
    new: Option<NewCall>,
    answer: BoxFuture<Response<Body>, Infallible>,
    rest: Rest,
    shared: Arc<Shared>,
    open: Arc<OpenStream>,
}

impl Future for Answering {
    type Output = Result<Response<Answer>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.new = None;
        let mut response = ready!(self.answer.as_mut().poll(cx))?;
        self.rest.read(cx, &self.open);
        let held = response.extensions_mut();
        let call = OpenCall {
            shared: self.shared.clone(),
            open: self.open.clone(),
            _charge: held.remove(),
            _aside: held.remove(),
        };
        Poll::Ready(Ok(response.map(|body| Answer { body, call: Some(Arc::new(call)) })))
    }
}

/// A call of a connection, until the last byte of its answer has left.
struct OpenCall {
    shared: Arc<Shared>,
    open: Arc<OpenStream>,
    /// `None` if the gate did not admit the call.
    _charge: Option<Arc<Charge>>,
    _aside: Option<Arc<Aside>>,
}

/// Counts as a call of its connection.
pub(crate) struct OpenStream(Arc<Link>);

impl OpenStream {
    fn new(link: Arc<Link>) -> Self {
        link.change(|activity| {
            activity.calls += 1;
            activity.idle_since = Instant::now();
        });
        Self(link)
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.change(|activity| {
            activity.calls -= 1;
            activity.idle_since = Instant::now();
        });
    }
}

/// A call whose task has not begun.
struct NewCall(Arc<Link>);

impl NewCall {
    fn new(link: Arc<Link>) -> Self {
        link.change(|activity| activity.new += 1);
        Self(link)
    }
}

impl Drop for NewCall {
    fn drop(&mut self) {
        self.0.change(|activity| activity.new -= 1);
    }
}

/// A call that does not keep its connection open.
pub(crate) struct Aside(Arc<Link>);

impl Drop for Aside {
    fn drop(&mut self) {
        self.0.activity().aside -= 1;
    }
}

/// The body of an answer.
pub(crate) struct Answer {
    body: Body,
    /// `None` after the last message.
    call: Option<Arc<OpenCall>>,
}

impl Answer {
    fn end(&mut self) {
        self.call = None;
        // The body of a stream has the call's charge too.
        self.body = Body::empty();
    }
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
            Some(Ok(frame)) => frame,
            end => {
                self.end();
                return Poll::Ready(end);
            }
        };
        let frame = match (frame.into_data(), &self.call) {
            (Ok(bytes), Some(call)) => Frame::data(Bytes::from_owner(Unsent::new(bytes, call.clone()))),
            (Ok(bytes), None) => Frame::data(bytes),
            (Err(trailers), _) => {
                // The client may count on the call's place as soon as it has the trailers.
                self.end();
                trailers
            }
        };
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Bytes of an answer that have not been written to the socket. They are dropped when they are written, or
/// when their stream or connection ends.
struct Unsent {
    bytes: Bytes,
    number: u64,
    call: Arc<OpenCall>,
}

impl Unsent {
    fn new(bytes: Bytes, call: Arc<OpenCall>) -> Self {
        call.shared.in_flight_bytes.fetch_add(bytes.len(), Ordering::AcqRel);
        call.open.0.bytes.fetch_add(bytes.len(), Ordering::Relaxed);
        let mut activity = call.open.0.activity();
        let number = activity.next;
        activity.next += 1;
        activity.unsent.insert(number, Instant::now());
        drop(activity);
        Self { bytes, number, call }
    }
}

impl AsRef<[u8]> for Unsent {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Unsent {
    fn drop(&mut self) {
        self.call.shared.in_flight_bytes.fetch_sub(self.bytes.len(), Ordering::AcqRel);
        self.call.open.0.bytes.fetch_sub(self.bytes.len(), Ordering::Relaxed);
        self.call.open.0.activity().unsent.remove(&self.number);
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
