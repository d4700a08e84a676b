//! Which row each slot holds, and which batches may still touch it: ScratchPipe's Hit-Map and Hold masks
//! (section IV-D).
//!
//! Instead of a mask of one bit a batch in the window, shifted over all slots each cycle, a slot keeps two numbers: the
//! last **item** of the pipeline that touches it, and the last **batch** within the future window that will. It is a candidate for eviction
//! when that item has left the past window and that batch has come. What each item touched is kept as a list until then, so
//! that a cycle costs as much as the batch that leaves, not as much as the scratchpad.
//!
//! One `Hold` is of slots of one size. Everything here is Plan's alone, and runs ahead of what the slots hold:
//! the Hit-Map says what will be in a slot when the batch that is planned comes to train.

use std::collections::VecDeque;

use hashbrown::HashTable;

use super::policy::{Candidates, Policy, Worth};
use crate::types::{TableId, scatter};

/// A table and one of its rows, in one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(u64);

/// Bits of a key that are the row's.
const ROW_BITS: u32 = 40;

impl Key {
    /// Tables and rows of which there may be keys.
    pub const LIMITS: (usize, u64) = (1 << (u64::BITS - ROW_BITS), 1 << ROW_BITS);

    /// Of a row; both within [`Self::LIMITS`].
    #[inline]
    pub fn new(table: TableId, row: u64) -> Self {
        debug_assert!(row < Self::LIMITS.1 && table.index() < Self::LIMITS.0);
        Self(u64::from(table.0) << ROW_BITS | row)
    }

    /// The table.
    #[inline]
    pub fn table(self) -> TableId {
        TableId((self.0 >> ROW_BITS) as u32)
    }

    /// The row.
    #[inline]
    pub fn row(self) -> u64 {
        self.0 & (Self::LIMITS.1 - 1)
    }
}

/// A slot's bookkeeping.
#[derive(Clone, Copy)]
struct Entry {
    /// What will be in it.
    key: Key,
    /// The last item that touches it.
    item: u64,
    /// The last batch of the future window that needs its row; 0 where none is known.
    due: u64,
    /// Batches that have used the row since it came in.
    uses: u32,
    /// Whether there is a row at all.
    taken: bool,
}

/// The slots of one size.
pub struct Hold {
    entries: Vec<Entry>,
    slots: HashTable<u32>,
    free: Vec<u32>,
    candidates: Candidates,
    /// What each item of the past window touches.
    touched: VecDeque<(u64, Vec<u32>)>,
    /// What each batch of the future window needs of the rows that are here.
    marked: VecDeque<(u64, Vec<u32>)>,
    /// The last item that has left the past window.
    expired: u64,
    /// Lists to use again.
    spare: Vec<Vec<u32>>,
}

impl Hold {
    /// `count` empty slots.
    pub fn new(policy: Policy, count: usize, seed: u64) -> Self {
        let empty = Entry { key: Key(0), item: 0, due: 0, uses: 0, taken: false };
        Self {
            entries: vec![empty; count],
            slots: HashTable::with_capacity(count),
            free: (0..count as u32).rev().collect(),
            candidates: Candidates::new(policy, count, seed),
            touched: VecDeque::new(),
            marked: VecDeque::new(),
            expired: 0,
            spare: Vec::new(),
        }
    }

    /// Bytes for each slot, the lists of the window left out, which are of as many slots as its batches touch.
    pub const fn bytes_per_slot() -> usize {
        // The hash table has buckets of five bytes at a load of at least 7/16.
        size_of::<Entry>() + 5 * 16 / 7 + 1 + size_of::<u32>() + Candidates::bytes_per_slot()
    }

    /// How many slots.
    pub fn count(&self) -> usize {
        self.entries.len()
    }

    /// Slots that can be had now.
    pub fn available(&self) -> usize {
        self.free.len() + self.candidates.len()
    }

    /// The slot that holds the row, or will when the next item trains.
    #[inline]
    pub fn find(&self, key: Key) -> Option<u32> {
        let entries = &self.entries;
        self.slots.find(scatter(key.0), |&slot| entries[slot as usize].key == key).copied()
    }

    /// Item `item` touches the slot.
    pub fn touch(&mut self, slot: u32, item: u64) {
        self.candidates.remove(slot);
        let entry = &mut self.entries[slot as usize];
        if entry.item != item {
            entry.item = item;
            entry.uses = entry.uses.saturating_add(1);
            list_of(&mut self.touched, &mut self.spare, item).push(slot);
        }
    }

