//! What a call takes while it is in flight: a part of what its connection may have, a place while it is
//! computed, and the memory of its messages.
//!
//! **Places.** All calls together have `server.max_requests` places and `server.max_inflight_bytes`.
//!
//! - A call has a place from the end of its body to its answer, so neither a body that does not end nor an
//!   answer that is not read holds one.
//! - A model gets at most [`MAX_HELD_PER_FREE`] times what is free. So clients of one model cannot take
//!   everything from another one: a quarter stays free, and the more models need places, the closer each
//!   comes to an equal part. If only one model is served, it gets all.
//! - Learn calls wait for the disk, so they get at most half of the places.
//! - A stream has a place from its beginning to its end. It has requests for any model, so its place and its
//!   memory belong to none.
//! - A call that describes or changes a model belongs to none either, so that it works while the model is
//!   overloaded. A few places are kept for changes ([`KEPT_FOR_CHANGES`]).
//!
//! **Memory.** A call is charged with its message until it is answered (`charge/memory.rs`). The messages of
//! a stream are released one by one (`charge/stream.rs`).
//!
//! **Connections.** Calls that wait for their message, or for their answer to leave, are in flight too. There
//! are at most twice as many calls in flight as places. While less than half of these are taken (for a new
//! stream: half of the places), a connection gets all that it asks for, because most connections are busy at
//! different times. Of the second half it gets one of [`PARTS`], or an even part if more connections have
//! calls. The same holds for the last sixteenth of the memory. A connection may always have one call. So a
//! client needs many connections to keep others out, and only `server.max_connections` limits those.

mod memory;
mod stream;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use tonic::Status;

use super::ServerState;
use super::connection_state::ConnectionState;
use super::pressure::{Pressure, overloaded};
use super::status::FULL;
use crate::batcher::Priority;
use crate::sync::EvenPoisoned;
pub(crate) use memory::{HeldBytes, MessageSize, TooManyBytes};
use stream::Stream;

/// A model may hold at most this many times what is free.
const MAX_HELD_PER_FREE: usize = 3;

/// The part kept for other connections is divided by at least this number. If it were divided by the number
/// of connections alone, the first ones would leave nothing for later ones.
const PARTS: usize = 64;

/// Places that only calls that change a model get, and of calls in flight. With a stuck version, all other
/// places may be taken by its calls, and a change is what helps.
const KEPT_FOR_CHANGES: usize = 16;

/// A call in flight. What it takes is free when this is dropped.
pub(crate) struct Charge {
    pub state: Arc<ServerState>,
    connection: Arc<ConnectionState>,
    deadline: Option<Instant>,
    /// Its memory, which counts towards `server.max_inflight_bytes`.
    bytes: AtomicUsize,
    model: OnceLock<NamedModel>,
    place: Mutex<Option<Place>>,
    kind: CallKind,
    /// The client has ended the call before its message was complete.
    cancelled: AtomicBool,
    /// `None` for a call with a single message.
    stream: Option<Stream>,
}

/// The model that a call uses.
struct NamedModel {
    name: String,
    pressure: Arc<Pressure>,
}

/// What a call does with its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallKind {
    /// One message, for the model that it names.
    Use,
    /// One message with samples, which the model that it names stores.
    Learn,
    /// One message, which asks about a model without using it.
    Describe,
    /// One message, which changes a model.
    Change,
    /// A stream of messages for any models.
    Stream,
}

impl CallKind {
    /// What it may take of a limit for all calls.
    fn of_limit(self, limit: usize) -> usize {
        if self == Self::Change { limit + KEPT_FOR_CHANGES } else { limit }
    }
}

/// A place among the calls that are computed.
struct Place {
    state: Arc<ServerState>,
    model: Option<Arc<Pressure>>,
    /// `None` if the model does not compute the call.
    priority: Option<Priority>,
    learns: bool,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.state.places.fetch_sub(1, Ordering::AcqRel);
        if self.learns {
            self.state.learn_places.fetch_sub(1, Ordering::AcqRel);
        }
        self.model.iter().for_each(|model| model.leave(self.priority));
    }
}

