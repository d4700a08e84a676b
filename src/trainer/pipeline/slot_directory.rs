//! Which row each slot holds, and which batches may still touch it: ScratchPipe's Hit-Map and SlotDirectory masks
//! (section IV-D).
//!
//! Instead of a mask of one bit a batch in the window, shifted over all slots each cycle, a slot keeps one number: the last
//! **batch** that is known to need its row, planned or of the future window. It is a candidate for eviction when that batch has
//! left the past window. What each batch was the last to need is kept as a list until then, so that a cycle costs as
//! much as the batch that leaves, not as much as the scratchpad; and a batch whose rows were found when it came into the
//! future window has nothing to say of them when it is planned.
//!
//! One `SlotDirectory` is of slots of one size. Everything here is Plan's alone, and runs ahead of what the slots hold:
//! the Hit-Map says what will be in a slot when the batch that is planned comes to train.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::hit_map::HitMap;
use super::key::Key;
use super::policy::{Candidates, Policy, Worth};
use super::use_counts::UseCounts;
use crate::mem::prefetch::{TURNS_AHEAD, prefetch_line};
use crate::mem::{Huge, OutOfHostMemory};
use crate::trainer::pipeline::slot_flags::NO_SLOT;

/// Rows that are looked up together: many times [`TURNS_AHEAD`], and so few that what memory gave is still near when it is used.
pub(crate) const TOGETHER: usize = 256;

/// In so many lists all rows are listed, one after the other, unless these would be shorter than that; while one is made it takes
/// twice its memory.
const LISTS: usize = 16;
const FEWEST_LISTED: usize = 1 << 14;

/// A slot's bookkeeping, four of them in a line of memory; zeros are an empty slot's.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct Entry {
    /// What will be in it.
    key: Key,
    /// The last batch that is known to need it, counted round; of a candidate the stamp that it has among the candidates.
    until: u32,
    /// Twice how often the row is used: by the counts, and one more; or, without them, by batches since it came in. And 1 more
    /// where it is a candidate: beside the rest, so that most slots need not be looked up among the candidates.
    uses: u32,
}

impl Entry {
    /// Of a row that batch `batch` brings in.
    #[inline(always)]
    fn new(key: Key, batch: u64, uses: u32) -> Self {
        Self { key, until: batch as u32, uses: uses.clamp(1, u32::MAX >> 1) << 1 }
    }

    /// Whether there is a row at all.
    #[inline(always)]
    fn taken(&self) -> bool {
        self.uses > 0
    }

    #[inline(always)]
    fn candidate(&self) -> bool {
        self.uses & 1 == 1
    }

    #[inline(always)]
    fn stamp(&self) -> Option<u32> {
        self.candidate().then_some(self.until)
    }

    /// Whether the batch is the last that needs it, so that it is free when the batch has left.
    #[inline(always)]
    fn held_until(&self, batch: u64) -> bool {
        self.taken() && !self.candidate() && self.until == batch as u32
    }
}

/// The slots of one size.
pub(crate) struct SlotDirectory {
    /// How often each row is used, where that is known.
    frequencies: Option<Arc<UseCounts>>,
    entries: Huge<Entry>,
    slots: HitMap,
    free: Vec<u32>,
    candidates: Candidates,
    /// That of the last candidate, counted round.
    stamp: u32,
    /// What each batch was said to need when it was the last, of both windows.
    needed: VecDeque<(u64, Vec<u32>)>,
    /// Lists to use again.
    spare: Vec<Vec<u32>>,
}

impl SlotDirectory {
    /// `count` empty slots.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the memory is not to be had.
    pub(crate) fn new(
        policy: Policy,
        frequencies: Option<Arc<UseCounts>>,
        count: usize,
        seed: u64,
    ) -> Result<Self, OutOfHostMemory> {
        Ok(Self {
            frequencies,
            entries: Huge::zeroed(count)?,
            slots: HitMap::new(count)?,
            free: (0..count as u32).rev().collect(),
            candidates: Candidates::new(policy, count, seed),
            stamp: 0,
            needed: VecDeque::new(),
            spare: Vec::new(),
        })
    }

    /// Nothing is in any slot, as when it was made.
    pub(crate) fn clear(&mut self, policy: Policy, seed: u64) {
        let count = self.count();
        self.entries.fill(Entry::default());
        self.slots.clear();
        self.free.clear();
        self.free.extend((0..count as u32).rev());
        self.candidates = Candidates::new(policy, count, seed);
        self.needed.clear();
    }

