//! The queue's rules, and nothing else: no clock, no thread, no lock. Time is passed in.
//!
//! The queue is first in, first out, and counts what it holds in samples and in bytes. When a
//! worker asks, [`Queue::take`] answers by one policy:
//!
//! * nothing is being computed: what is queued goes out at once. A lone request never waits.
//! * the model is busy with another batch: a batch may fill until it is full or its oldest request
//!   has waited `max_delay`. A worker that comes back takes it sooner, by the first rule.
//! * the queue is closed: what is queued goes out at once.
//!
//! So under light load the delay costs nothing, and under heavy load batches form by themselves
//! while the model computes; `max_delay` only says how soon a second worker joins in. A delay of
//! zero lets every idle worker start at once.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// An amount of work, in the two units that limits are counted in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Size {
    /// Samples.
    pub samples: usize,
    /// Bytes of their converted values.
    pub bytes: usize,
}

impl Size {
    /// The sum, or `None` when it passes `limit` in either unit.
    fn plus_within(self, more: Self, limit: Self) -> Option<Self> {
        let samples = self.samples.checked_add(more.samples)?;
        let bytes = self.bytes.checked_add(more.bytes)?;
        (samples <= limit.samples && bytes <= limit.bytes).then_some(Self { samples, bytes })
    }
}

/// What a queue is held to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Most that may wait.
    pub queue: Size,
    /// Most in one batch; a larger entry goes out alone.
    pub batch: Size,
    /// Longest that a batch fills while another is computed.
    pub max_delay: Duration,
}

/// One request as the queue sees it.
#[derive(Debug)]
pub(crate) struct Entry<T> {
    /// How much work it is.
    pub size: Size,
    /// When it came.
    pub queued: Instant,
    /// When its answer is of no more use.
    pub deadline: Option<Instant>,
    /// The request.
    pub item: T,
}

/// Why an entry was not queued; the entry is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// No room for it: what was there and what came.
    Full {
        /// What waited already.
        queued: Size,
        /// What came.
        came: Size,
    },
    /// The queue takes no more.
    Closed,
}

/// What a worker should do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Compute: entries were taken, or died and were put aside.
    Work,
    /// Ask again at this instant, or when something is queued.
    Wait(Instant),
    /// Ask again when something is queued.
    Sleep,
    /// Leave: the queue is closed and empty.
    Stop,
}

/// What [`Queue::take`] took, in order.
#[derive(Debug)]
pub(crate) struct Taken<T> {
    /// One batch.
    pub batch: Vec<Entry<T>>,
    /// Entries whose deadline passed while they waited.
    pub expired: Vec<Entry<T>>,
    /// Entries that nobody waits for any more.
    pub cancelled: Vec<Entry<T>>,
}

impl<T> Default for Taken<T> {
    fn default() -> Self {
        Self { batch: Vec::new(), expired: Vec::new(), cancelled: Vec::new() }
    }
}

/// A bounded queue of requests and the count of batches that are being computed.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    entries: VecDeque<Entry<T>>,
    held: Size,
    computing: usize,
    closed: bool,
    limits: Limits,
}

impl<T> Queue<T> {
    /// An empty, open queue.
    #[must_use]
    pub(crate) fn new(limits: Limits) -> Self {
        Self { entries: VecDeque::new(), held: Size::default(), computing: 0, closed: false, limits }
    }

    /// What waits now.
    #[must_use]
    pub(crate) fn held(&self) -> Size {
        self.held
    }

    /// Appends an entry.
    ///
    /// # Errors
    /// [`Refused`] when the queue is closed or the entry would pass its limit.
    pub(crate) fn push(&mut self, entry: Entry<T>) -> Result<(), Refused> {
        if self.closed {
            return Err(Refused::Closed);
        }
        let Some(held) = self.held.plus_within(entry.size, self.limits.queue) else {
            return Err(Refused::Full { queued: self.held, came: entry.size });
        };
        self.held = held;
        self.entries.push_back(entry);
        Ok(())
    }

    /// What a worker that asks now would be told, by the policy above.
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

    /// Takes the next batch into `taken`, which must be empty, when the policy says so. Entries
    /// that expired or that `cancelled` says yes to are put aside on the way and count for
    /// nothing. A batch that is not empty must be followed by one [`Queue::finish`].
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
        self.computing += usize::from(!taken.batch.is_empty());
        Next::Work
    }

    /// One taken batch is done.
    pub(crate) fn finish(&mut self) {
        self.computing = self.computing.saturating_sub(1);
    }

    /// Refuses every later push. What waits can still be taken.
    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    /// Gives up everything that waits.
    pub(crate) fn clear(&mut self) -> impl Iterator<Item = Entry<T>> {
        self.held = Size::default();
        std::mem::take(&mut self.entries).into_iter()
    }
}

#[cfg(test)]
mod tests;
