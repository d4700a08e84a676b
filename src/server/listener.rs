//! A port with a limited number of connections.
//!
//! Each connection holds a [`Permit`] until it is closed, and the metrics count permits. Without a free one a
//! new connection is closed at once, so that its client can try another server. If the system cannot accept
//! a connection, for example because the process has too many open files, the port waits before it tries
//! again.
//!
//! On the HTTP port a connection is closed if no whole answer has left for some time. So a client that sends
//! its request or reads an answer byte by byte, or not at all, cannot hold a permit for long.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::{Instant, Sleep};
use tonic::codegen::tokio_stream::Stream as _;
use tonic::transport::server::TcpIncoming;

use super::connection_state::ConnectionState;
use super::http_port::AnswerTimes;
use super::socket::Socket;
use super::stopped;
use crate::metrics::ConnectionMetrics;

/// The wait after a connection could not be accepted. Without it the port would be a busy loop.
const RETRY: Duration = Duration::from_millis(100);

/// Accepting works again if it has not failed for this long.
const RECOVERED: Duration = Duration::from_secs(5);

/// What the next connection needs for its TLS handshake; `None`: it is not encrypted.
pub(crate) type NextTls = Box<dyn Fn() -> Option<Arc<rustls::ServerConfig>> + Send>;

/// The limit of a port's open connections.
pub(crate) struct ConnectionLimit {
    permits: Arc<Semaphore>,
    connections: usize,
    metrics: Arc<ConnectionMetrics>,
}

impl ConnectionLimit {
    pub(crate) fn new(connections: usize, metrics: ConnectionMetrics) -> Self {
        metrics.most.set(connections as f64);
        Self { permits: Arc::new(Semaphore::new(connections)), connections, metrics: Arc::new(metrics) }
    }

    /// A permit, or `None` if all are taken.
    fn permit(&self) -> Option<Permit> {
        let Ok(permit) = self.permits.clone().try_acquire_owned() else {
            self.metrics.refused.increment(1);
            return None;
        };
        self.metrics.open.increment(1.0);
        Some(Permit { metrics: self.metrics.clone(), _permit: permit })
    }
}

/// Counts as an open connection until it is dropped.
pub(crate) struct Permit {
    pub metrics: Arc<ConnectionMetrics>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.metrics.open.decrement(1.0);
    }
}

/// The connections of one port.
pub(crate) struct Limited {
    key: &'static str,
    incoming: TcpIncoming,
    tls: NextTls,
    limit: ConnectionLimit,
    /// The last time that no connection could be accepted, until accepting works again.
    failed: Option<Instant>,
    /// The last time that a connection was closed at once because of the limit.
    full: Option<Instant>,
}

impl Limited {
    pub(crate) fn new(
        key: &'static str,
        incoming: TcpIncoming,
        tls: NextTls,
        limit: ConnectionLimit,
    ) -> Self {
        Self { key, incoming, tls, limit, failed: None, full: None }
    }

    /// Accepts connections until `stop` is set, and ends when the task of each of them has ended.
    pub(crate) async fn serve<F>(
        mut self,
        mut stop: watch::Receiver<bool>,
        task: impl Fn(Socket, Permit) -> F,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        // Each task has a sender, so the channel is closed when the last of them has ended.
        let (open, mut all_closed) = mpsc::channel::<Infallible>(1);
        loop {
            let (stream, permit) = tokio::select! {
                accepted = self.accept() => accepted,
                () = stopped(&mut stop) => break,
            };
            let (task, open) = (task(stream, permit), open.clone());
            tokio::spawn(async move {
                task.await;
                drop(open);
            });
        }
        // New connections are refused meanwhile.
        drop((self, open));
        all_closed.recv().await;
    }

    /// The next connection, with its permit. Nothing is lost if the future is dropped.
    async fn accept(&mut self) -> (Socket, Permit) {
        loop {
            match poll_fn(|cx| Pin::new(&mut self.incoming).poll_next(cx)).await {
                Some(Ok(tcp)) => {
                    self.accepts();
                    let Some(permit) = self.permit() else { continue };
                    if let Ok(stream) = Socket::new(self.key, tcp, (self.tls)(), permit.metrics.clone()) {
                        return (stream, permit);
                    }
                }
                Some(Err(error)) => self.fails(&error).await,
                // The stream of connections has no end.
                None => tokio::time::sleep(RETRY).await,
            }
        }
    }