/// What is used of a limit: places, calls or bytes.
#[derive(Clone, Copy)]
struct Usage {
    /// By one model or one connection.
    held: usize,
    /// By all calls.
    taken: usize,
    limit: usize,
}

impl Usage {
    /// Whether a model holds more than its share.
    fn is_beyond_share(self) -> bool {
        self.held > MAX_HELD_PER_FREE.saturating_mul(self.limit.saturating_sub(self.taken))
    }
}

impl Charge {
    /// Counts a call, or a stream, whose messages are released one by one.
    ///
    /// # Errors
    /// When there are too many calls, in all or of this connection. Then it is not counted.
    pub(crate) fn enter(
        state: &Arc<ServerState>,
        connection: &Arc<ConnectionState>,
        deadline: Option<Instant>,
        kind: CallKind,
    ) -> Result<Arc<Self>, Status> {
        let all = state.in_flight.fetch_add(1, Ordering::AcqRel) + 1;
        let held = connection.in_flight.fetch_add(1, Ordering::AcqRel) + 1;
        if held == 1 {
            state.callers.fetch_add(1, Ordering::AcqRel);
        }
        let charge = Self {
            state: state.clone(),
            connection: connection.clone(),
            deadline,
            bytes: AtomicUsize::new(0),
            model: OnceLock::new(),
            place: Mutex::new(None),
            kind,
            cancelled: AtomicBool::new(false),
            stream: (kind == CallKind::Stream).then(Stream::default),
        };
        let in_flight = CallLimit::in_flight(state);
        let (limit, taken) = match kind {
            CallKind::Stream => {
                let (place, places) = charge.take_place(None)?;
                *charge.place() = Some(place);
                (CallLimit::places(state), places)
            }
            CallKind::Use | CallKind::Learn | CallKind::Describe | CallKind::Change => (in_flight, all),
        };
        if all > kind.of_limit(in_flight.calls) {
            return Err(in_flight.refusal(all, ""));
        }
        // A connection may always have one.
        let may_have_more = held == 1 || kind == CallKind::Change;
        let usage = Usage { held, taken, limit: limit.calls };
        if !may_have_more && charge.takes_from_connections(usage, limit.calls / 2) {
            let others = format!(", {held} of them of this connection; the rest is for others");
            return Err(limit.refusal(taken, &others));
        }
        Ok(Arc::new(charge))
    }

    /// Whether a connection takes more than its part of the last `kept` of a limit, which are kept for all
    /// connections.
    fn takes_from_connections(&self, of_connection: Usage, kept: usize) -> bool {
        let parts = (self.state.callers.load(Ordering::Acquire) + 1).max(PARTS);
        let Usage { held, taken, limit } = of_connection;
        taken > limit - kept && held > kept / parts
    }

