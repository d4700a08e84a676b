//! Bytes that a client has sent and the server has not read: the windows of HTTP/2, and the messages of calls
//! that the server has refused or ended.
//!
//! For each unread DATA frame shorter than 256 bytes, h2 also counts the bytes that the frame lacks to 256.
//! If the sum of these bytes is more than half of the connection's window, h2 closes the connection with all
//! of its calls. So:
//!
//! * The windows have room for small frames ([`Windows`]).
//! * h2 0.4.20 goes on counting a frame that arrives after the body of its call was dropped. A call that is
//!   refused at once leaves such a frame, and some hundred refusals would close the connection, as would
//!   streams that the server ends. It also takes such frames for faults (`connection.rs`). So the rest of the
//!   body is read while the answer leaves ([`Body`], [`Rest`]).

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use prost::bytes::Bytes;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::connection_state::CountedCall;
use crate::config::ServerConfig;
use crate::sync::EvenPoisoned;

/// The least that h2 counts for a DATA frame, in bytes.
const FRAME: usize = 256;

/// Bytes that one call may send before they are read. A client may send its first calls before it learns of a
/// smaller window. With the default of `server.max_streams`, one call may fill its window with frames of 52
/// bytes.
const CALL: u32 = 65_535;

/// Least and most bytes that all calls of a connection may send before they are read.
const CONNECTION: (usize, usize) = (CALL as usize, 1 << 20);

/// How long the rest of a call is read that was refused or ended: until its client must have learned of that.
const WAIT: Duration = Duration::from_secs(1);

/// Bytes that a client may send before they are read.
#[derive(Clone, Copy)]
pub(crate) struct Windows {
    pub call: u32,
    pub connection: u32,
}

impl Windows {
    /// The windows are fixed when a connection opens, and unread bytes count in no other limit. The window of
    /// a connection is its share of `server.max_inflight_bytes`, but has room for a small frame of each call.
    /// So with the defaults, all connections together may have twice `server.max_inflight_bytes`.
    pub(crate) fn new(config: &ServerConfig) -> Self {
        let (least, most) = CONNECTION;
        let share = (config.max_inflight_bytes / config.max_connections.max(1)).clamp(least, most);
        let small = (2 * FRAME).saturating_mul(config.max_streams as usize);
        Self { call: CALL, connection: share.max(small).min(i32::MAX as usize) as u32 }
    }
}

/// The body of a request. When it is dropped before its end, it is left as the [`Rest`].
pub(crate) struct Body {
    /// `None` when it is being dropped.
    body: Option<Incoming>,
    left: Arc<Mutex<Left>>,
}

/// Which of the two came first: the end of the service's reading, or the beginning of the answer.
#[derive(Default)]
enum Left {
    #[default]
    Neither,
    /// The service has dropped the body before its end.
    Unread(Incoming),
    /// The answer has begun. If the call is a stream, its body is still read.
    Answered(CountedCall),
}

impl Body {
    pub(crate) fn new(body: Incoming) -> (Self, Rest) {
        let left = Arc::default();
        let rest = Rest(Arc::clone(&left));
        (Self { body: Some(body), left }, rest)
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        Pin::new(body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::default, Incoming::size_hint)
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        let Some(body) = self.body.take().filter(|body| !body.is_end_stream()) else { return };
        let mut left = self.left.lock().even_poisoned();
        match std::mem::take(&mut *left) {
            Left::Answered(call) => spawn_read(body, call),
            Left::Neither | Left::Unread(_) => *left = Left::Unread(body),
        }
    }
}

/// What a call that is refused or ended leaves unread.
pub(crate) struct Rest(Arc<Mutex<Left>>);

impl Rest {
    /// Reads and drops what the service has not read, or will not have read when it ends, while the answer
    /// leaves. Meanwhile the call is open.
    pub(crate) fn read(&self, cx: &mut Context<'_>, call: CountedCall) {
        let mut left = self.0.lock().even_poisoned();
        let Left::Unread(mut body) = std::mem::replace(&mut *left, Left::Answered(call.clone())) else {
            return;
        };
        // Mostly it has arrived.
        if poll_end(&mut body, cx).is_pending() {
            spawn_read(body, call);
        }
    }
}

/// Reads and drops a body up to its end, for a limited time.
fn spawn_read(mut body: Incoming, call: CountedCall) {
    // Without a runtime the server has ended, and its connections too.
    let Ok(runtime) = Handle::try_current() else { return };
    runtime.spawn(async move {
        // If it does not end, the client is told to stop when the body is dropped.
        let _ = timeout(WAIT, poll_fn(|cx| poll_end(&mut body, cx))).await;
        drop(call);
    });
}

/// Reads and drops a body up to its end.
fn poll_end(body: &mut Incoming, cx: &mut Context<'_>) -> Poll<()> {
    while let Some(Ok(_)) = ready!(Pin::new(&mut *body).poll_frame(cx)) {}
    Poll::Ready(())
}
