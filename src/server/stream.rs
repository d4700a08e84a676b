//! A stream of requests for scores, in any protocol. Its answers are in the order of the requests.
//!
//! Requests are read while earlier ones wait for their scores, so that they share batches, but at most
//! [`WINDOW`] are without an answer. A client that does not read its answers is not read from. A request that
//! fails gets an answer with the error, and the stream goes on. The stream ends with a status if a
//! message cannot be decoded, when its deadline passes, or when it is idle for too long. The deadline also
//! ends a stream whose client has sent its last request. When the server drains, no more requests are read.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::time::{Instant, Sleep, sleep, sleep_until};
use tonic::codegen::tokio_stream::Stream;
use tonic::{Code, Status, Streaming};

use super::gate::{Call, too_large};
use super::pending::{Pending, ScoreRequest};
use super::{Shared, stopped};

/// Most requests of a stream without an answer.
const WINDOW: usize = 16;

type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The answers of a stream.
pub(crate) struct Answers<R: ScoreRequest> {
    shared: Arc<Shared>,
    requests: Streaming<R>,
    call: Call,
    /// The answers to the requests that were read, in their order.
    pending: VecDeque<Boxed<R::Answer>>,
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
    pub(crate) fn new(shared: Arc<Shared>, requests: Streaming<R>, call: Call) -> Self {
        let mut closing = shared.closing.subscribe();
        let drained = Box::pin(async move { stopped(&mut closing).await });
        let deadline = call.deadline.map(|deadline| Box::pin(sleep_until(deadline.into())));
        let idle = Box::pin(sleep(shared.stream_idle));
        Self { shared, requests, call, pending: VecDeque::new(), drained, deadline, idle, end: None }
    }

    /// Queues a request. Its answer follows those that are pending.
    fn begin(&mut self, request: R) {
        self.progress();
        let answer = request.answer();
        let pending = Pending::begin(&self.shared, request, &self.call);
        // The request was converted to a batch, which the limits of the queue count, or refused.
        self.call.charge.release_first();
        if let Err(error) = &pending
            && error.is_of_no_model()
        {
            self.count(error.code());
        }
        self.pending.push_back(Box::pin(async move {
            let answered = match pending {
                Ok(pending) => pending.finish().await,
                Err(error) => Err(error),
            };
            answer(answered)
        }));
    }

    /// Restarts the limit of an idle stream.
    fn progress(&mut self) {
        self.idle.as_mut().reset(Instant::now() + self.shared.stream_idle);
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
            self.fail(Status::deadline_exceeded("deadline passed before the end of the stream"));
        }
    }

    /// Ends the stream if it was idle for too long.
    fn end_idle(&mut self, cx: &mut Context<'_>) {
        if self.end.is_none() && self.pending.is_empty() && self.idle.as_mut().poll(cx).is_ready() {
            let limit = self.shared.stream_idle.as_secs_f64();
            let text = format!("stream: no request for {limit} s (server.stream_idle_seconds)");
            self.fail(Status::unavailable(text));
        }
    }

    /// Ends the stream with an error of the transport or of the protocol.
    fn fail(&mut self, status: Status) {
        let status = match status.code() {
            Code::OutOfRange => too_large(status.message(), self.shared.limits.max_bytes as u64),
            _ => status,
        };
        self.count(status.code());
        let (id, method, code, error) =
            (self.call.id(), self.call.arrival.method(), status.code(), status.message());
        tracing::debug!(id, method, ?code, error, "the stream is ended");
        self.end = Some(Err(status));
    }

    /// Counts a failure that no model has counted.
    fn count(&self, code: Code) {
        self.call.count();
        self.shared.metrics.no_model.count(code as i32);
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
        if this.end.is_none() && this.drained.as_mut().poll(cx).is_ready() {
            this.end = Some(Ok(()));
        }
        this.read(cx);
        this.end_idle(cx);
        if let Some(first) = this.pending.front_mut() {
            let Poll::Ready(answer) = first.as_mut().poll(cx) else { return Poll::Pending };
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