    fn place(&self) -> MutexGuard<'_, Option<Place>> {
        self.place.lock().even_poisoned()
    }

    /// Sets the model of the call, when its name was read.
    pub(crate) fn set_model(&self, name: String) {
        if !matches!(self.kind, CallKind::Use | CallKind::Learn) {
            return;
        }
        // The service refuses unknown models.
        let Some(model) = self.state.models.get(&name) else { return };
        let named = NamedModel { name, pressure: model.pressure().clone() };
        // A message may name its model twice. The decoder takes the last name; the charge stays with the
        // first one that was read.
        if self.model.set(named).is_ok()
            && let Some(model) = self.model()
        {
            model.add_bytes(self.bytes.load(Ordering::Relaxed));
        }
    }

    /// A call of this priority has arrived completely.
    ///
    /// # Errors
    /// When there is no place, or the model is overloaded.
    pub(crate) fn admit(&self, priority: Priority) -> Result<(), Status> {
        // A stream has one already, and so has a call that was admitted with its last bytes.
        if self.place().is_some() {
            return Ok(());
        }
        let (place, _) = self.take_place(Some(priority))?;
        // A call to learn waits for the disk, and not for what scores.
        if self.kind != CallKind::Learn {
            self.model().map_or(Ok(()), |model| model.admit(priority, self.deadline))?;
        }
        *self.place() = Some(place);
        Ok(())
    }

    /// Returns how many places are taken, too.
    fn take_place(&self, priority: Option<Priority>) -> Result<(Place, usize), Status> {
        let limit = CallLimit::places(&self.state);
        let all = self.state.places.fetch_add(1, Ordering::AcqRel) + 1;
        let learns = self.kind == CallKind::Learn;
        let learning = if learns { self.state.learn_places.fetch_add(1, Ordering::AcqRel) + 1 } else { 0 };
        let model = self.model().cloned();
        let priority = priority.filter(|_| self.kind == CallKind::Use);
        let held = model.as_ref().map_or(0, |model| model.enter(priority));
        // Gives the place back if it is dropped here.
        let place = Place { state: self.state.clone(), model, priority, learns };
        if all > self.kind.of_limit(limit.calls) {
            return Err(limit.refusal(all, ""));
        }
        if learning > (limit.calls / 2).max(1) {
            let others = format!(", {learning} of them to learn, which may be half");
            return Err(limit.refusal(all, &others));
        }
        // A model may always have one.
        if held > 1 && self.takes_from_models(Usage { held, taken: all, limit: limit.calls }) {
            let name = self.model_name().unwrap_or_default();
            let others = format!(", {held} of them for model {name:?}; the rest is for other models");
            return Err(limit.refusal(all, &others));
        }
        Ok((place, all))
    }

    fn model(&self) -> Option<&Arc<Pressure>> {
        self.model.get().map(|named| &named.pressure)
    }

    /// The call has its answer, so its message is not needed any more. `scored`: it is no refusal.
    pub(crate) fn answered(&self, scored: bool) {
        let place = self.place().take();
        if let Some(Place { model: Some(model), priority: Some(_), .. }) = &place
            && scored
        {
            model.answered();
        }
        self.release(self.bytes.load(Ordering::Relaxed));
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

    /// The stream is not read for a while, so its client cannot complete a message.
    pub(crate) fn pause(&self) {
        self.stream.iter().for_each(Stream::pause);
    }

    /// Whether the stream was paused, and is read again.
    pub(crate) fn resumed(&self) -> bool {
        self.stream.as_ref().is_some_and(Stream::resumed)
    }

    /// Whether the call asks for scores of the model that it names.
    pub(crate) fn scores(&self) -> bool {
        self.kind == CallKind::Use
    }

    /// The name of the model that the call uses, if it has arrived and that model is served.
    pub(crate) fn model_name(&self) -> Option<&str> {
        self.model.get().map(|named| named.name.as_str())
    }

    /// Whether a model takes what other models may need.
    fn takes_from_models(&self, of_model: Usage) -> bool {
        of_model.is_beyond_share() && self.state.models.are_several()
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.release(self.bytes.load(Ordering::Relaxed));
        if self.connection.in_flight.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.state.callers.fetch_sub(1, Ordering::AcqRel);
        }
        self.state.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A limit of calls, and what sets it.
#[derive(Clone, Copy)]
struct CallLimit {
    calls: usize,
    setting: &'static str,
}

impl CallLimit {
    /// Calls that are computed.
    fn places(state: &ServerState) -> Self {
        Self { calls: state.config.max_requests, setting: "server.max_requests" }
    }

    /// Also those that wait for their message, or for their answer to leave.
    fn in_flight(state: &ServerState) -> Self {
        Self { calls: 2 * state.config.max_requests, setting: "twice server.max_requests" }
    }

    fn refusal(self, got: usize, others: &str) -> Status {
        let Self { calls, setting } = self;
        let text = format!("calls in flight: limit {calls} ({setting}), got {got}{others}");
        overloaded(text, FULL)
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
