//! The answers of a gRPC connection. The bytes of an answer count towards `server.max_inflight_bytes` until
//! they are written to the socket or dropped. HTTP/2 keeps them as [`Bytes`], so their owner ([`Unsent`])
//! sees both. It also keeps the call's [`Charge`], so the call is in flight until then.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use http_body::{Frame, SizeHint};
use prost::bytes::Bytes;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::Response;

use super::ServerState;
use super::charge::Charge;
use super::connection_state::CountedCall;

/// A call of a connection, until the last byte of its answer has left.
struct OpenCall {
    state: Arc<ServerState>,
    counted: CountedCall,
    /// `None` if the gate did not admit the call.
    _charge: Option<Arc<Charge>>,
}

/// The body of an answer.
pub(crate) struct Answer {
    body: Body,
    /// `None` after the last message.
    call: Option<Arc<OpenCall>>,
}

impl Answer {
    /// The answer of an open call, with the [`Charge`] that the gate has put into the response.
    pub(super) fn of(
        mut response: Response<Body>,
        state: Arc<ServerState>,
        counted: CountedCall,
    ) -> Response<Self> {
        let call = Arc::new(OpenCall { state, counted, _charge: response.extensions_mut().remove() });
        response.map(|body| Self { body, call: Some(call) })
    }

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
        call.state.in_flight_bytes.fetch_add(bytes.len(), Ordering::AcqRel);
        let number = call.counted.connection().begin_send(bytes.len());
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
        self.call.state.in_flight_bytes.fetch_sub(self.bytes.len(), Ordering::AcqRel);
        self.call.counted.connection().end_send(self.number, self.bytes.len());
    }
}
