//! A layer around health (also KServe's) and reflection. They are not behind the gate, so that they answer
//! when all places are taken. They have limits of their own:
//!
//! * A connection has at most [`MAX_OPEN`] of them open.
//! * Their messages must be complete after some time, which the service's [`MessageTime`] says.
//! * A health watch may last, because a load balancer keeps one open on each of its connections. But a
//!   connection whose only calls are of this layer counts as one without calls (`connection.rs`).

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http_body::{Frame, SizeHint};
use tokio::time::{Sleep, sleep};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{BoxFuture, Bytes, Service};
use tonic::server::NamedService;

use super::connection_state::ConnectionState;
use super::route::GrpcService;

/// Most open calls of a connection. Clients need one or two, and a proxy one for each client behind it.
const MAX_OPEN: usize = 32;

/// How long the messages of a call may take from its headers, and the setting that says so.
#[derive(Clone, Copy)]
pub(crate) struct MessageTime {
    pub time: Duration,
    pub setting: &'static str,
}

/// A gRPC service behind the layer.
#[derive(Clone)]
pub(crate) struct Ungated<S> {
    inner: S,
    limit: MessageTime,
}

impl<S> Ungated<S> {
    pub(crate) fn new(inner: S, limit: MessageTime) -> Self {
        Self { inner, limit }
    }
}

impl<S: NamedService> NamedService for Ungated<S> {
    const NAME: &'static str = S::NAME;
}

impl<S: GrpcService> Service<Request<Body>> for Ungated<S> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let Some(excluded) =
            ConnectionState::of(&request).and_then(|connection| connection.exclude_call(MAX_OPEN))
        else {
            let text =
                format!("health and reflection: limit {MAX_OPEN} open calls of a connection, got more");
            return Box::pin(async { Ok(Status::resource_exhausted(text).into_http()) });
        };
        let answer = self.inner.call(request.map(|body| Body::new(Timed::new(body, self.limit))));
        Box::pin(async move {
            let mut response = answer.await?;
            response.extensions_mut().insert(Arc::new(excluded));
            Ok(response)
        })
    }
}

/// The messages of a call.
struct Timed {
    body: Body,
    limit: MessageTime,
    late: Pin<Box<Sleep>>,
}

impl Timed {
    fn new(body: Body, limit: MessageTime) -> Self {
        Self { body, limit, late: Box::pin(sleep(limit.time)) }
    }
}

impl http_body::Body for Timed {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if polled.is_ready() {
            return polled;
        }
        ready!(self.late.as_mut().poll(cx));
        let MessageTime { time, setting } = self.limit;
        let text = format!("request: it must end {} s ({setting}) after its headers", time.as_secs_f64());
        Poll::Ready(Some(Err(Status::deadline_exceeded(text))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
