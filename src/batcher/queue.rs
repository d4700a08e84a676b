//! The rules of the queue, without clock, threads or locks: time is an argument.
//!
//! The queue is ordered by turns, and its samples and bytes are limited. A request's turn is the time when it
//! was queued, and later by [`GIVES_WAY`] for each step of [`Priority`] below high. So within a priority the
//! queue is first in, first out, and higher priorities are computed first. No request waits for ever: it lets
//! requests of the next higher priority pass only if they come within [`GIVES_WAY`] after it, and the queue
//! is limited. Its own deadline may end it before.
//!
//! If the queue is full, a request displaces requests of lower priorities, the lowest and newest first. If it
//! is stuck, because no worker takes anything for longer than clients wait, requests are refused.
//!
//! [`Queue::take`] decides when an idle worker takes the next batch:
//!
//! * While fewer than half of the workers compute, it takes the queued requests at once.
//! * While at least half of them compute, it waits until the batch is full or its first request has waited
//!   `max_delay`. When a worker finishes before that, the first rule may apply again.
//! * If the queue is closed, it takes the queued requests at once.
//!
//! So the delay holds back only the second half of the workers. Their cores also have to read messages, and
//! few large batches cost less than many small ones. With a delay of zero every idle worker starts at once.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::overload::{Computed, Overload, TooLate};
use crate::types::{Batch, Jagged};

/// How long a request gives way to those of the next higher priority: longer than most clients wait.
const GIVES_WAY: Duration = Duration::from_secs(10);

/// A machine, or a model, may pause for this long.
const PAUSE: Duration = Duration::from_secs(1);

/// What is computed first, and refused last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Priority {
    High,
    #[default]
    Normal,
    Low,
}

impl Priority {
    /// From the highest to the lowest.
    pub(crate) const ALL: [Self; 3] = [Self::High, Self::Normal, Self::Low];
}

/// What a client asks for, besides its scores.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    pub deadline: Option<Instant>,
    pub priority: Priority,
}

/// An amount of work in the two units of the limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Size {
    pub samples: usize,
    /// Bytes of the encoded batch's values and offsets.
    pub bytes: usize,
}

impl Size {
    /// The size of some samples of a batch.
    pub(crate) fn of(batch: &Batch, samples: Range<usize>) -> Self {
        let width = batch.dense.len().checked_div(batch.samples).unwrap_or(0);
        let column = |column: &Jagged| {
            let ids = column.offsets[samples.end] - column.offsets[samples.start];
            8 * ids as usize + 4 * (samples.len() + 1)
        };
        let bytes = 4 * width * samples.len() + batch.features.iter().map(column).sum::<usize>();
        Self { samples: samples.len(), bytes }
    }

    /// The sum, or `None` if it exceeds `limit` in either unit.
    fn plus_within(self, more: Self, limit: Self) -> Option<Self> {
        let samples = self.samples.checked_add(more.samples)?;
        let bytes = self.bytes.checked_add(more.bytes)?;
        (samples <= limit.samples && bytes <= limit.bytes).then_some(Self { samples, bytes })
    }

    fn plus(self, more: Self) -> Self {
        Self { samples: self.samples + more.samples, bytes: self.bytes + more.bytes }
    }

    fn minus(self, less: Self) -> Self {
        Self { samples: self.samples - less.samples, bytes: self.bytes - less.bytes }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLimits {
    /// Limit of all queued requests together.
    pub queue: Size,
    /// Limit of one batch. An entry that exceeds it is computed alone.
    pub batch: Size,
    /// How long a batch may fill while half of the workers compute.
    pub max_delay: Duration,
    /// `batcher.default_deadline_ms`: the assumed deadline of a request that has none.
    pub default_deadline: Duration,
    /// Threads that compute batches.
    pub workers: usize,
}

/// A queued request, or a part of one.
#[derive(Debug)]
pub(crate) struct Entry<T> {
    pub size: Size,
    pub queued: Instant,
    pub terms: Terms,
    pub item: T,
}

/// An entry's place in the order of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Turn {
    at: Instant,
    number: u64,
}

/// The turns of a request's entries, which were pushed one after the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turns {
    pub first: Turn,
    pub count: usize,
}

