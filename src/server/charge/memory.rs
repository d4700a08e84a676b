//! The memory that calls in flight are charged with: that of their messages, and what they hold besides.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use tonic::Status;

use super::stream::{Stream, StreamMemory};
use super::{CallKind, Charge, Usage};
use crate::server::SMALL_MESSAGE;
use crate::server::pressure::overloaded;
use crate::server::status::FULL;

/// The memory divided by this is kept for other connections. One large stream may need nearly all.
const KEPT_MEMORY_DIVISOR: usize = 16;

/// All calls in flight would take too much memory.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct TooManyBytes(String);

impl From<TooManyBytes> for Status {
    fn from(TooManyBytes(text): TooManyBytes) -> Self {
        overloaded(text, FULL)
    }
}

/// Memory that a call holds until this is dropped, besides that of its messages.
pub(crate) struct HeldBytes {
    charge: Arc<Charge>,
    bytes: usize,
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.charge.release(self.bytes);
    }
}

/// A message that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MessageSize {
    /// On the wire, without its prefix.
    pub bytes: usize,
    /// What it was charged with.
    pub cost: usize,
}

impl Charge {
    /// A message has arrived completely.
    pub(crate) fn ended(&self, message: MessageSize) {
        if let Some(mut memory) = self.stream_memory() {
            memory.push(message);
        }
    }

    /// Releases the memory of the first message of a stream, which was converted, except for that of the
    /// decoder's buffer.
    pub(crate) fn release_first(&self) {
        if let Some(mut memory) = self.stream_memory() {
            self.release(memory.pop());
        }
    }

    /// Charges memory of a message that arrives.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub(crate) fn add_of_message(&self, bytes: usize) -> Result<(), TooManyBytes> {
        let Some(mut memory) = self.stream_memory() else { return self.add(bytes) };
        let charged = memory.spare_for(bytes);
        // Not called with 0: `add` would refuse even that if the connection already has more than its part.
        if bytes > charged {
            self.add(bytes - charged)?;
        }
        memory.use_spare(charged);
        Ok(())
    }

    /// `None` for a call with a single message.
    fn stream_memory(&self) -> Option<MutexGuard<'_, StreamMemory>> {
        self.stream.as_ref().map(Stream::memory)
    }

    pub(super) fn release(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.connection.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.model().inspect(|model| model.release_bytes(bytes));
        self.state.in_flight_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }

    /// Charges more memory.
    ///
    /// # Errors
    /// When all calls, or those of the model or of the connection, would take too much. Then nothing is
    /// charged.
    pub(crate) fn add(&self, bytes: usize) -> Result<(), TooManyBytes> {
        let limit = self.state.config.max_inflight_bytes;
        let own = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let all = self.state.in_flight_bytes.fetch_add(bytes, Ordering::AcqRel) + bytes;
        let of_model = self.model().map_or(0, |model| model.add_bytes(bytes));
        let of_connection = self.connection.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        // A change has only names, so a small one is always taken.
        if self.kind == CallKind::Change && own <= SMALL_MESSAGE {
            return Ok(());
        }
        // A model, and a connection, may always have one call.
        let usage = |held| Usage { held, taken: all, limit };
        let others = if of_model > own && self.takes_from_models(usage(of_model)) {
            "; the rest is for other models"
        } else if of_connection > own
            && self.takes_from_connections(usage(of_connection), limit / KEPT_MEMORY_DIVISOR)
        {
            "; the rest is for other connections"
        } else if all > limit {
            ""
        } else {
            return Ok(());
        };
        self.release(bytes);
        let text = format!(
            "bytes of calls in flight: limit {limit} (server.max_inflight_bytes), got {all}, {own} of them \
             of this call so far{others}"
        );
        Err(TooManyBytes(text))
    }

    /// Charges memory that the call takes until what is returned is dropped.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub(crate) fn hold(self: &Arc<Self>, bytes: usize) -> Result<HeldBytes, TooManyBytes> {
        self.add(bytes)?;
        Ok(HeldBytes { charge: self.clone(), bytes })
    }
}
