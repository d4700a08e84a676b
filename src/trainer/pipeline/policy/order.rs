//! In which order candidates go: queues, lists.

use std::collections::{BTreeMap, VecDeque};

use super::SEEN_AHEAD;
use crate::mem::prefetch::TURNS_AHEAD;

const NONE: u32 = u32::MAX;

/// A queue of slots for each rank; the lowest rank goes first. An entry, a slot and its stamp, is left where it is when its slot
/// is a candidate no more, and passed over when it comes up.
pub(crate) struct Queues {
    ranks: BTreeMap<u32, VecDeque<(u32, u32)>>,
    /// Of all of them.
    entries: usize,
    most: usize,
}

impl Queues {
    /// Half as many entries again as there are slots, and queues of twice the room that they need.
    pub(crate) const fn bytes_per_slot() -> usize {
        3 * size_of::<(u32, u32)>()
    }

    pub(crate) fn new(count: usize) -> Self {
        Self { ranks: BTreeMap::new(), entries: 0, most: count + count / 2 }
    }

    pub(crate) fn push(&mut self, rank: u32, entry: (u32, u32), stamp_of: impl Fn(u32) -> Option<u32>) {
        if self.entries > self.most {
            // At least a third of them are of no more use, so that this costs a few steps a coming.
            self.ranks.retain(|_, queue| {
                queue.retain(|&(slot, stamp)| stamp_of(slot) == Some(stamp));
                !queue.is_empty()
            });
            self.entries = self.ranks.values().map(VecDeque::len).sum();
        }
        self.entries += 1;
        self.ranks.entry(rank).or_default().push_back(entry);
    }

    /// `ask` is told of each slot some turns before its stamp is looked at.
    pub(crate) fn pop(&mut self, stamp_of: impl Fn(u32) -> Option<u32>, ask: impl Fn(u32)) -> Option<u32> {
        while let Some(mut first) = self.ranks.first_entry() {
            while let Some((slot, stamp)) = first.get_mut().pop_front() {
                self.entries -= 1;
                if let Some(&(next, _)) = first.get().get(TURNS_AHEAD) {
                    ask(next);
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

/// Lists of slots, each slot in at most one of them. List 0 is of those that nobody has been seen to need.
pub(crate) struct Lists {
    heads: Vec<u32>,
    tails: Vec<u32>,
    /// (before, after, list).
    links: Vec<(u32, u32, u8)>,
}

impl Lists {
    pub(crate) fn new(lists: usize, count: usize) -> Self {
        Self { heads: vec![NONE; lists], tails: vec![NONE; lists], links: vec![(NONE, NONE, 0); count] }
    }

    pub(crate) fn push(&mut self, list: usize, slot: u32) {
        let last = std::mem::replace(&mut self.tails[list], slot);
        self.links[slot as usize] = (last, NONE, list as u8);
        match last {
            NONE => self.heads[list] = slot,
            last => self.links[last as usize].1 = slot,
        }
    }

    pub(crate) fn remove(&mut self, slot: u32) {
        let (before, after, list) = self.links[slot as usize];
        match before {
            NONE => self.heads[list as usize] = after,
            before => self.links[before as usize].1 = after,
        }
        match after {
            NONE => self.tails[list as usize] = before,
            after => self.links[after as usize].0 = before,
        }
    }

    /// The one that goes first: of list 0, or of the list of the batch that is furthest from `batch`.
    pub(crate) fn first(&self, batch: u64) -> Option<u32> {
        let ahead = (1..self.heads.len() as u64).rev().map(|next| 1 + (batch + next) as usize % SEEN_AHEAD);
        std::iter::once(0).chain(ahead).map(|list| self.heads[list]).find(|&slot| slot != NONE)
    }
}

#[cfg(test)]
mod tests;
