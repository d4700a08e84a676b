//! What a call takes while it is in flight: a place, and the memory of its messages.
//!
//! All calls together have `server.max_requests` places and `server.max_inflight_bytes`. A model gets at most
//! [`SHARE`] times what is free of them, so clients of one model cannot take them from another one: whatever
//! they send, a quarter stays free, and the more models need places, the closer each comes to an equal part.
//! If only one model is served, it gets all.
//!
//! A call gets its place when the name of its model has been read, before the message is decoded. Calls that
//! have no name yet, and those whose refusal has not left, have no place. There are at most as many of them
//! as places. The place and the memory of a stream belong to no model, because it has requests for any. Those
//! of a call that changes a model belong to none either, so that an overloaded one can be changed.
//!
//! So a client could open calls without a message, or silent streams, until nothing is free. Therefore a
//! connection gets at most [`SHARE`] times what is free for its calls without a model, as a model does.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use tonic::Status;

use super::Shared;
use super::connection::{Link, Unnamed};
use super::pressure::{Pressure, overloaded};
use super::status::FULL;
use crate::batcher::Priority;

/// How much a model, or a connection without naming one, may hold, in what is free.
const SHARE: usize = 3;

/// A call in flight: its place, and its memory, which counts towards `server.max_inflight_bytes`. Both are
/// free when this is dropped.
pub(crate) struct Charge {
    pub shared: Arc<Shared>,
    deadline: Option<Instant>,
    bytes: AtomicUsize,
    place: OnceLock<Place>,
    /// `None` when the call has a model, or a place of its own.
    unnamed: Mutex<Option<Unnamed>>,
    /// Set when the message has arrived.
    priority: OnceLock<Priority>,
    kind: Kind,
    /// The client has ended the call before its message was complete.
    cancelled: AtomicBool,
    /// `None` for a call with a single message.
    stream: Option<OfStream>,
}

/// What a call does with its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One message, for the model that it names.
    Use,
    /// One message, which changes a model.
    Change,
    /// A stream of messages for any models.
    Stream,
}

/// A place among the calls in flight.
struct Place {
    shared: Arc<Shared>,
    model: Option<Arc<Pressure>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.places.fetch_sub(1, Ordering::AcqRel);
        self.model.iter().for_each(|model| model.leave());
    }
}

/// A stream's messages.
#[derive(Default)]
struct OfStream {
    /// The cost of each complete message that was not released yet.
    messages: Mutex<VecDeque<usize>>,
    /// Set when the stream is not read any more, until it is read again.
    paused: AtomicBool,
}

impl Charge {
    /// Counts a call, or a stream, whose messages are released one by one.
    ///
    /// # Errors
    /// When there are too many calls, in all or of this connection. Then it is not counted.
    pub(crate) fn enter(
        shared: &Arc<Shared>,
        link: &Arc<Link>,
        deadline: Option<Instant>,
        kind: Kind,
    ) -> Result<Arc<Self>, Status> {
        let (limit, all) = (shared.max_requests, shared.in_flight.fetch_add(1, Ordering::AcqRel) + 1);
        let (unnamed, of_connection) = link.begin_unnamed();
        let charge = Self {
            shared: shared.clone(),
            deadline,
            bytes: AtomicUsize::new(0),
            place: OnceLock::new(),
            unnamed: Mutex::new(Some(unnamed)),
            priority: OnceLock::new(),
            kind,
            cancelled: AtomicBool::new(false),
            stream: (kind == Kind::Stream).then(OfStream::default),
        };
        let (most, all) = match kind {
            Kind::Stream => (limit, charge.take_place(None, "")?),
            Kind::Use | Kind::Change => (2 * limit, all),
        };
        if all > most {
            return Err(full(limit, all, ""));
        }
        // A connection may always have one.
        if of_connection > 1 && is_beyond_share(of_connection, most, all) {
            let others = format!(
                ", {of_connection} of them without a model and of this connection; the rest is for others"
            );
            return Err(full(limit, all, &others));
        }
        Ok(Arc::new(charge))
    }

    /// The name of the call's model was read.
    ///
    /// # Errors
    /// When there is no place, or the model has too many.
    pub(crate) fn name(&self, name: &str) -> Result<(), Status> {
        // The service refuses unknown models.
        match self.shared.models.get(name) {
            Some(model) if self.kind == Kind::Use => {
                self.take_place(Some(model.pressure().clone()), name)?;
                self.end_unnamed();
            }
            _ => {}
        }
        Ok(())
    }

