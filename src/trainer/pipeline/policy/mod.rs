//! Which rows a full scratchpad evicts first. Candidates are the slots that no batch in the window needs; a
//! policy orders them.
//!
//! `SlotDirectory` decides whether a slot is a candidate. A policy keeps the candidates in a structure of a
//! few bytes per slot. Any candidate can be removed again, because a batch may need its row after all.
//!
//! - LRU: a queue. A slot becomes a candidate when the last batch that used it leaves the window, so the
//!   queue is in order of last use.
//! - LFU: a queue for each frequency. The frequency of a row is its count in a data set (frequency-aware
//!   cache, section 4). Without counts it is the number of batches that have used the row since it was
//!   fetched.
//! - random: an array, from which victims are drawn at random.
//! - optimal: a list for each batch in the look-ahead, with the rows that this batch uses next. Rows that no
//!   seen batch needs are evicted first, in LRU order. Then come the rows of the batch that is furthest
//!   ahead (Belady, "A study of replacement algorithms", 1966).

mod order;

use self::order::{LinkedLists, RankQueues};
use crate::mem::mix64;
use crate::types::named;

/// Which rows the scratchpad evicts first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScratchpadPolicy {
    /// The least recently used rows.
    #[default]
    Lru,
    /// The least frequently used rows.
    Lfu,
    /// Random rows.
    Random,
    /// Rows with the furthest next use, as far as the look-ahead sees.
    Optimal,
}

/// A name that no policy has.
#[derive(Debug, thiserror::Error)]
#[error("policy: expected {names}, got {0:?}", names = ScratchpadPolicy::names())]
pub struct UnknownPolicy(String);

named! {
    ScratchpadPolicy: Lru = "lru", Lfu = "lfu", Random = "random", Optimal = "optimal";
    UnknownPolicy = UnknownPolicy
}

/// How a slot's row is used, as policies see it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowUse {
    /// For LFU: how often the row is used.
    pub frequency: u32,
    /// For the optimal policy: how many batches after the planned batch the row is used next; 0 if no seen
    /// batch uses it.
    pub next: u64,
}

/// The most batches that the optimal policy looks ahead.
pub(crate) const SEEN_AHEAD: usize = 63;

/// A slot and its stamp as a candidate. A slot that becomes a candidate again gets a new stamp.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub slot: u32,
    pub stamp: u32,
}

/// The candidates among some slots, in a policy's order. Queues may have stale entries, with a stamp that is
/// no longer the slot's. Methods find them by `stamp_of`, which returns the current stamp of a slot, or
/// `None` if the slot is no candidate.
pub(crate) struct Candidates {
    order: Order,
    len: usize,
}

enum Order {
    Queues {
        queues: RankQueues,
        /// If false, all slots have the same rank.
        by_frequency: bool,
    },
    Lists(LinkedLists),
    Array {
        slots: Vec<u32>,
        /// Each candidate's index into `slots`.
        indices: Vec<u32>,
        draws: u64,
    },
}

impl Candidates {
    /// No candidates among `count` slots. `seed` is for the random policy.
    pub(crate) fn new(policy: ScratchpadPolicy, count: usize, seed: u64) -> Self {
        let queues = |by_frequency| Order::Queues { queues: RankQueues::new(count), by_frequency };
        let order = match policy {
            ScratchpadPolicy::Lru => queues(false),
            ScratchpadPolicy::Lfu => queues(true),
            ScratchpadPolicy::Optimal => Order::Lists(LinkedLists::new(SEEN_AHEAD + 1, count)),
            ScratchpadPolicy::Random => {
                Order::Array { slots: Vec::new(), indices: vec![0; count], draws: mix64(seed) }
            }
        };
        Self { order, len: 0 }
    }

    /// Bytes per slot of the largest of these structures.
    pub(crate) const fn bytes_per_slot() -> usize {
        RankQueues::bytes_per_slot()
    }

    /// The number of candidates.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Adds a candidate. `batch` is the number of the batch that is being planned.
    pub(crate) fn add(
        &mut self,
        candidate: Candidate,
        row_use: RowUse,
        batch: u64,
        stamp_of: impl Fn(u32) -> Option<u32>,
    ) {
        self.len += 1;
        match &mut self.order {
            Order::Queues { queues, by_frequency } => {
                let rank = if *by_frequency { row_use.frequency } else { 0 };
                queues.push(rank, candidate, stamp_of);
            }
            Order::Lists(lists) => {
                let list = match row_use.next {
                    0 => 0,
                    next => 1 + (batch + next) as usize % SEEN_AHEAD,
                };
                lists.push(list, candidate.slot);
            }
            Order::Array { slots, indices, .. } => {
                indices[candidate.slot as usize] = slots.len() as u32;
                slots.push(candidate.slot);
            }
        }
    }

    /// Removes a candidate.
    #[inline]
    pub(crate) fn remove(&mut self, slot: u32) {
        self.len -= 1;
        match &mut self.order {
            // `pop` skips the stale entry.
            Order::Queues { .. } => {}
            Order::Lists(lists) => lists.remove(slot),
            Order::Array { slots, indices, .. } => {
                let index = indices[slot as usize] as usize;
                slots.swap_remove(index);
                if let Some(&moved) = slots.get(index) {
                    indices[moved as usize] = index as u32;
                }
            }
        }
    }

    /// Removes and returns the next victim. `batch` is as in [`Self::add`]. `prefetch` is called for slots
    /// whose stamps are needed some iterations later, if the policy can predict them.
    pub(crate) fn pop(
        &mut self,
        batch: u64,
        stamp_of: impl Fn(u32) -> Option<u32>,
        prefetch: impl Fn(u32),
    ) -> Option<u32> {
        let slot = match &mut self.order {
            Order::Queues { queues, .. } => queues.pop(stamp_of, prefetch)?,
            Order::Lists(lists) => lists.first(batch)?,
            Order::Array { slots, draws, .. } => {
                if slots.is_empty() {
                    return None;
                }
                *draws = draws.wrapping_add(1);
                slots[(mix64(*draws) % slots.len() as u64) as usize]
            }
        };
        self.remove(slot);
        Some(slot)
    }
}

#[cfg(test)]
mod tests;
