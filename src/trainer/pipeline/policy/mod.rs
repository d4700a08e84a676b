//! Which rows a full scratchpad evicts first. Candidates are the slots that no batch in the window needs; a
//! policy orders them.
//!
//! `SlotDirectory` decides whether a slot is a candidate. A policy keeps its candidates in a structure of a
//! few bytes a slot. Any candidate can be removed from it when a batch needs its row after all:
//!
//! - LRU: a queue. A slot becomes a candidate when the last batch that used it leaves the window, so the
//!   queue is in order of last use.
//! - LFU: a queue for each frequency. Frequencies are the counts of a data set (frequency-aware cache,
//!   section 4), or without them the batches that have used the row since it came in.
//! - random: an array; a victim is drawn from it at random.
//! - optimal: a list for each batch that uses a row next, as far as the look-ahead sees. Rows that no coming
//!   batch needs are evicted first, in LRU order; then the rows of the furthest batch (Belady, "A study of
//!   replacement algorithms", 1966).

use std::fmt;
use std::str::FromStr;

mod order;

use self::order::{LinkedLists, RankQueues};
use crate::mem::mix64;

/// Which rows the scratchpad evicts first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// The least recently used.
    #[default]
    Lru,
    /// The least frequent.
    Lfu,
    /// Any.
    Random,
    /// Those that are needed last, as far as the look-ahead sees.
    Optimal,
}

/// A name that is not a policy's.
#[derive(Debug, thiserror::Error)]
#[error("policy: expected lru, lfu, random or optimal, got {0:?}")]
pub struct UnknownPolicy(String);

impl Policy {
    /// All policies.
    pub(crate) const ALL: [Self; 4] = [Self::Lru, Self::Lfu, Self::Random, Self::Optimal];
}

impl FromStr for Policy {
    type Err = UnknownPolicy;
    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL.into_iter().find(|policy| policy.to_string() == name);
        found.ok_or_else(|| UnknownPolicy(name.into()))
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lru => "lru",
            Self::Lfu => "lfu",
            Self::Random => "random",
            Self::Optimal => "optimal",
        })
    }
}

/// How a slot's row is used, as policies see it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowUse {
    /// For LFU: how often.
    pub frequency: u32,
    /// For the optimal policy: in how many batches from now it is used next; 0 if no batch is seen to need
    /// it.
    pub next: u64,
}

/// The most batches that the optimal policy looks ahead.
pub(crate) const SEEN_AHEAD: usize = 63;

/// A slot, and the stamp that it has as a candidate. A slot that becomes a candidate again gets a new stamp.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub slot: u32,
    pub stamp: u32,
}

/// The candidates among some slots, in a policy's order. The queues keep stale entries: methods that meet
/// them get `stamp_of`, which returns the current stamp of a slot, or none if it is no candidate.
pub(crate) struct Candidates {
    order: Order,
    len: usize,
}

enum Order {
    Queues {
        queues: RankQueues,
        /// If not, all slots have one rank.
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
    pub(crate) fn new(policy: Policy, count: usize, seed: u64) -> Self {
        let queues = |by_frequency| Order::Queues { queues: RankQueues::new(count), by_frequency };
        let order = match policy {
            Policy::Lru => queues(false),
            Policy::Lfu => queues(true),
            Policy::Optimal => Order::Lists(LinkedLists::new(SEEN_AHEAD + 1, count)),
            Policy::Random => Order::Array { slots: Vec::new(), indices: vec![0; count], draws: mix64(seed) },
        };
        Self { order, len: 0 }
    }

    /// Bytes for each slot, of the largest structure.
    pub(crate) const fn bytes_per_slot() -> usize {
        RankQueues::bytes_per_slot()
    }

    /// How many candidates.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Adds a candidate. `batch` is the number of the batch that is planned.
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
    /// whose stamps are needed some iterations later, if the policy knows them.
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