    /// What `from` touches is touched by the later item `to`, and by none before.
    pub fn defer(&mut self, from: u64, to: u64) {
        if from == to {
            return;
        }
        let Some((number, list)) = self.touched.back_mut().filter(|(number, _)| *number == from) else {
            return;
        };
        *number = to;
        list.iter().for_each(|&slot| self.entries[slot as usize].item = to);
    }

    /// Batch `batch` has come into the future window, and needs the row of the slot.
    pub fn mark(&mut self, slot: u32, batch: u64) {
        self.candidates.remove(slot);
        let entry = &mut self.entries[slot as usize];
        if entry.due < batch {
            entry.due = batch;
            list_of(&mut self.marked, &mut self.spare, batch).push(slot);
        }
    }

    /// Items up to `item` have left the past window, and batch `batch` has come: what nobody holds becomes a candidate. What is
    /// touched by the item that is planned must be said before.
    pub fn expire(&mut self, item: u64, batch: u64, worth: impl Fn(Key, u32) -> Worth) {
        self.expired = self.expired.max(item);
        while self.touched.front().is_some_and(|(number, _)| *number <= item) {
            let Some((number, mut list)) = self.touched.pop_front() else { break };
            for slot in list.drain(..) {
                let entry = &self.entries[slot as usize];
                if entry.taken && entry.item == number && entry.due <= batch {
                    self.candidates.add(slot, worth(entry.key, entry.uses), batch);
                }
            }
            self.spare.push(list);
        }
        while self.marked.front().is_some_and(|(number, _)| *number <= batch) {
            let Some((number, mut list)) = self.marked.pop_front() else { break };
            for slot in list.drain(..) {
                let entry = &self.entries[slot as usize];
                // Only where a batch is split has it come and not touched all that was kept for it.
                if entry.taken
                    && entry.due == number
                    && entry.item <= self.expired
                    && !self.candidates.has(slot)
                {
                    self.candidates.add(slot, worth(entry.key, entry.uses), batch);
                }
            }
            self.spare.push(list);
        }
    }

    /// A candidate's worth has changed.
    pub fn judge(&mut self, slot: u32, batch: u64, worth: Worth) {
        if self.candidates.has(slot) {
            self.candidates.add(slot, worth, batch);
        }
    }

    /// Gives up `count` rows that a batch of the future window needs, the furthest batch first: they are candidates from now
    /// on. Nothing that item `item` touches is given up.
    pub fn release(&mut self, mut count: usize, item: u64, batch: u64) {
        for at in (0..self.marked.len()).rev() {
            let (due, list) = &self.marked[at];
            for &slot in list {
                let entry = &mut self.entries[slot as usize];
                let held = entry.item == item || self.candidates.has(slot);
                if count > 0 && entry.taken && entry.due == *due && !held {
                    entry.due = 0;
                    self.candidates.add(slot, Worth::default(), batch);
                    count -= 1;
                }
            }
        }
    }

    /// Takes a slot for a row that item `item` brings in, and gives what is in it now.
    pub fn take(&mut self, key: Key, item: u64, batch: u64) -> Option<(u32, Option<Key>)> {
        let (slot, victim) = match self.free.pop() {
            Some(slot) => (slot, None),
            None => {
                let slot = self.candidates.pop(batch)?;
                let old = self.entries[slot as usize].key;
                if let Ok(found) = self.slots.find_entry(scatter(old.0), |&at| at == slot) {
                    found.remove();
                }
                (slot, Some(old))
            }
        };
        self.entries[slot as usize] = Entry { key, item, due: 0, uses: 1, taken: true };
        list_of(&mut self.touched, &mut self.spare, item).push(slot);
        let entries = &self.entries;
        self.slots.insert_unique(scatter(key.0), slot, |&slot| scatter(entries[slot as usize].key.0));
        Some((slot, victim))
    }

    /// Every row that is here, and its slot.
    pub fn rows(&self) -> impl Iterator<Item = (Key, u32)> + '_ {
        let taken = self.entries.iter().zip(0..).filter(|(entry, _)| entry.taken);
        taken.map(|(entry, slot)| (entry.key, slot))
    }
}

/// The list of this number; lists are made in ascending order.
fn list_of<'a>(
    lists: &'a mut VecDeque<(u64, Vec<u32>)>,
    spare: &mut Vec<Vec<u32>>,
    number: u64,
) -> &'a mut Vec<u32> {
    let at = lists.partition_point(|(n, _)| *n < number);
    if lists.get(at).is_none_or(|(n, _)| *n != number) {
        lists.insert(at, (number, spare.pop().unwrap_or_default()));
    }
    &mut lists[at].1
}