    fn end_unnamed(&self) {
        self.unnamed.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// A message of this priority has arrived completely.
    ///
    /// # Errors
    /// When there is no place, or the model is overloaded.
    pub(crate) fn admit(&self, priority: Priority) -> Result<(), Status> {
        if self.place.get().is_none() {
            self.take_place(None, "")?;
            self.end_unnamed();
        }
        match self.model() {
            Some(model) if self.priority.set(priority).is_ok() => model.admit(priority, self.deadline),
            _ => Ok(()),
        }
    }

    /// Returns how many places are taken.
    fn take_place(&self, model: Option<Arc<Pressure>>, name: &str) -> Result<usize, Status> {
        let (limit, all) = (self.shared.max_requests, self.shared.places.fetch_add(1, Ordering::AcqRel) + 1);
        let held = model.as_ref().map_or(0, |model| model.enter());
        // Gives the place back if it is dropped here.
        let place = Place { shared: self.shared.clone(), model };
        if all > limit {
            return Err(full(limit, all, ""));
        }
        if self.takes_from_others(held, limit, all) {
            let others = format!(", {held} of them for model {name:?}; the rest is for other models");
            return Err(full(limit, all, &others));
        }
        // If a strange message names its model twice, its first place counts, and the second is given back.
        if self.place.set(place).is_ok()
            && let Some(model) = self.model()
        {
            model.add_bytes(self.bytes.load(Ordering::Relaxed));
        }
        Ok(all)
    }

    fn model(&self) -> Option<&Arc<Pressure>> {
        self.place.get().and_then(|place| place.model.as_ref())
    }

    /// The call got its scores.
    pub(crate) fn answered(&self) {
        self.model().inspect(|model| model.answered());
    }

    /// The client has ended the call before its message was complete.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    pub(crate) fn is_stream(&self) -> bool {
        self.stream.is_some()
    }

    /// A message has arrived completely.
    pub(crate) fn ended(&self, cost: usize) {
        if let Some(stream) = &self.stream {
            stream.messages.lock().unwrap_or_else(PoisonError::into_inner).push_back(cost);
        }
    }

    /// Releases the memory of the first message of a stream, which was converted.
    pub(crate) fn release_first(&self) {
        let first =
            |stream: &OfStream| stream.messages.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        self.release(self.stream.as_ref().and_then(first).unwrap_or(0));
    }

    fn release(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.model().inspect(|model| model.release_bytes(bytes));
        self.shared.in_flight_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }

    /// The stream is not read for a while, so its client cannot complete a message.
    pub(crate) fn pause(&self) {
        if let Some(stream) = &self.stream {
            stream.paused.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the stream was paused, and is read again.
    pub(crate) fn resumed(&self) -> bool {
        self.stream.as_ref().is_some_and(|stream| stream.paused.swap(false, Ordering::Relaxed))
    }

    /// Charges more memory.
    ///
    /// # Errors
    /// When all calls, or those of the model, would take too much. Then nothing is charged.
    pub(crate) fn add(&self, bytes: usize) -> Result<(), Status> {
        let limit = self.shared.max_inflight_bytes;
        let own = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let all = self.shared.in_flight_bytes.fetch_add(bytes, Ordering::AcqRel) + bytes;
        // A model may always have one call.
        let held = self.model().map_or(0, |model| model.add_bytes(bytes));
        let beyond = held > own && self.takes_from_others(held, limit, all);
        if all <= limit && !beyond {
            return Ok(());
        }
        self.release(bytes);
        let others = if beyond { "; the rest is for other models" } else { "" };
        let text = format!(
            "bytes of calls in flight: limit {limit} (server.max_inflight_bytes), got {all}, {own} of them \
             for this call's message so far{others}"
        );
        Err(overloaded(text, FULL))
    }

    /// Whether a model that holds this much takes it from others.
    fn takes_from_others(&self, held: usize, limit: usize, all: usize) -> bool {
        is_beyond_share(held, limit, all) && self.shared.models.are_several()
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.release(self.bytes.load(Ordering::Relaxed));
        if let (Some(model), Some(priority)) = (self.model(), self.priority.get()) {
            model.ended(*priority);
        }
        self.shared.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

fn is_beyond_share(held: usize, limit: usize, all: usize) -> bool {
    held > SHARE.saturating_mul(limit.saturating_sub(all))
}

fn full(limit: usize, all: usize, others: &str) -> Status {
    let text = format!("calls in flight: limit {limit} (server.max_requests), got {all}{others}");
    overloaded(text, FULL)
}
