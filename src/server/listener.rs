//! A port with a limited number of connections.
//!
//! Each connection holds a permit until it is closed. Without a free permit a new connection is closed at
//! once, so that its client can try another server. On the HTTP port a connection without an answer for some
//! time is closed, so a client that sends its request byte by byte cannot hold a permit for long.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};
use tonic::codegen::tokio_stream::Stream;
use tonic::transport::server::{Connected, TcpConnectInfo, TcpIncoming};

/// The connections of one port, at most `limit` at a time.
pub(crate) struct Limited {
    key: &'static str,
    incoming: TcpIncoming,
    permits: Arc<Semaphore>,
    limit: usize,
    answer_within: Option<Duration>,
    /// Whether the last connection was refused. Only the first refusal in a row is logged.
    full: bool,
}

impl Limited {
    pub(crate) fn new(key: &'static str, incoming: TcpIncoming, limit: usize) -> Self {
        let permits = Arc::new(Semaphore::new(limit));
        Self { key, incoming, permits, limit, answer_within: None, full: false }
    }

    /// Closes connections that get no answer for this long.
    pub(crate) fn with_answer_within(mut self, time: Duration) -> Self {
        self.answer_within = Some(time);
        self
    }

    /// The connection with a permit, or `None` if all permits are taken.
    fn admit(&mut self, stream: TcpStream) -> Option<Connection> {
        let Ok(permit) = self.permits.clone().try_acquire_owned() else {
            if !self.full {
                let (port, limit) = (self.key, self.limit);
                tracing::warn!(
                    port,
                    limit,
                    "server.max_connections reached: new connections are closed at once"
                );
            }
            self.full = true;
            return None;
        };
        self.full = false;
        let overdue = self.answer_within.map(|time| (time, Box::pin(tokio::time::sleep(time))));
        Some(Connection { stream, overdue, _permit: permit })
    }
}

impl Stream for Limited {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match Pin::new(&mut self.incoming).poll_next(cx) {
                Poll::Ready(Some(Ok(stream))) => {
                    if let Some(connection) = self.admit(stream) {
                        return Poll::Ready(Some(Ok(connection)));
                    }
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error))),
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

impl axum::serve::Listener for Limited {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            if let Some(Ok(connection)) = poll_fn(|cx| Pin::new(&mut *self).poll_next(cx)).await
                && let Ok(address) = connection.stream.peer_addr()
            {
                return (connection, address);
            }
            // Accepting fails, for example, when no file descriptors are left. Trying again at once would
            // be a busy loop.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.incoming.local_addr()
    }
}

/// A connection with its permit.
pub(crate) struct Connection {
    stream: TcpStream,
    /// The longest time without an answer, and its timer.
    overdue: Option<(Duration, Pin<Box<Sleep>>)>,
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    fn stream(self: Pin<&mut Self>) -> Pin<&mut TcpStream> {
        Pin::new(&mut self.get_mut().stream)
    }

    /// Restarts the timer, because bytes of an answer were written.
    fn answered(&mut self) {
        if let Some((time, sleep)) = &mut self.overdue {
            sleep.as_mut().reset(Instant::now() + *time);
        }
    }

    fn written(mut self: Pin<&mut Self>, polled: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if matches!(polled, Poll::Ready(Ok(bytes)) if bytes > 0) {
            self.answered();
        }
        polled
    }
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some((_, sleep)) = &mut self.overdue
            && sleep.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        self.stream().poll_read(cx, out)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = self.as_mut().stream().poll_write(cx, bytes);
        self.written(polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = self.as_mut().stream().poll_write_vectored(cx, slices);
        self.written(polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_shutdown(cx)
    }
}
