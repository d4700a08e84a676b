//! The structures that keep candidates in order: queues and lists.

use std::collections::{BTreeMap, VecDeque};

use super::{Candidate, SEEN_AHEAD};
use crate::mem::prefetch::PREFETCH_AHEAD;

const NONE: u32 = u32::MAX;

/// A queue of candidates for each rank; the lowest rank is evicted first. When a slot stops being a
/// candidate, its entry becomes stale, stays, and is skipped by `pop`.
pub(crate) struct RankQueues {
    ranks: BTreeMap<u32, VecDeque<Candidate>>,
    /// Entries of all queues.
    entries: usize,
    max_entries: usize,
}

impl RankQueues {
    /// There are up to 1.5 entries per slot, and a queue may have twice the capacity that it needs.
    pub(crate) const fn bytes_per_slot() -> usize {
        3 * size_of::<Candidate>()
    }

    pub(crate) fn new(count: usize) -> Self {
        Self { ranks: BTreeMap::new(), entries: 0, max_entries: count + count / 2 }
    }

    pub(crate) fn push(&mut self, rank: u32, candidate: Candidate, stamp_of: impl Fn(u32) -> Option<u32>) {
        if self.entries > self.max_entries {
            // At least a third of the entries are stale, so the average cost of a push is a few steps.
            self.ranks.retain(|_, queue| {
                queue.retain(|entry| stamp_of(entry.slot) == Some(entry.stamp));
                !queue.is_empty()
            });
            self.entries = self.ranks.values().map(VecDeque::len).sum();
        }
        self.entries += 1;
        self.ranks.entry(rank).or_default().push_back(candidate);
    }

    /// Calls `prefetch` with each slot some iterations before it needs the slot's stamp.
    pub(crate) fn pop(
        &mut self,
        stamp_of: impl Fn(u32) -> Option<u32>,
        prefetch: impl Fn(u32),
    ) -> Option<u32> {
        while let Some(mut first) = self.ranks.first_entry() {
            while let Some(Candidate { slot, stamp }) = first.get_mut().pop_front() {
                self.entries -= 1;
                if let Some(next) = first.get().get(PREFETCH_AHEAD) {
                    prefetch(next.slot);
                }
                if stamp_of(slot) == Some(stamp) {
                    return Some(slot);
                }
            }
            first.remove();
        }
        None
    }
}

/// Doubly linked lists of slots. A slot is in at most one list. List 0 has the slots that no seen batch
/// needs. Every other list has the slots that one batch needs next.
pub(crate) struct LinkedLists {
    heads: Vec<u32>,
    tails: Vec<u32>,
    links: Vec<Link>,
}

#[derive(Clone, Copy)]
struct Link {
    before: u32,
    after: u32,
    list: u8,
}

impl LinkedLists {
    pub(crate) fn new(lists: usize, count: usize) -> Self {
        let links = vec![Link { before: NONE, after: NONE, list: 0 }; count];
        Self { heads: vec![NONE; lists], tails: vec![NONE; lists], links }
    }

    pub(crate) fn push(&mut self, list: usize, slot: u32) {
        let last = std::mem::replace(&mut self.tails[list], slot);
        self.links[slot as usize] = Link { before: last, after: NONE, list: list as u8 };
        match last {
            NONE => self.heads[list] = slot,
            last => self.links[last as usize].after = slot,
        }
    }

    pub(crate) fn remove(&mut self, slot: u32) {
        let Link { before, after, list } = self.links[slot as usize];
        match before {
            NONE => self.heads[list as usize] = after,
            before => self.links[before as usize].after = after,
        }
        match after {
            NONE => self.tails[list as usize] = before,
            after => self.links[after as usize].before = before,
        }
    }

    /// The next victim: the head of list 0; if that is empty, the head of the list of the batch that is
    /// furthest after `batch`.
    pub(crate) fn first(&self, batch: u64) -> Option<u32> {
        let ahead = (1..self.heads.len() as u64).rev().map(|next| 1 + (batch + next) as usize % SEEN_AHEAD);
        std::iter::once(0).chain(ahead).map(|list| self.heads[list]).find(|&slot| slot != NONE)
    }
}

#[cfg(test)]
mod tests;