    fn accepts(&mut self) {
        if self.failed.is_some_and(|last| last.elapsed() >= RECOVERED) {
            self.failed = None;
            tracing::info!(port = self.key, "connections are accepted again");
        }
    }

    async fn fails(&mut self, error: &io::Error) {
        use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
        // These concern one connection only, which has left the queue.
        if matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted) {
            return;
        }
        if self.failed.replace(Instant::now()).is_none() {
            tracing::error!(port = self.key, %error, "connections cannot be accepted; trying again");
        }
        tokio::time::sleep(RETRY).await;
    }

    /// A permit, or `None` if all are taken.
    fn permit(&mut self) -> Option<Permit> {
        let permit = self.limit.permit();
        if permit.is_none() {
            let last = self.full.replace(Instant::now());
            if last.is_none_or(|last| last.elapsed() >= RECOVERED) {
                let (port, limit) = (self.key, self.limit.connections);
                tracing::warn!(
                    port,
                    limit,
                    "as many connections are open as server.max_connections and the limit of open files \
                     allow: further ones are closed at once"
                );
            }
        }
        permit
    }
}

/// The time limit of the next answer of a connection.
struct Overdue {
    next: Duration,
    timer: Pin<Box<Sleep>>,
    /// Whether a part of an answer was written after the last flush.
    unflushed: bool,
}

impl Overdue {
    fn new(times: AnswerTimes) -> Self {
        Self { next: times.next, timer: Box::pin(tokio::time::sleep(times.first)), unflushed: false }
    }

    /// HTTP flushes when it has no more bytes to write, so an answer has left to the socket.
    fn flushed(&mut self) {
        if std::mem::take(&mut self.unflushed) {
            self.timer.as_mut().reset(Instant::now() + self.next);
        }
    }
}

/// A connection with its permit.
pub(crate) struct Connection {
    stream: Socket,
    /// On the HTTP port.
    overdue: Option<Overdue>,
    /// On the gRPC port: counts and limits the bytes that arrive.
    state: Option<Arc<ConnectionState>>,
    _permit: Permit,
}

impl Connection {
    pub(crate) fn http(stream: Socket, permit: Permit, times: AnswerTimes) -> Self {
        Self { stream, overdue: Some(Overdue::new(times)), state: None, _permit: permit }
    }

    pub(crate) fn grpc(stream: Socket, permit: Permit, state: Arc<ConnectionState>) -> Self {
        Self { stream, overdue: None, state: Some(state), _permit: permit }
    }

    fn stream(self: Pin<&mut Self>) -> Pin<&mut Socket> {
        Pin::new(&mut self.get_mut().stream)
    }

    /// Fails when the time for an answer is over.
    fn in_time(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let over = self.overdue.as_mut().is_some_and(|overdue| overdue.timer.as_mut().poll(cx).is_ready());
        if over { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }

    fn written(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        polled: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if polled.is_pending() {
            self.in_time(cx)?;
        } else if let (Poll::Ready(Ok(1..)), Some(overdue)) = (&polled, &mut self.overdue) {
            overdue.unflushed = true;
        }
        polled
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.in_time(cx)?;
        if let Some(state) = &self.state {
            ready!(state.poll_may_read(cx));
        }
        let before = out.filled().len();
        let polled = self.as_mut().stream().poll_read(cx, out);
        if let Some(state) = &self.state {
            state.received(out.filled().len() - before);
        }
        polled
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = self.as_mut().stream().poll_write(cx, bytes);
        self.written(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = self.as_mut().stream().poll_write_vectored(cx, slices);
        self.written(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = self.as_mut().stream().poll_flush(cx);
        // Encrypted bytes may wait for the socket.
        if polled.is_pending() {
            self.in_time(cx)?;
        } else if let Some(overdue) = &mut self.overdue {
            overdue.flushed();
        }
        polled
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = self.as_mut().stream().poll_shutdown(cx);
        if polled.is_pending() {
            self.in_time(cx)?;
        }
        polled
    }
}