impl Turns {
    pub(crate) fn nth(self, number: usize) -> Turn {
        Turn { number: self.first.number + number as u64, ..self.first }
    }
}

/// Why a request was not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueRefusal {
    Full {
        queued: Size,
        size: Size,
    },
    TooLate(TooLate),
    /// No entry is taken: a request before it waits for this long.
    Stuck {
        waits: Duration,
    },
    Closed,
}

/// What a worker should do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Compute: entries were taken, or removed because they were expired.
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
    /// Entries whose deadline has passed, or will pass before they can be computed.
    pub expired: Vec<Entry<T>>,
}

impl<T> Default for Taken<T> {
    fn default() -> Self {
        Self { batch: Vec::new(), expired: Vec::new() }
    }
}

/// A bounded queue of requests, and the number of batches that are being computed.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    entries: BTreeMap<Turn, Entry<T>>,
    /// Entries that were ever queued.
    count: u64,
    /// The size of the queued entries of each priority.
    held: [Size; 3],
    computing: usize,
    /// When a worker took entries last.
    taken: Option<Instant>,
    closed: bool,
    limits: QueueLimits,
    overload: Overload,
}

impl<T> Queue<T> {
    #[must_use]
    pub(crate) fn new(limits: QueueLimits) -> Self {
        Self {
            entries: BTreeMap::new(),
            count: 0,
            held: Default::default(),
            computing: 0,
            taken: None,
            closed: false,
            limits,
            overload: Overload::default(),
        }
    }

    #[must_use]
    pub(crate) fn limits(&self) -> QueueLimits {
        self.limits
    }

    /// Changes the limits. Entries that are queued stay, also if they exceed the new limit.
    pub(crate) fn set_limits(&mut self, limits: QueueLimits) {
        self.limits = limits;
    }

    /// The size of all queued entries.
    #[must_use]
    pub(crate) fn held(&self) -> Size {
        self.held_before(Priority::Low)
    }

    /// The size of the queued entries of this priority and of higher ones.
    fn held_before(&self, priority: Priority) -> Size {
        self.held[..=priority as usize].iter().fold(Size::default(), |sum, held| sum.plus(*held))
    }

    /// Makes room for a request, whose entries are pushed next. Returns the entries that it displaces.
    ///
    /// # Errors
    /// When the queue is closed, full, overloaded, or stuck.
    pub(crate) fn admit(
        &mut self,
        size: Size,
        queued: Instant,
        terms: Terms,
    ) -> Result<Vec<Entry<T>>, QueueRefusal> {
        if self.closed {
            return Err(QueueRefusal::Closed);
        }
        // Only requests of lower priorities give way.
        let before = self.held_before(terms.priority);
        if before.plus_within(size, self.limits.queue).is_none() {
            return Err(QueueRefusal::Full { queued: before, size });
        }
        self.overload.check(&self.limits, queued, before.samples, terms).map_err(QueueRefusal::TooLate)?;
        self.check_not_stuck(queued, terms.priority)?;
        let mut displaced = Vec::new();
        while self.held().plus_within(size, self.limits.queue).is_none() {
            let lowest = Priority::ALL.into_iter().rev().find(|p| self.held[*p as usize].samples > 0);
            let newest = self.entries.iter().rev().find(|(_, entry)| Some(entry.terms.priority) == lowest);
            let Some(turn) = newest.map(|(turn, _)| *turn) else { break };
            displaced.extend(self.remove(turn));
        }
        Ok(displaced)
    }

    /// Refuses a request if no entry was taken for longer than clients wait, although one before it could be.
    /// So the requests of a version that is stuck do not take all places of the server: its measured speed
    /// says nothing any more.
    fn check_not_stuck(&self, now: Instant, priority: Priority) -> Result<(), QueueRefusal> {
        // Since it was queued, or since another one was taken.
        let waits = |entry: &Entry<T>| {
            let since = self.taken.map_or(entry.queued, |taken| taken.max(entry.queued));
            now.saturating_duration_since(since)
        };
        let limit = self.limits.default_deadline.max(PAUSE);
        if self.entries.first_key_value().is_none_or(|(_, first)| waits(first) <= limit) {
            return Ok(());
        }
        // A request of a lower priority may wait longer.
        let before = self.entries.values().find(|entry| entry.terms.priority <= priority);
        match before.map(waits) {
            Some(waits) if waits > limit => Err(QueueRefusal::Stuck { waits }),
            _ => Ok(()),
        }
    }

