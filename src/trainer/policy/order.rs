//! In which order candidates go: a queue, a heap, lists.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::SEEN_AHEAD;

const NONE: u32 = u32::MAX;

/// Slots in the order in which they came, each with its stamp. An entry is left where it is when its slot is a
/// candidate no more, and passed over when it comes up.
pub(super) struct Queue {
    entries: VecDeque<(u32, u32)>,
    most: usize,
}

impl Queue {
    pub(super) fn new(count: usize) -> Self {
        Self { entries: VecDeque::with_capacity(2 * count + 1), most: 2 * count }
    }

    pub(super) fn push(&mut self, entry: (u32, u32), stamp_of: impl Fn(u32) -> Option<u32>) {
        if self.entries.len() > self.most {
            // At least half of them are of no more use, so that this costs a few steps a coming.
            self.entries.retain(|&(slot, stamp)| stamp_of(slot) == Some(stamp));
        }
        self.entries.push_back(entry);
    }

    pub(super) fn pop(&mut self, stamp_of: impl Fn(u32) -> Option<u32>) -> Option<u32> {
        loop {
            let (slot, stamp) = self.entries.pop_front()?;
            if stamp_of(slot) == Some(stamp) {
                return Some(slot);
            }
        }
    }
}

/// Slots by frequency. An entry is left where it is when its slot is a candidate no more, or its frequency has grown,
/// and put right when it comes up.
pub(super) struct Heap {
    entries: BinaryHeap<Reverse<(u32, u32)>>,
    /// The frequency of each slot's entry, or [`NONE`]; another entry of the slot is passed over.
    entered: Vec<u32>,
    frequency: Vec<u32>,
}

impl Heap {
    /// Of its entries, and of the two frequencies.
    pub(super) const fn bytes_per_slot() -> usize {
        2 * size_of::<Reverse<(u32, u32)>>() + 2 * size_of::<u32>()
    }

    pub(super) fn new(count: usize) -> Self {
        Self { entries: BinaryHeap::new(), entered: vec![NONE; count], frequency: vec![0; count] }
    }

    pub(super) fn add(&mut self, slot: u32, frequency: u32) {
        let (frequency, s) = (frequency.min(NONE - 1), slot as usize);
        self.frequency[s] = frequency;
        // A slot's new row may be less frequent than the old one, whose entry would then come up too late.
        if frequency < self.entered[s] {
            self.entered[s] = frequency;
            self.entries.push(Reverse((frequency, slot)));
            if self.entries.len() > 2 * self.entered.len() {
                self.entries.retain(|Reverse((was, slot))| self.entered[*slot as usize] == *was);
            }
        }
    }

    pub(super) fn pop(&mut self, is: impl Fn(u32) -> bool) -> Option<u32> {
        loop {
            let Reverse((was, slot)) = self.entries.pop()?;
            let s = slot as usize;
            if self.entered[s] != was {
                continue;
            }
            let now = self.frequency[s];
            self.entered[s] = NONE;
            match is(slot) {
                false => {}
                true if now == was => return Some(slot),
                true => self.add(slot, now),
            }
        }
    }
}

/// Lists of slots, each slot in at most one of them. List 0 is of those that nobody has been seen to need.
pub(super) struct Lists {
    heads: Vec<u32>,
    tails: Vec<u32>,
    /// (before, after, list).
    links: Vec<(u32, u32, u8)>,
}

impl Lists {
    pub(super) fn new(lists: usize, count: usize) -> Self {
        Self { heads: vec![NONE; lists], tails: vec![NONE; lists], links: vec![(NONE, NONE, 0); count] }
    }

    pub(super) fn push(&mut self, list: usize, slot: u32) {
        let last = std::mem::replace(&mut self.tails[list], slot);
        self.links[slot as usize] = (last, NONE, list as u8);
        match last {
            NONE => self.heads[list] = slot,
            last => self.links[last as usize].1 = slot,
        }
    }

    pub(super) fn remove(&mut self, slot: u32) {
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
    pub(super) fn first(&self, batch: u64) -> Option<u32> {
        let ahead = (1..self.heads.len() as u64).rev().map(|next| 1 + (batch + next) as usize % SEEN_AHEAD);
        std::iter::once(0).chain(ahead).map(|list| self.heads[list]).find(|&slot| slot != NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_a_candidate_no_more_does_not_pile_up_in_the_queue() {
        let mut queue = Queue::new(4);
        for stamp in 0..100 {
            queue.push((stamp % 3, stamp), |_| None);
        }
        assert!(queue.entries.len() <= 9, "{} entries of 4 slots", queue.entries.len());
        queue.push((3, 100), |_| None);
        assert_eq!(queue.pop(|slot| (slot == 3).then_some(100)), Some(3));
    }
}
