//! A stream of requests for scores, in any protocol. Its answers are in the order of the requests.
//!
//! Requests are read while earlier ones wait for their scores, so that they share batches, but at most
//! [`WINDOW`] are without an answer. A client that does not read its answers is not read from, and what its
//! answers may take is charged to its call until they leave. A request that fails gets an answer with the
//! error, and the stream goes on. The stream ends with a status if a message cannot be decoded, when its
//! deadline passes, or when it is idle for too long. The deadline also ends a stream whose client has sent
//! its last request. When the server drains, no more requests are read, and the stream ends with a status
//! after the answers to those that were: its client may have sent more of them.

use std::collections::VecDeque;
use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::time::{Instant, Sleep, sleep, sleep_until};
use tonic::codegen::tokio_stream::Stream;
use tonic::{Code, Status, Streaming};

use super::charge::HeldBytes;
use super::gate::{Call, too_large};
use super::pending::{Pending, ScoreRequest};
use super::{ServerState, stopped};

/// How a stream ends whose client may send more requests.
const DRAINS: &str = "the server is draining: no more requests of the stream are read";

/// Most requests of a stream without an answer.
const WINDOW: usize = 16;

type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A request whose answer was not sent.
struct Awaited<A> {
    future: Boxed<A>,
    /// `None` until it is there.
    answer: Option<A>,
    /// `None` if the request was refused.
    _held: Option<HeldBytes>,
}

impl<A> Awaited<A> {
    fn poll(&mut self, cx: &mut Context<'_>) {
        if self.answer.is_none()
            && let Poll::Ready(answer) = self.future.as_mut().poll(cx)
        {
            self.answer = Some(answer);
        }
    }
}

/// The answers of a stream.
pub(crate) struct Answers<R: ScoreRequest> {
    state: Arc<ServerState>,
    requests: Streaming<R>,
    call: Call,
    /// The requests that were read, in their order.
    pending: VecDeque<Awaited<R::Answer>>,
    /// Ends when the server drains.
    drained: Boxed<()>,
    /// The deadline of the call, until it has passed.
    deadline: Option<Pin<Box<Sleep>>>,
    /// Ends when no request has been read and no answer was sent for too long.
    idle: Pin<Box<Sleep>>,
    /// How the stream ends after the pending answers, if no more requests are read.
    end: Option<Result<(), Status>>,
}

impl<R: ScoreRequest> Answers<R> {
    pub(crate) fn new(state: Arc<ServerState>, requests: Streaming<R>, call: Call) -> Self {
        let mut closing = state.closing.subscribe();
        let drained = Box::pin(async move { stopped(&mut closing).await });
        let deadline = call.deadline.map(|deadline| Box::pin(sleep_until(deadline.into())));
        let idle = Box::pin(sleep(state.config.stream_idle));
        Self { state, requests, call, pending: VecDeque::new(), drained, deadline, idle, end: None }
    }

    /// Queues a request. Its answer follows those that are pending.
    fn begin(&mut self, request: R) {
        self.progress();
        let answer = request.answer();
        let pending = Pending::begin(&self.state, request, &self.call);
        // The request was converted to a batch, which the limits of the queue count, or refused.
        self.call.charge.release_first();
        let pending = pending.and_then(|pending| pending.hold_answer(&self.call));
        if let Err(error) = &pending
            && error.is_of_no_model()
        {
            self.count(error.code());
        }
        let (future, held): (Boxed<_>, _) = match pending {
            Ok((pending, held)) => (Box::pin(async move { answer(pending.finish().await) }), Some(held)),
            Err(error) => (Box::pin(ready(answer(Err(error)))), None),
        };
        self.pending.push_back(Awaited { future, answer: None, _held: held });
    }

    /// Restarts the limit of an idle stream.
    fn progress(&mut self) {
        self.idle.as_mut().reset(Instant::now() + self.state.config.stream_idle);
    }

    /// Ends the stream at its deadline, also if no more requests are read: the pending answers come too late.
    fn end_late(&mut self, cx: &mut Context<'_>) {
        if self.deadline.as_mut().is_none_or(|deadline| deadline.as_mut().poll(cx).is_pending()) {
            return;
        }
        self.deadline = None;
        self.pending.clear();
        // A stream that has failed keeps its status.
        if !matches!(self.end, Some(Err(_))) {
            let limit = self.call.deadline.map(|at| at.saturating_duration_since(self.call.arrival.at));
            let limit = limit.unwrap_or_default();
            let text = format!("deadline passed before the end of the stream: {limit:?} (grpc-timeout)");
            self.end(Status::deadline_exceeded(text));
        }
    }

    /// Ends the stream if it was idle for too long.
    fn end_idle(&mut self, cx: &mut Context<'_>) {
        if self.end.is_none() && self.pending.is_empty() && self.idle.as_mut().poll(cx).is_ready() {
            let limit = self.state.config.stream_idle.as_secs_f64();
            let text = format!("stream: no request for {limit} s (server.stream_idle_seconds)");
            self.end(Status::unavailable(text));
        }
    }

    /// Ends the stream with an error of the transport or of the protocol.
    fn fail(&mut self, status: Status) {
        let status = match status.code() {
            Code::OutOfRange => too_large(status.message(), self.state.config.max_bytes as u64),
            _ => status,
        };
        self.count(status.code());
        self.end(status);
    }

    /// Ends the stream with a status that is not counted, because no request has failed: an alert would fire
    /// at each drain, for quiet clients, and for clients that give their streams a deadline. Requests without
    /// an answer are counted.
    fn end(&mut self, status: Status) {
        self.call.count();
        let (id, method, code, error) =
            (self.call.id(), self.call.arrival.method(), status.code(), status.message());
        tracing::debug!(id, method, ?code, error, "the stream is ended");
        self.end = Some(Err(status));
    }

    /// Counts a failure that no model has counted.
    fn count(&self, code: Code) {
        self.call.count();
        self.state.metrics.no_model.count(code as i32);
    }

    /// Reads the requests that have arrived, as far as the window has room.
    fn read(&mut self, cx: &mut Context<'_>) {
        while self.end.is_none() && self.pending.len() < WINDOW {
            match Pin::new(&mut self.requests).poll_next(cx) {
                Poll::Ready(Some(Ok(request))) => self.begin(request),
                Poll::Ready(Some(Err(status))) => self.fail(status),
                Poll::Ready(None) => self.end = Some(Ok(())),
                Poll::Pending => return,
            }
        }
        self.call.charge.pause();
    }
}

impl<R: ScoreRequest> Stream for Answers<R> {
    type Item = Result<R::Answer, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        this.end_late(cx);
        this.read(cx);
        if this.end.is_none() && this.drained.as_mut().poll(cx).is_ready() {
            this.end(Status::unavailable(DRAINS));
        }
        this.end_idle(cx);
        // A request that expires leaves the queue, also if an earlier one is computed longer.
        this.pending.iter_mut().for_each(|awaited| awaited.poll(cx));
        if let Some(first) = this.pending.front_mut() {
            let Some(answer) = first.answer.take() else { return Poll::Pending };
            this.pending.pop_front();
            this.progress();
            return Poll::Ready(Some(Ok(answer)));
        }
        match &mut this.end {
            None => Poll::Pending,
            Some(Ok(())) => Poll::Ready(None),
            Some(end) => Poll::Ready(std::mem::replace(end, Ok(())).err().map(Err)),
        }
    }
}
