//! The rules of the queue, without clock, threads or locks: time is an argument.
//!
//! The queue is first in, first out, and its samples and bytes are limited. [`Queue::take`] follows one
//! policy:
//!
//! * If no batch is being computed, queued requests are taken at once. A lone request never waits.
//! * If another batch is being computed, a batch may fill until it is full or its oldest request has waited
//!   `max_delay`. If the other batch is finished before that, the first rule applies.
//! * If the queue is closed, queued requests are taken at once.
//!
//! So the delay costs nothing under light load, and under heavy load batches form while the model computes.
//! `max_delay` only decides when a further worker starts. With a delay of zero every idle worker starts at
//! once.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::overload::{Computed, Overload, TooLate};

/// An amount of work in the two units of the limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Size {
    pub samples: usize,
    /// Bytes of the encoded batch's values and offsets.
    pub bytes: usize,
}

impl Size {
    /// The sum, or `None` if it exceeds `limit` in either unit.
    fn plus_within(self, more: Self, limit: Self) -> Option<Self> {
        let samples = self.samples.checked_add(more.samples)?;
        let bytes = self.bytes.checked_add(more.bytes)?;
        (samples <= limit.samples && bytes <= limit.bytes).then_some(Self { samples, bytes })
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Limit of all queued requests together.
    pub queue: Size,
    /// Limit of one batch. A larger request is computed alone.
    pub batch: Size,
    /// How long a batch may fill while another is computed.
    pub max_delay: Duration,
    /// `batcher.default_deadline_ms`: how long a client waits that does not say so.
    pub default_deadline: Duration,
    /// Threads that compute batches.
    pub workers: usize,
}

/// A queued request.
#[derive(Debug)]
pub(crate) struct Entry<T> {
    pub size: Size,
    pub queued: Instant,
    pub deadline: Option<Instant>,
    pub item: T,
}

/// Why an entry was not queued. The entry is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Full { queued: Size, size: Size },
    TooLate(TooLate),
    Closed,
}

/// What a worker should do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Compute: entries were taken, or removed because they were expired or cancelled.
    Work,
    /// Ask again at this instant, or when an entry is queued.
    Wait(Instant),
    /// Ask again when an entry is queued.
    Sleep,
    /// End: the queue is closed and empty.
    Stop,
}

/// The entries that [`Queue::take`] removed, in order.
#[derive(Debug)]
pub(crate) struct Taken<T> {
    pub batch: Vec<Entry<T>>,
    /// Entries whose deadline has passed.
    pub expired: Vec<Entry<T>>,
    /// Entries whose ticket was dropped.
    pub cancelled: Vec<Entry<T>>,
}

impl<T> Default for Taken<T> {
    fn default() -> Self {
        Self { batch: Vec::new(), expired: Vec::new(), cancelled: Vec::new() }
    }
}

/// A bounded queue of requests, and the number of batches that are being computed.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    entries: VecDeque<Entry<T>>,
    held: Size,
    computing: usize,
    closed: bool,
    limits: Limits,
    overload: Overload,
}

impl<T> Queue<T> {
    #[must_use]
    pub(crate) fn new(limits: Limits) -> Self {
        let (entries, overload) = (VecDeque::new(), Overload::default());
        Self { entries, held: Size::default(), computing: 0, closed: false, limits, overload }
    }

    #[must_use]
    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    /// Changes the limits. Entries that are queued stay, also if they exceed the new limit.
    pub(crate) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// The size of all queued entries.
    #[must_use]
    pub(crate) fn held(&self) -> Size {
        self.held
    }

    /// Appends an entry.
    ///
    /// # Errors
    /// When the queue is closed, would exceed its limit, or is overloaded.
    pub(crate) fn push(&mut self, entry: Entry<T>) -> Result<(), Refused> {
        if self.closed {
            return Err(Refused::Closed);
        }
        let Some(held) = self.held.plus_within(entry.size, self.limits.queue) else {
            return Err(Refused::Full { queued: self.held, size: entry.size });
        };
        let late = self.overload.refuses(&self.limits, entry.queued, self.held.samples, entry.deadline);
        late.map_err(Refused::TooLate)?;
        self.overload.queued(entry.queued);
        self.held = held;
        self.entries.push_back(entry);
        Ok(())
    }

    /// What a worker should do now, by the policy in the module docs.
    #[must_use]
    pub(crate) fn next(&self, now: Instant) -> Next {
        let Some(oldest) = self.entries.front() else {
            return if self.closed { Next::Stop } else { Next::Sleep };
        };
        let limit = self.limits.batch;
        let full = self.held.samples >= limit.samples || self.held.bytes >= limit.bytes;
        let due = oldest.queued + self.limits.max_delay;
        if self.closed || self.computing == 0 || full || due <= now { Next::Work } else { Next::Wait(due) }
    }

    /// Moves the next batch into `taken`, which must be empty, if the policy allows it. Expired and cancelled
    /// entries in front of it are removed too, and do not count towards the batch. If the batch is not empty,
    /// one [`Queue::finish`] must follow.
    pub(crate) fn take(
        &mut self,
        now: Instant,
        cancelled: impl Fn(&T) -> bool,
        taken: &mut Taken<T>,
    ) -> Next {
        let next = self.next(now);
        if next != Next::Work {
            return next;
        }
        let mut size = Size::default();
        while let Some(entry) = self.entries.front() {
            let expired = entry.deadline.is_some_and(|deadline| deadline <= now);
            let dead = expired || cancelled(&entry.item);
            if !dead {
                match size.plus_within(entry.size, self.limits.batch) {
                    Some(sum) => size = sum,
                    None if taken.batch.is_empty() => size = entry.size,
                    None => break,
                }
            }
            let Some(entry) = self.entries.pop_front() else { break };
            self.held.samples -= entry.size.samples;
            self.held.bytes -= entry.size.bytes;
            let pile = match (dead, expired) {
                (false, _) => &mut taken.batch,
                (true, true) => &mut taken.expired,
                (true, false) => &mut taken.cancelled,
            };
            pile.push(entry);
        }
        if self.entries.is_empty() {
            self.overload.emptied();
        }
        self.computing += usize::from(!taken.batch.is_empty());
        Next::Work
    }

    /// Reports that a taken batch has been computed.
    pub(crate) fn finish(&mut self, batch: Computed) {
        self.overload.computed(batch);
        self.computing = self.computing.saturating_sub(1);
    }

    /// Refuses later pushes. Queued entries can still be taken.
    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    /// Removes all entries.
    pub(crate) fn clear(&mut self) -> impl Iterator<Item = Entry<T>> {
        self.overload.emptied();
        self.held = Size::default();
        std::mem::take(&mut self.entries).into_iter()
    }
}

#[cfg(test)]
mod tests;
