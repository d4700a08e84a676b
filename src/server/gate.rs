//! A layer around every `Ctr` call. It sees a call before its message is decoded.
//!
//! * The calls in flight of all connections are counted and limited, and so is the memory of their messages
//!   (`meter.rs`).
//! * `grpc-timeout` becomes a deadline for the batcher, and a timer. The timer of tonic would answer
//!   `CANCELLED`, but the protocol requires `DEADLINE_EXCEEDED`. The gate's timer starts first and is polled
//!   first, so its answer is sent.
//! * tonic refuses a message that is too large with `OUT_OF_RANGE`. The gate changes that status to
//!   `RESOURCE_EXHAUSTED` with the name of the limit.
//! * Calls that never reach a model (undecodable, too large, unknown method) are counted here.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, Request, Response};
use tonic::codegen::{BoxFuture, Service};
use tonic::server::NamedService;
use tonic::{Code, Status};

use super::Shared;
use super::meter::{Charge, Metered};
use super::pressure::overloaded;

/// A call, as the gate passes it to the service in the request's extensions.
#[derive(Clone)]
pub(crate) struct Call {
    pub deadline: Option<Instant>,
    /// Set by the service when it counts the call's status.
    pub counted: Arc<AtomicBool>,
}

/// A gRPC service behind the gate.
#[derive(Clone)]
pub(crate) struct Gate<S> {
    inner: S,
    shared: Arc<Shared>,
}

impl<S> Gate<S> {
    pub(crate) fn new(inner: S, shared: Arc<Shared>) -> Self {
        Self { inner, shared }
    }
}

impl<S: NamedService> NamedService for Gate<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Gate<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // Computed before the future runs, because tonic starts its own timer right after this function.
        let deadline = timeout(request.headers()).and_then(|rest| Instant::now().checked_add(rest));
        let call = Call { deadline, counted: Arc::default() };
        let (charge, in_flight) = Charge::enter(self.shared.clone());
        let limit = self.shared.max_requests;
        let mut passage =
            Passage { shared: self.shared.clone(), counted: call.counted.clone(), code: Code::Cancelled };
        if in_flight > limit {
            let text = format!("calls in flight: limit {limit} (server.max_requests), got {in_flight}");
            passage.code = Code::ResourceExhausted;
            return Box::pin(async move {
                let _held = (passage, charge);
                Ok(Status::resource_exhausted(text).into_http())
            });
        }
        if let Some(takes) = self.shared.pressure.too_long(in_flight, deadline) {
            self.shared.pressure.refused();
            passage.code = Code::ResourceExhausted;
            let text = format!("overloaded: a call takes about {} ms now", takes.as_millis());
            return Box::pin(async move {
                let _passage = passage;
                Ok(overloaded(text, takes).into_http())
            });
        }
        let mut request = request.map(|body| Body::new(Metered::new(body, charge.clone())));
        request.extensions_mut().insert(call);
        let answer = self.inner.call(request);
        Box::pin(async move {
            let response = match deadline {
                None => answer.await?,
                Some(deadline) => match tokio::time::timeout_at(deadline.into(), answer).await {
                    Ok(response) => response?,
                    Err(_) => Status::deadline_exceeded("deadline passed before the answer").into_http(),
                },
            };
            let mut response = passage.leave(response);
            // The call keeps its place and its memory until its answer has left (`connection.rs`).
            response.extensions_mut().insert(charge);
            Ok(response)
        })
    }
}

/// A call without an answer. If it is dropped without [`Passage::leave`], it was cancelled.
struct Passage {
    shared: Arc<Shared>,
    counted: Arc<AtomicBool>,
    code: Code,
}

impl Passage {
    fn leave(mut self, response: Response<Body>) -> Response<Body> {
        // Only a response without a message has its status in the headers.
        let Some(status) = response.headers().get("grpc-status") else {
            self.code = Code::Ok;
            self.shared.pressure.answered();
            return response;
        };
        self.code = Code::from_bytes(status.as_bytes());
        if self.code != Code::OutOfRange {
            return response;
        }
        self.code = Code::ResourceExhausted;
        too_large(response.headers(), self.shared.limits.max_bytes as u64).into_http()
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        if !self.counted.load(Ordering::Relaxed) {
            self.shared.metrics.no_model.count(self.code as i32);
        }
    }
}

/// The status for a message that tonic refused as too large. The size is only in the text of tonic's status.
fn too_large(headers: &HeaderMap, limit: u64) -> Status {
    let text = Status::from_header_map(headers).map(|s| s.message().to_owned()).unwrap_or_default();
    let found = text.split("found ").nth(1).and_then(|rest| rest.split(' ').next());
    let got = found.map_or("more".to_owned(), |bytes| format!("{bytes} bytes"));
    Status::resource_exhausted(format!("message: limit {limit} bytes (server.max_bytes), got {got}"))
}

/// Reads `grpc-timeout`: at most eight digits and a unit. Anything else is ignored.
fn timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
