//! A layer around every call of a service that scores. It sees a call before its message is decoded.
//!
//! * The calls in flight of all connections are counted and limited, and so is the memory of their messages
//!   (`charge.rs`, `meter.rs`), in all and for each model. Calls of an overloaded model are refused before
//!   their message is decoded (`pressure.rs`).
//! * `grpc-timeout` becomes a deadline for the batcher, and a timer. The timer of tonic would answer
//!   `CANCELLED`, but the protocol requires `DEADLINE_EXCEEDED`. The gate's timer starts first and is polled
//!   first, so its answer is sent.
//! * tonic refuses a message that is too large with `OUT_OF_RANGE`. The gate changes that status to
//!   `RESOURCE_EXHAUSTED` with the name of the limit.
//! * Calls that never reach a model (undecodable, too large, unknown method) are counted here.
//! * A stream is one call in flight until its last answer has left. Its service handles the deadline, and
//!   releases the memory of its messages one by one. Under overload its requests are refused one by one too.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http_body::{Frame, SizeHint};
use tonic::body::Body;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::http::{HeaderMap, Request, Response, Uri};
use tonic::codegen::{BoxFuture, Bytes, Service};
use tonic::server::NamedService;
use tonic::{Code, Status};

use super::ServerState;
use super::charge::{CallKind, Charge};
use super::connection_state::ConnectionState;
use super::meter::{Layout, Metered};
use super::methods::Method;
use super::origin::Origin;
use super::report::{self, Instants, Report};
use super::status::CallError;

/// Most bytes of a method in the log. Those of the services are shorter.
const METHOD_BYTES: usize = 128;

/// A call, as the gate passes it to the service in the request's extensions.
#[derive(Clone)]
pub(crate) struct Call {
    pub deadline: Option<Instant>,
    pub arrival: Arc<Arrival>,
    /// What the call takes while it is in flight.
    pub charge: Arc<Charge>,
}

/// What the headers of a call say, and which parts of its end its service takes over from the gate.
pub(crate) struct Arrival {
    pub state: Arc<ServerState>,
    pub at: Instant,
    pub origin: Origin,
    path: Option<PathAndQuery>,
    /// When the single message of the call was decoded.
    decoded: OnceLock<Instant>,
    /// The service counts the call's status.
    counted: AtomicBool,
    /// The service reports the call, or each request of the stream.
    reported: AtomicBool,
}

impl Arrival {
    fn now(state: &Arc<ServerState>, uri: &Uri, headers: &HeaderMap) -> Self {
        Self {
            state: state.clone(),
            at: Instant::now(),
            origin: Origin::of(headers),
            path: uri.path_and_query().cloned(),
            decoded: OnceLock::new(),
            counted: AtomicBool::new(false),
            reported: AtomicBool::new(false),
        }
    }

    /// The error of a call whose own deadline has passed.
    pub(crate) fn late(&self, deadline: Instant) -> CallError {
        CallError::Late { field: "grpc-timeout", limit: deadline.saturating_duration_since(self.at) }
    }

    /// The service and the method, as the client has written them.
    pub(crate) fn method(&self) -> &str {
        method(self.path.as_ref().map_or("", PathAndQuery::path))
    }
}

/// The service and the method of a path, but not all of a long text.
pub(crate) fn method(path: &str) -> &str {
    let path = path.trim_start_matches('/');
    path.get(..METHOD_BYTES).unwrap_or(path)
}

impl Call {
    /// Takes the call out of a request, whose message is decoded now unless it is a stream.
    ///
    /// # Errors
    /// When the request has not passed a gate, which would be a mistake of the server.
    pub(crate) fn of<T>(request: &mut tonic::Request<T>) -> Result<Self, Status> {
        let call: Option<Self> = request.extensions_mut().remove();
        let call = call.ok_or_else(|| Status::internal("the call has passed no gate"))?;
        if !call.charge.is_stream() {
            call.arrival.decoded.get_or_init(Instant::now);
        }
        Ok(call)
    }

    /// The id of the call for the log, or an empty text.
    pub(crate) fn id(&self) -> String {
        self.arrival.origin.id("").into_owned()
    }

