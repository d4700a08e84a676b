//! A request body whose bytes are charged while they arrive, and whose messages have to arrive in time.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http_body::{Frame, SizeHint};
use prost::bytes::Bytes;
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::Status;
use tonic::body::Body;

use super::{Layout, Meter};
use crate::server::charge::Charge;

/// A request body whose bytes are charged before the decoder gets them. It fails if a message is not complete
/// in time, because its call takes a place. A stream may be silent between its messages.
pub(crate) struct Metered {
    body: Body,
    meter: Meter,
    charge: Arc<Charge>,
    /// Messages that have arrived completely.
    messages: usize,
    /// When the message must be complete; `None` between the messages of a stream.
    due: Option<Instant>,
    /// Set when the body is first waited for. Most bodies arrive with their headers.
    late: Option<Pin<Box<Sleep>>>,
}

impl Metered {
    pub(crate) fn new(body: Body, layout: &'static Layout, charge: Arc<Charge>) -> Self {
        let meter = Meter::new(layout, charge.state.config.max_bytes);
        let due = (!charge.is_stream()).then(|| Instant::now() + charge.state.config.body);
        Self { body, meter, charge, messages: 0, due, late: None }
    }

    /// Waits for the rest of a message, but not for too long.
    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<Status> {
        let Some(due) = self.due else { return Poll::Pending };
        let late = self.late.get_or_insert_with(|| Box::pin(sleep_until(due)));
        ready!(late.as_mut().poll(cx));
        let limit = self.charge.state.config.body.as_secs_f64();
        let since = if self.charge.is_stream() { "first byte" } else { "headers" };
        let text = format!("message: it must be complete {limit} s (server.body_seconds) after its {since}");
        Poll::Ready(Status::deadline_exceeded(text))
    }

    /// The body has ended, or failed.
    ///
    /// # Errors
    /// When it ended before its message was complete, or the call is not admitted.
    fn ended(&self) -> Result<(), Status> {
        if self.charge.is_stream() {
            return Ok(());
        }
        if self.messages > 0 {
            return self.admit();
        }
        if http_body::Body::is_end_stream(&self.body) {
            return Err(Status::invalid_argument("message: missing or incomplete"));
        }
        self.charge.cancel();
        Ok(())
    }

    fn admit(&self) -> Result<(), Status> {
        self.charge.admit(self.meter.target.priority)
    }

    /// Limits the time of a stream's next message from now on, if a part of it has arrived.
    fn limit_anew(&mut self) {
        (self.due, self.late) = (None, None);
        self.limit();
    }

    /// Limits the time of a stream's next message, if a part of it has arrived and it has no limit yet.
    fn limit(&mut self) {
        if self.meter.is_between() {
            (self.due, self.late) = (None, None);
        } else if self.due.is_none() {
            self.due = Some(Instant::now() + self.charge.state.config.body);
        }
    }
}

impl http_body::Body for Metered {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if this.charge.resumed() {
            this.limit_anew();
        }
        let polled = Pin::new(&mut this.body).poll_frame(cx);
        if polled.is_pending() {
            return this.poll_late(cx).map(|status| Some(Err(status)));
        }
        let bytes = match &polled {
            Poll::Ready(Some(Ok(frame))) => frame.data_ref(),
            Poll::Ready(Some(Err(_))) if this.messages > 0 => return polled,
            _ => None,
        };
        let Some(bytes) = bytes else {
            return this.ended().map_or_else(|error| Poll::Ready(Some(Err(error))), |()| polled);
        };
        let before = this.messages;
        let charged = this.meter.feed(bytes, |message| {
            this.messages += 1;
            this.charge.ended(message);
        });
        let ended = this.messages > before;
        if this.charge.is_stream() {
            if ended { this.limit_anew() } else { this.limit() }
        } else if this.messages > 1 || (this.messages == 1 && !this.meter.is_between()) {
            // The charge belongs to the model of the first message.
            let status = Status::invalid_argument("message: expected one, got another one after it");
            return Poll::Ready(Some(Err(status)));
        }
        let charged = charged.map_err(Status::from).and_then(|cost| {
            if let Some(model) = this.meter.target.model.take() {
                this.charge.set_model(model);
            }
            this.charge.add_of_message(cost)?;
            // Otherwise the call is admitted when its body ends: the service is not called before that.
            if ended && this.body.is_end_stream() { this.admit() } else { Ok(()) }
        });
        match charged {
            Ok(()) => polled,
            Err(status) => Poll::Ready(Some(Err(status))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
