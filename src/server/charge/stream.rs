//! The memory of a stream, whose messages are released one by one.
//!
//! The decoder of a stream keeps the buffer of its largest message until the stream ends, so as much stays
//! charged ([`BUFFER_PER_BYTE`]). The next message uses that first: a stream of equal messages is charged as
//! if it had one.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::MessageSize;
use crate::sync::EvenPoisoned;

/// Most memory of a decoder's buffer for each byte of the largest message: a buffer that is too small becomes
/// at least twice as large.
const BUFFER_PER_BYTE: usize = 2;

/// What a stream has besides what every call has.
#[derive(Default)]
pub(super) struct Stream {
    memory: Mutex<StreamMemory>,
    /// Set when the stream is not read any more, until it is read again.
    paused: AtomicBool,
}

impl Stream {
    pub(super) fn memory(&self) -> MutexGuard<'_, StreamMemory> {
        self.memory.lock().even_poisoned()
    }

    pub(super) fn pause(&self) {
        self.paused.store(true, Ordering::Relaxed);
    }

    /// Whether the stream was paused, and is read again.
    pub(super) fn resumed(&self) -> bool {
        self.paused.swap(false, Ordering::Relaxed)
    }
}

/// What a stream is charged with.
#[derive(Default)]
pub(super) struct StreamMemory {
    /// The complete messages that were not released yet.
    complete: VecDeque<MessageSize>,
    /// What the decoder's buffer takes at most.
    buffer: usize,
    /// The part of the stream's charge that no message uses: at most `buffer`.
    spare: usize,
}

impl StreamMemory {
    /// Adds a complete message.
    pub(super) fn push(&mut self, message: MessageSize) {
        self.complete.push_back(message);
    }

    /// Removes the first message. Returns how many bytes are to be released.
    pub(super) fn pop(&mut self) -> usize {
        let Some(MessageSize { bytes, cost }) = self.complete.pop_front() else { return 0 };
        self.buffer = self.buffer.max(BUFFER_PER_BYTE * bytes);
        let unused = self.spare + cost;
        self.spare = unused.min(self.buffer);
        unused - self.spare
    }

    /// How many of these bytes are charged already.
    pub(super) fn spare_for(&self, bytes: usize) -> usize {
        bytes.min(self.spare)
    }

    /// The next message uses these bytes.
    pub(super) fn use_spare(&mut self, bytes: usize) {
        self.spare -= bytes;
    }
}