    /// The service counts the call's status.
    pub(crate) fn count(&self) {
        self.arrival.counted.store(true, Ordering::Relaxed);
    }

    /// The service reports the call, or each request of the stream.
    pub(crate) fn reported(&self) {
        self.arrival.reported.store(true, Ordering::Relaxed);
    }
}

/// A gRPC service behind the gate.
#[derive(Clone)]
pub(crate) struct Gate<S> {
    inner: S,
    state: Arc<ServerState>,
    /// The layout of the service's requests.
    requests: &'static Layout,
}

impl<S> Gate<S> {
    pub(crate) fn new(inner: S, state: Arc<ServerState>, requests: &'static Layout) -> Self {
        Self { inner, state, requests }
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
        let arrival = Arc::new(Arrival::now(&self.state, request.uri(), request.headers()));
        // Computed before the future runs, because tonic starts its own timer right after this function.
        let deadline = timeout(request.headers()).and_then(|rest| arrival.at.checked_add(rest));
        // The service refuses a method that it does not have.
        let kind = Method::of(request.uri().path()).and_then(Method::kind).unwrap_or(CallKind::Use);
        let entered = ConnectionState::of(&request);
        let entered = entered.ok_or_else(|| Status::internal("the call has no connection"));
        let entered = entered.and_then(|connection| Charge::enter(&self.state, connection, deadline, kind));
        let mut passage = Passage { arrival, charge: None, code: Code::Cancelled, error: None };
        let charge = match entered {
            Ok(charge) => passage.charge.insert(charge).clone(),
            Err(status) => {
                passage.refused(&status);
                return Box::pin(async move {
                    let _passage = passage;
                    Ok(status.into_http())
                });
            }
        };
        let mut request = request.map(|body| Body::new(Metered::new(body, self.requests, charge.clone())));
        let call = Call { deadline, arrival: passage.arrival.clone(), charge: charge.clone() };
        request.extensions_mut().insert(call);
        let answer = self.inner.call(request);
        match kind {
            CallKind::Stream => Box::pin(stream(passage, charge, answer)),
            _ => Box::pin(unary(passage, charge, deadline, answer)),
        }
    }
}

/// Awaits the beginning of the answers of a stream.
async fn stream(
    passage: Passage,
    charge: Arc<Charge>,
    answer: impl Future<Output = Result<Response<Body>, Infallible>>,
) -> Result<Response<Body>, Infallible> {
    let mut response = passage.stream(answer.await?);
    response.extensions_mut().insert(charge);
    Ok(response)
}

/// Awaits the answer to a single message, until the deadline.
async fn unary(
    passage: Passage,
    charge: Arc<Charge>,
    deadline: Option<Instant>,
    answer: impl Future<Output = Result<Response<Body>, Infallible>>,
) -> Result<Response<Body>, Infallible> {
    let response = match deadline {
        None => answer.await?,
        Some(deadline) => match tokio::time::timeout_at(deadline.into(), answer).await {
            Ok(response) => response?,
            Err(_) => Status::from(passage.arrival.late(deadline)).into_http(),
        },
    };
    // tonic answers `INTERNAL` then, as if the server had failed.
    let response = if charge.is_cancelled() {
        Status::cancelled("the client has ended the call before its message was complete").into_http()
    } else {
        response
    };
    let mut response = passage.leave(response);
    charge.answered(!response.headers().contains_key("grpc-status"));
    // The call is in flight until its answer has left (`answer.rs`).
    response.extensions_mut().insert(charge);
    Ok(response)
}

/// A call without an answer. If it is dropped without [`Passage::leave`], it was cancelled.
struct Passage {
    arrival: Arc<Arrival>,
    /// `None` if there are too many calls.
    charge: Option<Arc<Charge>>,
    code: Code,
    /// Kept if it is reported.
    error: Option<String>,
}

