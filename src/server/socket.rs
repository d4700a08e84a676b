//! The socket of a connection, encrypted or not.
//!
//! The TLS handshake is part of the first read or write, so it needs no task or timer of its own: the limits
//! of a connection that has sent nothing hold for it too, on both ports.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;
use tokio_rustls::{FallibleAccept, TlsAcceptor};

use crate::metrics::ConnectionMetrics;

/// Most encrypted bytes that wait for the socket. They no longer count as bytes of an answer.
const ENCRYPTED: usize = 32 << 10;

/// The first byte of a TLS client. No HTTP client begins with it.
const TLS_HANDSHAKE: u8 = 0x16;

/// A connection of a port.
pub(crate) struct Socket {
    /// The setting of the port.
    port: &'static str,
    peer: SocketAddr,
    metrics: Arc<ConnectionMetrics>,
    state: State,
}

enum State {
    /// `begun`: something has arrived.
    Plain {
        tcp: TcpStream,
        begun: bool,
    },
    Handshake(Box<FallibleAccept<TcpStream>>),
    Encrypted(Box<TlsStream<TcpStream>>),
    /// The handshake has failed.
    Failed,
}

trait Io: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> Io for T {}

impl Socket {
    /// With `tls` the client must begin a handshake.
    ///
    /// # Errors
    /// When the client has gone.
    pub(crate) fn new(
        port: &'static str,
        tcp: TcpStream,
        tls: Option<Arc<rustls::ServerConfig>>,
        metrics: Arc<ConnectionMetrics>,
    ) -> io::Result<Self> {
        let peer = tcp.peer_addr()?;
        let state = match tls {
            None => State::Plain { tcp, begun: false },
            Some(config) => {
                let limit =
                    |session: &mut rustls::ServerConnection| session.set_buffer_limit(Some(ENCRYPTED));
                let accept = TlsAcceptor::from(config).accept_with(tcp, limit);
                State::Handshake(Box::new(accept.into_fallible()))
            }
        };
        Ok(Self { port, peer, metrics, state })
    }

    /// The stream of bytes, after the handshake.
    fn open(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Pin<&mut dyn Io>>> {
        if let State::Handshake(accept) = &mut self.state {
            self.state = match ready!(Pin::new(accept).poll(cx)) {
                Ok(stream) => State::Encrypted(Box::new(stream)),
                Err((error, _)) => {
                    let (port, peer) = (self.port, self.peer);
                    tracing::debug!(port, %peer, %error, "a TLS handshake has failed");
                    // A client that only closes may be a probe of a load balancer.
                    if error.kind() == io::ErrorKind::InvalidData {
                        self.metrics.handshakes_failed.increment(1);
                    }
                    State::Failed
                }
            };
        }
        Poll::Ready(match &mut self.state {
            State::Plain { tcp, .. } => Ok(Pin::new(tcp)),
            State::Encrypted(stream) => Ok(Pin::new(stream)),
            State::Handshake(_) | State::Failed => Err(io::ErrorKind::ConnectionAborted.into()),
        })
    }

    /// Refuses a client that begins with TLS on a port without it.
    fn received(&mut self, bytes: &[u8]) -> io::Result<()> {
        let State::Plain { begun: begun @ false, .. } = &mut self.state else { return Ok(()) };
        *begun = !bytes.is_empty();
        if bytes.first() != Some(&TLS_HANDSHAKE) {
            return Ok(());
        }
        let (port, peer) = (self.port, self.peer);
        tracing::debug!(port, %peer, "a client begins with TLS, which this port does not use");
        self.metrics.handshakes_failed.increment(1);
        Err(io::ErrorKind::InvalidData.into())
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = out.filled().len();
        ready!(ready!(self.open(cx))?.poll_read(cx, out))?;
        Poll::Ready(self.received(&out.filled()[before..]))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.open(cx))?.poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.open(cx))?.poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        // A socket and rustls both take many slices at once.
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.open(cx))?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &self.state {
            // No session is open, so there is nothing to close.
            State::Handshake(_) | State::Failed => Poll::Ready(Ok(())),
            State::Plain { .. } | State::Encrypted(_) => ready!(self.open(cx))?.poll_shutdown(cx),
        }
    }
}
