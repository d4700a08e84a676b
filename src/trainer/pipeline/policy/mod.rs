//! Who goes when a scratchpad is full: the slots that no batch in the window needs, in the order in which a policy gives
//! them up.
//!
//! A slot is a candidate or it is not; `SlotDirectory` says when. Each policy keeps its candidates in a structure of a few bytes
//! a slot, from which any of them can be taken out when a batch needs its row after all:
//!
//! - LRU: a queue. A slot becomes a candidate when the last batch that used it leaves the window, so the order of
//!   coming is that of last use.
//! - LFU: a queue for each frequency: by the counts of a data set (frequency-aware cache, section 4), or where there are none by the
//!   batches that have used the row since it came in.
//! - random: an array, of which any place is taken.
//! - optimal: lists by the next batch that will use the row, as far as the look-ahead sees; the furthest goes first, and
//!   before it those that nobody has been seen to need (Belady, "A study of replacement algorithms", 1966), the least
//!   recently used first.

use std::fmt;
use std::str::FromStr;

mod order;

use self::order::{Lists, Queues};
use crate::mem::mix64;

/// Which rows leave the scratchpad first.
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

/// No such policy.
#[derive(Debug, thiserror::Error)]
#[error("policy: expected lru, lfu, random or optimal, got {0:?}")]
pub struct UnknownPolicy(String);

impl Policy {
    /// All there are.
    pub const ALL: [Self; 4] = [Self::Lru, Self::Lfu, Self::Random, Self::Optimal];
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

/// What a policy may ask of a slot's row.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Worth {
    /// How often it is used; for LFU.
    pub frequency: u32,
    /// How many batches from now it is used next, 0 where none has been seen to; for the optimal.
    pub next: u64,
}

/// The most batches that the optimal policy looks ahead.
pub(crate) const SEEN_AHEAD: usize = 63;

/// The candidates among `count` slots. Which slots are candidates stands in the slots' bookkeeping, where whoever asks has it at hand:
/// a policy that leaves behind what is none any more is given `stamp_of`, which says of a slot the stamp that it was last added with,
/// or nothing where it is no candidate.
pub(crate) struct Candidates {
    order: Order,
    len: usize,
}

enum Order {
    /// By how often a row is used, or all of one rank.
    Queues(Queues, bool),
    Lists(Lists),
    Array {
        slots: Vec<u32>,
        places: Vec<u32>,
        draws: u64,
    },
}

impl Candidates {
    /// None of `count` slots. `seed` is for the policy that draws.
    pub(crate) fn new(policy: Policy, count: usize, seed: u64) -> Self {
        let order = match policy {
            Policy::Lru => Order::Queues(Queues::new(count), false),
            Policy::Lfu => Order::Queues(Queues::new(count), true),
            Policy::Optimal => Order::Lists(Lists::new(SEEN_AHEAD + 1, count)),
            Policy::Random => Order::Array { slots: Vec::new(), places: vec![0; count], draws: mix64(seed) },
        };
        Self { order, len: 0 }
    }

    /// Bytes for each slot.
    pub(crate) const fn bytes_per_slot() -> usize {
        // The largest.
        Queues::bytes_per_slot()
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Makes the slot a candidate. `batch` is the number of the batch that is planned.
    pub(crate) fn add(
        &mut self,
        (slot, stamp): (u32, u32),
        worth: Worth,
        batch: u64,
        stamp_of: impl Fn(u32) -> Option<u32>,
    ) {
        self.len += 1;
        match &mut self.order {
            Order::Queues(queues, by_frequency) => {
                let rank = if *by_frequency { worth.frequency } else { 0 };
                queues.push(rank, (slot, stamp), stamp_of);
            }
            Order::Lists(lists) => {
                let list = match worth.next {
                    0 => 0,
                    next => 1 + (batch + next) as usize % SEEN_AHEAD,
                };
                lists.push(list, slot);
            }
            Order::Array { slots, places, .. } => {
                places[slot as usize] = slots.len() as u32;
                slots.push(slot);
            }
        }
    }

    /// The slot, which was one, is no candidate any more.
    #[inline]
    pub(crate) fn remove(&mut self, slot: u32) {
        self.len -= 1;
        match &mut self.order {
            // Its entry is passed over when it comes up.
            Order::Queues(..) => {}
            Order::Lists(lists) => lists.remove(slot),
            Order::Array { slots, places, .. } => {
                let place = places[slot as usize] as usize;
                slots.swap_remove(place);
                if let Some(&moved) = slots.get(place) {
                    places[moved as usize] = place as u32;
                }
            }
        }
    }

    /// Takes the candidate that goes first. `batch` as in [`Self::add`]; `ask` is told of slots whose stamps are looked at some turns
    /// later, as far as the policy knows them.
    pub(crate) fn pop(
        &mut self,
        batch: u64,
        stamp_of: impl Fn(u32) -> Option<u32>,
        ask: impl Fn(u32),
    ) -> Option<u32> {
        let slot = match &mut self.order {
            Order::Queues(queues, _) => queues.pop(stamp_of, ask)?,
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