    /// Bytes for each slot, with the list that [`Self::rows_after`] makes; the lists of the window left out, which are of as many
    /// slots as its batches touch.
    pub(crate) const fn bytes_per_slot() -> usize {
        let listed = 2 * size_of::<(Key, u32)>() / LISTS;
        size_of::<Entry>()
            + HitMap::bytes_per_slot()
            + size_of::<u32>()
            + Candidates::bytes_per_slot()
            + listed
    }

    /// How many slots.
    pub(crate) fn count(&self) -> usize {
        self.entries.len()
    }

    /// Slots that can be had now.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.candidates.len()
    }

    /// The slot that holds the row, or will when the next item trains.
    #[inline]
    pub(crate) fn find(&self, key: Key) -> Option<u32> {
        self.slots.find(key.tag(), |slot| self.holds(slot, key))
    }

    /// [`Self::find`] for some rows, at most [`TOGETHER`], into `found`, or [`NO_SLOT`].
    #[inline]
    pub(crate) fn find_all<'f>(&self, keys: &[Key], found: &'f mut [u32; TOGETHER]) -> &'f [u32] {
        let found = &mut found[..keys.len()];
        for (at, (found, key)) in found.iter_mut().zip(keys).enumerate() {
            if let Some(next) = keys.get(at + TURNS_AHEAD) {
                self.slots.prefetch(next.tag());
            }
            *found = self.slots.find(key.tag(), |_| true).unwrap_or(NO_SLOT);
            if *found != NO_SLOT {
                prefetch_line(&raw const self.entries[*found as usize]);
            }
        }
        // A loop of its own, by whose turns the entries are there.
        for (found, &key) in found.iter_mut().zip(keys) {
            if *found != NO_SLOT && !self.holds(*found, key) {
                *found = self.find(key).unwrap_or(NO_SLOT);
            }
        }
        found
    }

    /// Whether the slot, which is a row's, is this one's.
    #[inline(always)]
    fn holds(&self, slot: u32, key: Key) -> bool {
        self.entries[slot as usize].key == key
    }

    /// Batch `batch` needs the rows of these slots; each [`NO_SLOT`] among them stands for none.
    pub(crate) fn keep(&mut self, slots: &[u32], batch: u64) {
        let mut needed = std::mem::take(list_of(&mut self.needed, &mut self.spare, batch));
        needed.extend(slots.iter().filter(|&&slot| slot != NO_SLOT && self.needs(slot, batch)));
        *list_of(&mut self.needed, &mut self.spare, batch) = needed;
    }

    /// Marks the slot as one that the batch needs, unless a later one is known to.
    #[inline(always)]
    fn needs(&mut self, slot: u32, batch: u64) -> bool {
        let candidate = self.withdraw(slot);
        let entry = &mut self.entries[slot as usize];
        // What is no candidate was needed within the window, so that the difference is small and tells what is later.
        let later = candidate || (batch as u32).wrapping_sub(entry.until) as i32 > 0;
        if later {
            entry.until = batch as u32;
            if self.frequencies.is_none() && entry.uses < u32::MAX - 1 {
                entry.uses += 2;
            }
        }
        later
    }

    /// Batches up to `past` have left the past window: what no other needs becomes a candidate. What batch `batch`, which is
    /// planned, needs must be said before. `next` is how many batches from now a row is used, as [`Worth`] has it.
    pub(crate) fn expire(&mut self, past: u64, batch: u64, next: impl Fn(Key) -> u64) {
        while self.needed.front().is_some_and(|(number, _)| *number <= past) {
            let Some((number, mut list)) = self.needed.pop_front() else { break };
            self.offer(&list, number, batch, &next);
            list.clear();
            self.spare.push(list);
        }
    }

    /// Those of the slots become candidates that nobody needs after `last`.
    fn offer(&mut self, slots: &[u32], last: u64, batch: u64, next: &impl Fn(Key) -> u64) {
        for (at, &slot) in slots.iter().enumerate() {
            if let Some(&next) = slots.get(at + TURNS_AHEAD) {
                prefetch_line(&raw const self.entries[next as usize]);
            }
            // A slot may be on the list twice; the second time it is a candidate.
            let entry = &self.entries[slot as usize];
            if entry.held_until(last) {
                let worth = Worth { frequency: entry.uses >> 1, next: next(entry.key) };
                add(&mut self.candidates, &mut self.entries, (slot, &mut self.stamp), worth, batch);
            }
        }
    }

    /// A candidate's worth has changed.
    pub(crate) fn judge(&mut self, slot: u32, batch: u64, worth: Worth) {
        if self.withdraw(slot) {
            add(&mut self.candidates, &mut self.entries, (slot, &mut self.stamp), worth, batch);
        }
    }

    /// The slot is no candidate any more; gives whether it was one.
    #[inline(always)]
    fn withdraw(&mut self, slot: u32) -> bool {
        let entry = &mut self.entries[slot as usize];
        let candidate = entry.candidate();
        if candidate {
            entry.uses -= 1;
            self.candidates.remove(slot);
        }
        candidate
    }

    /// Gives up `count` rows that batches after `batch` need, the furthest batch first: they are candidates from now
    /// on. None of the slots in `kept` is given up.
    pub(crate) fn release(&mut self, mut count: usize, batch: u64, kept: &HashSet<u32>) {
        for (number, list) in self.needed.iter().rev().take_while(|(number, _)| *number > batch) {
            for &slot in list {
                let held = self.entries[slot as usize].held_until(*number);
                if count > 0 && held && !kept.contains(&slot) {
                    let new = (slot, &mut self.stamp);
                    add(&mut self.candidates, &mut self.entries, new, Worth::default(), batch);
                    count -= 1;
                }
            }
        }
    }

    /// Takes a slot for each of these rows, at most [`TOGETHER`], that batch `batch` needs; `give` gets each in turn, with its
    /// slot and what is in it now. Stops where no slot can be had.
    pub(crate) fn take_all(
        &mut self,
        keys: &[Key],
        batch: u64,
        mut give: impl FnMut(Key, u32, Option<Key>),
    ) -> usize {
        let mut taken = [(0, false); TOGETHER];
        let mut count = 0;
        while count < keys.len() {
            let free = self.free.pop();
            let stamp_of = |slot: u32| self.entries[slot as usize].stamp();
            let ask = |slot: u32| prefetch_line(&raw const self.entries[slot as usize]);
            let Some(slot) = free.or_else(|| self.candidates.pop(batch, stamp_of, ask)) else { break };
            taken[count] = (slot, free.is_none());
            count += 1;
        }
        let (keys, taken) = (&keys[..count], &taken[..count]);
        // Loops of their own, as in `find_all`.
        let mut old = [Key::default(); TOGETHER];
        for ((old, (slot, _)), key) in old.iter_mut().zip(taken).zip(keys) {
            *old = self.entries[*slot as usize].key;
            self.slots.prefetch(old.tag());
            self.slots.prefetch(key.tag());
            if let Some(counts) = &self.frequencies {
                counts.prefetch(*key);
            }
        }
        for (old, (slot, _)) in old.iter().zip(taken).filter(|(_, (_, full))| *full) {
            self.slots.remove(old.tag(), *slot);
        }
        let mut uses = [1_u32; TOGETHER];
        if let Some(counts) = &self.frequencies {
            for (uses, &key) in uses.iter_mut().zip(keys) {
                *uses = counts.get(key).saturating_add(1);
            }
        }
        let needed = list_of(&mut self.needed, &mut self.spare, batch);
        for (((&key, &(slot, full)), &old), uses) in keys.iter().zip(taken).zip(&old).zip(uses) {
            self.entries[slot as usize] = Entry::new(key, batch, uses);
            self.slots.insert(key.tag(), slot);
            needed.push(slot);
            give(key, slot, full.then_some(old));
        }
        count
    }

    /// The first rows past `after` that are here, ascending, and their slots: none when there are no more. Each time it looks at
    /// every slot, so it gives a sixteenth of them or more.
    pub(crate) fn rows_after(&self, after: Option<Key>, rows: &mut Vec<(Key, u32)>) {
        rows.clear();
        let (most, mut end) = (FEWEST_LISTED.max(self.count() / LISTS), None);
        rows.reserve_exact((2 * most).min(self.count()));
        let taken = self.entries.iter().zip(0..).filter(|(entry, _)| entry.taken());
        for (&Entry { key, .. }, slot) in taken {
            if after.is_some_and(|after| key <= after) || end.is_some_and(|end| key >= end) {
                continue;
            }
            rows.push((key, slot));
            if rows.len() == 2 * most {
                end = Some(rows.select_nth_unstable(most).1.0);
                rows.truncate(most);
            }
        }
        rows.sort_unstable();
        rows.truncate(most);
    }
}

/// Makes the slot a candidate, with the stamp after the last one.
#[inline(always)]
fn add(
    candidates: &mut Candidates,
    entries: &mut [Entry],
    (slot, stamp): (u32, &mut u32),
    worth: Worth,
    batch: u64,
) {
    *stamp = stamp.wrapping_add(1);
    let entry = &mut entries[slot as usize];
    entry.until = *stamp;
    entry.uses += 1;
    candidates.add((slot, *stamp), worth, batch, |slot| entries[slot as usize].stamp());
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

#[cfg(test)]
mod tests;