    /// Queues an entry. Returns its turn.
    pub(crate) fn push(&mut self, entry: Entry<T>) -> Turn {
        let at = entry.queued + GIVES_WAY * entry.terms.priority as u32;
        let turn = Turn { at, number: self.count };
        self.count += 1;
        self.overload.queued(entry.queued, entry.terms.priority);
        self.push_again(turn, entry);
        turn
    }

    /// Queues an entry once more that was taken at this turn.
    pub(crate) fn push_again(&mut self, turn: Turn, entry: Entry<T>) {
        let held = &mut self.held[entry.terms.priority as usize];
        *held = held.plus(entry.size);
        self.entries.insert(turn, entry);
    }

    /// Removes the entries of a request that are queued.
    pub(crate) fn remove_all(&mut self, turns: Turns) -> Vec<Entry<T>> {
        (0..turns.count).filter_map(|number| self.remove(turns.nth(number))).collect()
    }

    /// Removes an entry, if it is queued.
    pub(crate) fn remove(&mut self, turn: Turn) -> Option<Entry<T>> {
        let entry = self.entries.remove(&turn)?;
        self.left(&entry);
        Some(entry)
    }

    /// Counts an entry that has left.
    fn left(&mut self, entry: &Entry<T>) {
        let held = &mut self.held[entry.terms.priority as usize];
        *held = held.minus(entry.size);
        for priority in Priority::ALL {
            if self.held_before(priority).samples == 0 {
                self.overload.emptied(priority);
            }
        }
    }

    /// What a worker should do now, by the policy in the module docs.
    #[must_use]
    pub(crate) fn next(&self, now: Instant) -> Next {
        let Some((_, first)) = self.entries.first_key_value() else {
            return if self.closed { Next::Stop } else { Next::Sleep };
        };
        let (held, limit) = (self.held(), self.limits.batch);
        let full = held.samples >= limit.samples || held.bytes >= limit.bytes;
        let due = first.queued + self.limits.max_delay;
        let are_few = self.computing < self.limits.workers.div_ceil(2);
        if self.closed || are_few || full || due <= now { Next::Work } else { Next::Wait(due) }
    }

    /// Moves the next batch into `taken`, which must be empty, if the policy allows it. Expired entries
    /// before its end are removed too, and do not count towards the batch. If the batch is not empty, one
    /// [`Queue::finish`] must follow.
    pub(crate) fn take(&mut self, now: Instant, taken: &mut Taken<T>) -> Next {
        let next = self.next(now);
        if next != Next::Work {
            return next;
        }
        let mut size = Size::default();
        while let Some(first) = self.entries.first_entry() {
            let entry = first.get();
            let expired = entry.terms.deadline.is_some_and(|deadline| deadline <= now)
                || self.overload.misses_deadline(now, entry.size.samples, entry.terms);
            if !expired {
                match size.plus_within(entry.size, self.limits.batch) {
                    Some(sum) => size = sum,
                    None if taken.batch.is_empty() => size = entry.size,
                    None => break,
                }
            }
            let entry = first.remove();
            self.left(&entry);
            if expired { taken.expired.push(entry) } else { taken.batch.push(entry) }
        }
        self.computing += usize::from(!taken.batch.is_empty());
        self.taken = Some(now);
        Next::Work
    }

    /// Reports that a taken batch has been computed. Also if all of its requests had ended, so that it had no
    /// samples.
    pub(crate) fn finish(&mut self, batch: Computed) {
        if batch.samples > 0 {
            self.overload.computed(batch);
        }
        self.computing = self.computing.saturating_sub(1);
    }

    /// Refuses later requests. Queued entries can still be taken.
    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    /// Removes all entries.
    pub(crate) fn clear(&mut self) -> impl Iterator<Item = Entry<T>> {
        Priority::ALL.into_iter().for_each(|priority| self.overload.emptied(priority));
        self.held = Default::default();
        std::mem::take(&mut self.entries).into_values()
    }
}

#[cfg(test)]
mod tests;