impl Passage {
    fn leave(mut self, response: Response<Body>) -> Response<Body> {
        // Only a response without a message has its status in the headers.
        let Some(status) = response.headers().get("grpc-status") else {
            self.code = Code::Ok;
            return response;
        };
        self.code = Code::from_bytes(status.as_bytes());
        // The generated services give no reason for a method that they do not have.
        if self.code == Code::Unimplemented && !response.headers().contains_key("grpc-message") {
            let method = self.arrival.method();
            let status = Status::unimplemented(format!("{method}: no such method (docs/api.md has all)"));
            self.refused(&status);
            return status.into_http();
        }
        if self.code != Code::OutOfRange && !self.wants_error() {
            return response;
        }
        let status = Status::from_header_map(response.headers());
        let status = status.unwrap_or_else(|| Status::new(self.code, ""));
        if self.code != Code::OutOfRange {
            self.refused(&status);
            return response;
        }
        let status = too_large(status.message(), self.arrival.state.config.max_bytes as u64);
        self.refused(&status);
        status.into_http()
    }

    /// The call ends with an error.
    fn refused(&mut self, status: &Status) {
        self.code = status.code();
        self.error = self.wants_error().then(|| status.message().to_owned());
    }

    /// Counts a call that no model has counted, for the model that it names if that is served. A message that
    /// cannot be decoded is `INTERNAL` for no model: it is its client's fault, and must not look like the
    /// model's.
    fn count(&self, took: Duration) {
        let state = &self.arrival.state;
        let charge = self.charge.as_ref().filter(|_| self.code != Code::Internal);
        let named = charge.and_then(|charge| Some((charge, charge.model_name()?)));
        let Some((charge, model)) = named.and_then(|(charge, name)| Some((charge, state.models.get(name)?)))
        else {
            return state.metrics.no_model.count(self.code as i32);
        };
        let metrics = &model.main().metrics;
        metrics.requests.count(self.code as i32);
        if charge.scores() {
            metrics.statistics.fail.add(1, took);
        }
    }

    /// Whether the gate reports the call with its error.
    fn wants_error(&self) -> bool {
        !self.arrival.reported.load(Ordering::Relaxed) && report::wants_errors(&self.arrival.state)
    }

    /// Leaves when the last answer was sent.
    fn stream(self, response: Response<Body>) -> Response<Body> {
        if response.headers().contains_key("grpc-status") {
            return self.leave(response);
        }
        response.map(|body| Body::new(CountedAnswers { body, passage: self }))
    }

    /// A stream ends with this status.
    fn ended(&mut self, status: &Status) {
        match status.code() {
            Code::Ok => self.code = Code::Ok,
            _ => self.refused(status),
        }
    }
}

/// The answers of a stream. When they are dropped, a stream that no model has counted is counted.
struct CountedAnswers {
    body: Body,
    passage: Passage,
}

impl http_body::Body for CountedAnswers {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                let status = frame.trailers_ref().and_then(Status::from_header_map);
                status.iter().for_each(|status| self.passage.ended(status));
            }
            Poll::Ready(Some(Err(status))) => self.passage.ended(status),
            Poll::Ready(None) | Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        let Arrival { at, decoded, counted, reported, .. } = &*self.arrival;
        let (counted, ended) = (counted.load(Ordering::Relaxed), Instant::now());
        if !counted {
            self.count(ended.saturating_duration_since(*at));
        }
        if reported.load(Ordering::Relaxed) {
            return;
        }
        // A call without a decoded message waited for it until the end. A counted stream had messages, or it
        // was quiet.
        let decoded = decoded.get().copied().unwrap_or(if counted { *at } else { ended });
        let report = Report {
            arrival: &self.arrival,
            id: "",
            model: self.charge.as_ref().and_then(|charge| charge.model_name()),
            version: None,
            samples: 0,
            code: self.code,
            error: self.error.as_deref(),
            fault: false,
            times: Instants { arrived: *at, decoded, steps: None, ended },
        };
        report.tell();
    }
}

/// The status for a message that tonic refused as too large. The size is only in the text of tonic's status.
pub(crate) fn too_large(text: &str, limit: u64) -> Status {
    let found = text.split("found ").nth(1).and_then(|rest| rest.split(' ').next());
    let got = found.map_or("more".to_owned(), |bytes| format!("{bytes} bytes"));
    Status::resource_exhausted(format!("message: limit {limit} bytes (server.max_bytes), got {got}"))
}

/// Reads `grpc-timeout`: at most eight digits and a unit. Anything else is ignored.
pub(super) fn timeout(headers: &HeaderMap) -> Option<Duration> {
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
