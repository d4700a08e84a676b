//! Which row each slot holds, and which batches may still use it: ScratchPipe's Hit-Map and Hold masks
//! (section IV-D).
//!
//! The paper keeps a mask per slot, with a bit for each batch in the window, and shifts all masks each
//! cycle. Here a slot keeps one number: the last **batch**, planned or in the future window, that is known
//! to need its row. The slot becomes a candidate for eviction when that batch leaves the past window. For
//! each batch a list has the slots with this batch as their last known user. So the cost of a cycle depends
//! on the size of the batch that leaves the window, and not on the size of the scratchpad.
//!
//! A `SlotDirectory` covers slots of one size. Only Plan uses it. Plan runs ahead of the stages that move
//! rows, so the Hit-Map says what a slot will hold when the batch that is being planned trains.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::hit_map::{HitMap, SlotBucket};
use super::item::RowSlot;
use super::policy::{Candidate, Candidates, RowUse, ScratchpadPolicy};
use super::use_counts::UseCounts;
use crate::mem::prefetch::{PREFETCH_AHEAD, prefetch_line};
use crate::mem::probe_table::{Bucket, Tag};
use crate::mem::{Huge, OutOfHostMemory};
use crate::trainer::pipeline::slot_flags::NO_SLOT;
use crate::types::RowId;

/// The most rows of one call of [`SlotDirectory::find_all`]: many times [`PREFETCH_AHEAD`], but few enough
/// that prefetched lines are still in the processor's cache when they are used.
pub(crate) const LOOKUP_ROWS: usize = 256;

/// [`SlotDirectory::rows_after`] lists all rows in at most `LISTS` lists, each of at least
/// `MIN_LISTED_ROWS`. While a list is being made it takes twice its memory.
const LISTS: usize = 16;
const MIN_LISTED_ROWS: usize = 1 << 14;

/// A slot's bookkeeping. Four are in a cache line; all zeros is an empty slot.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct SlotState {
    /// The row that the slot will hold.
    row: RowId,
    /// The stamp if the slot is a candidate; otherwise the last known batch that needs the row, modulo 2^32.
    until: u32,
    /// Bit 0: is a victim candidate. Bits 1..: use count, at least 1 if the slot is taken. With counts of a
    /// data set it is the row's count + 1. Otherwise it is the number of batches that have used the row
    /// since it was fetched.
    uses: u32,
}

impl SlotState {
    /// The state of a slot with a row that is fetched for batch `batch`.
    #[inline(always)]
    fn new(row: RowId, batch: u64, uses: u32) -> Self {
        Self { row, until: batch as u32, uses: uses.clamp(1, u32::MAX >> 1) << 1 }
    }

    /// Whether the slot holds a row.
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

    /// Whether the slot is no candidate and `batch` is the last known batch that needs its row.
    #[inline(always)]
    fn held_until(&self, batch: u64) -> bool {
        self.taken() && !self.candidate() && self.until == batch as u32
    }
}

/// Slots with this batch as their last known user. A later batch may have become the last user since the
/// slot was listed.
struct BatchSlots {
    batch: u64,
    slots: Vec<u32>,
}

/// A slot that was taken for a row to fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TakenSlot {
    pub row: RowId,
    pub slot: u32,
    /// The row to evict from the slot, unless the slot was free.
    pub victim: Option<RowId>,
}

/// The slots of one size.
pub(crate) struct SlotDirectory {
    /// How often a data set uses each row; `None` if unknown.
    frequencies: Option<Arc<UseCounts>>,
    states: Huge<SlotState>,
    slots: HitMap,
    free: Vec<u32>,
    candidates: Candidates,
    /// The stamp of the candidate that was added last, modulo 2^32.
    stamp: u32,
    /// For each batch in the two hazard windows, the slots that protect its rows, ascending by batch.
    needed: VecDeque<BatchSlots>,
    /// Empty lists, kept to reuse their memory.
    spare: Vec<Vec<u32>>,
}

impl SlotDirectory {
    /// `count` empty slots.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when an allocation fails.
    pub(crate) fn new(
        policy: ScratchpadPolicy,
        frequencies: Option<Arc<UseCounts>>,
        count: usize,
        seed: u64,
    ) -> Result<Self, OutOfHostMemory> {
        Ok(Self {
            frequencies,
            states: Huge::zeroed(count)?,
            slots: HitMap::new(count)?,
            free: (0..count as u32).rev().collect(),
            candidates: Candidates::new(policy, count, seed),
            stamp: 0,
            needed: VecDeque::new(),
            spare: Vec::new(),
        })
    }

    /// Empties all slots.
    pub(crate) fn clear(&mut self, policy: ScratchpadPolicy, seed: u64) {
        let count = self.count();
        self.states.fill(SlotState::default());
        self.slots.clear();
        self.free.clear();
        self.free.extend((0..count as u32).rev());
        self.candidates = Candidates::new(policy, count, seed);
        self.needed.clear();
    }

    /// Bytes per slot, including the list that [`Self::rows_after`] makes. The lists of the windows are not
    /// included, because their size depends on the batches.
    pub(crate) const fn bytes_per_slot() -> usize {
        let listed = 2 * size_of::<RowSlot>() / LISTS;
        size_of::<SlotState>()
            + HitMap::BYTES_PER_ENTRY
            + size_of::<u32>()
            + Candidates::bytes_per_slot()
            + listed
    }

    /// The number of slots.
    pub(crate) fn count(&self) -> usize {
        self.states.len()
    }

    /// The number of slots that are free or candidates.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.candidates.len()
    }

    /// The slot that will hold the row when the item that is being planned trains.
    #[inline]
    pub(crate) fn find(&self, row: RowId) -> Option<u32> {
        let tag = tag_of(row);
        let bucket = self.slots.find(tag, |bucket| bucket.tag() == tag && self.has_row(bucket.slot(), row));
        bucket.map(|bucket| bucket.slot())
    }

    /// [`Self::find`] for up to [`LOOKUP_ROWS`] rows, into `found`; [`NO_SLOT`] for a row without a slot.
    #[inline]
    pub(crate) fn find_all<'f>(&self, rows: &[RowId], found: &'f mut [u32; LOOKUP_ROWS]) -> &'f [u32] {
        let found = &mut found[..rows.len()];
        for (at, (found, &row)) in found.iter_mut().zip(rows).enumerate() {
            if let Some(&next) = rows.get(at + PREFETCH_AHEAD) {
                self.slots.prefetch(tag_of(next));
            }
            let tag = tag_of(row);
            *found =
                self.slots.find(tag, |bucket| bucket.tag() == tag).map_or(NO_SLOT, |bucket| bucket.slot());
            if *found != NO_SLOT {
                prefetch_line(&raw const self.states[*found as usize]);
            }
        }
        // A second loop, so that the prefetched states have arrived.
        for (found, &row) in found.iter_mut().zip(rows) {
            if *found != NO_SLOT && !self.has_row(*found, row) {
                *found = self.find(row).unwrap_or(NO_SLOT);
            }
        }
        found
    }

    #[inline(always)]
    fn has_row(&self, slot: u32, row: RowId) -> bool {
        self.states[slot as usize].row == row
    }

    /// Records that batch `batch` needs the rows of these slots. The slots are no candidates until the batch
    /// has left the past window. [`NO_SLOT`] is ignored.
    pub(crate) fn keep(&mut self, slots: &[u32], batch: u64) {
        let mut needed = std::mem::take(slots_of_batch(&mut self.needed, &mut self.spare, batch));
        needed.extend(slots.iter().filter(|&&slot| slot != NO_SLOT && self.extend_use(slot, batch)));
        *slots_of_batch(&mut self.needed, &mut self.spare, batch) = needed;
    }

    /// Records that the batch needs the slot. Returns whether the batch has become the last known user.
    #[inline(always)]
    fn extend_use(&mut self, slot: u32, batch: u64) -> bool {
        let was_candidate = self.remove_candidate(slot);
        let state = &mut self.states[slot as usize];
        // If the slot is no candidate, its last user is in a window. So the two numbers are close, and the
        // sign of their difference is correct although they wrap.
        let later = was_candidate || (batch as u32).wrapping_sub(state.until) as i32 > 0;
        if later {
            state.until = batch as u32;
            if self.frequencies.is_none() && state.uses < u32::MAX - 1 {
                state.uses += 2;
            }
        }
        later
    }

    /// Makes slots candidates after batches up to `past` have left the past window, unless a later batch
    /// needs them. [`Self::keep`] for batch `batch`, which is being planned, must have been called before.
    /// `next` returns the [`RowUse::next`] of a row.
    pub(crate) fn expire(&mut self, past: u64, batch: u64, next: impl Fn(RowId) -> u64) {
        while self.needed.front().is_some_and(|needed| needed.batch <= past) {
            let Some(BatchSlots { batch: last, mut slots }) = self.needed.pop_front() else { break };
            self.add_candidates(&slots, last, batch, &next);
            slots.clear();
            self.spare.push(slots);
        }
    }

    /// Makes each of the slots a candidate if its last known user is batch `last`.
    fn add_candidates(&mut self, slots: &[u32], last: u64, batch: u64, next: &impl Fn(RowId) -> u64) {
        for (at, &slot) in slots.iter().enumerate() {
            if let Some(&next) = slots.get(at + PREFETCH_AHEAD) {
                prefetch_line(&raw const self.states[next as usize]);
            }
            // A slot may be listed twice. The second time it is already a candidate.
            let state = &self.states[slot as usize];
            if state.held_until(last) {
                let row_use = RowUse { frequency: state.uses >> 1, next: next(state.row) };
                self.add_candidate(slot, row_use, batch);
            }
        }
    }

    /// Gives a candidate its new order after the use of its row has changed. Ignores other slots.
    pub(crate) fn update_candidate(&mut self, slot: u32, batch: u64, row_use: RowUse) {
        if self.remove_candidate(slot) {
            self.add_candidate(slot, row_use, batch);
        }
    }

    /// Makes the slot a candidate, with the next stamp.
    #[inline(always)]
    fn add_candidate(&mut self, slot: u32, row_use: RowUse, batch: u64) {
        self.stamp = self.stamp.wrapping_add(1);
        let state = &mut self.states[slot as usize];
        state.until = self.stamp;
        state.uses += 1;
        let candidate = Candidate { slot, stamp: self.stamp };
        self.candidates.add(candidate, row_use, batch, |slot| self.states[slot as usize].stamp());
    }

    /// Removes the slot from the candidates. Returns whether it was one.
    #[inline(always)]
    fn remove_candidate(&mut self, slot: u32) -> bool {
        let state = &mut self.states[slot as usize];
        let candidate = state.candidate();
        if candidate {
            state.uses -= 1;
            self.candidates.remove(slot);
        }
        candidate
    }

    /// Makes up to `count` slots candidates although batches after `batch` need them, beginning with the
    /// batch that is furthest ahead. It spares the slots in `kept`.
    pub(crate) fn release(&mut self, mut count: usize, batch: u64, kept: &HashSet<u32>) {
        let needed = std::mem::take(&mut self.needed);
        for BatchSlots { batch: last, slots } in needed.iter().rev().take_while(|needed| needed.batch > batch)
        {
            for &slot in slots {
                if count > 0 && self.states[slot as usize].held_until(*last) && !kept.contains(&slot) {
                    self.add_candidate(slot, RowUse::default(), batch);
                    count -= 1;
                }
            }
        }
        self.needed = needed;
    }

    /// Takes a slot for each of these rows, which batch `batch` needs, and calls `give` with each slot.
    /// There are at most [`LOOKUP_ROWS`] rows. Stops when no slot is available. Returns the number of slots
    /// taken.
    pub(crate) fn take_all(&mut self, rows: &[RowId], batch: u64, mut give: impl FnMut(TakenSlot)) -> usize {
        let mut taken = [(0, false); LOOKUP_ROWS];
        let mut count = 0;
        while count < rows.len() {
            let free = self.free.pop();
            let stamp_of = |slot: u32| self.states[slot as usize].stamp();
            let prefetch = |slot: u32| prefetch_line(&raw const self.states[slot as usize]);
            let Some(slot) = free.or_else(|| self.candidates.pop(batch, stamp_of, prefetch)) else { break };
            taken[count] = (slot, free.is_none());
            count += 1;
        }
        let (rows, taken) = (&rows[..count], &taken[..count]);
        // Separate loops, so that prefetched lines arrive before they are used, as in `find_all`.
        let mut old = [RowId::default(); LOOKUP_ROWS];
        for ((old, (slot, _)), row) in old.iter_mut().zip(taken).zip(rows) {
            *old = self.states[*slot as usize].row;
            self.slots.prefetch(tag_of(*old));
            self.slots.prefetch(tag_of(*row));
            if let Some(counts) = &self.frequencies {
                counts.prefetch(*row);
            }
        }
        for (&old, (slot, _)) in old.iter().zip(taken).filter(|(_, (_, full))| *full) {
            self.slots.remove(tag_of(old), |bucket| bucket.slot() == *slot);
        }
        let mut uses = [1_u32; LOOKUP_ROWS];
        if let Some(counts) = &self.frequencies {
            for (uses, &row) in uses.iter_mut().zip(rows) {
                *uses = counts.get(row).saturating_add(1);
            }
        }
        let needed = slots_of_batch(&mut self.needed, &mut self.spare, batch);
        for (((&row, &(slot, full)), &old), uses) in rows.iter().zip(taken).zip(&old).zip(uses) {
            self.states[slot as usize] = SlotState::new(row, batch, uses);
            self.slots.insert(SlotBucket::new(tag_of(row), slot));
            needed.push(slot);
            give(TakenSlot { row, slot, victim: full.then_some(old) });
        }
        count
    }

    /// Lists the first rows after `after`, ascending, with their slots. The list is empty when there are no
    /// more rows. Each call scans all slots, so lists are long to keep the number of calls small.
    pub(crate) fn rows_after(&self, after: Option<RowId>, listed: &mut Vec<RowSlot>) {
        listed.clear();
        let (most, mut end) = (MIN_LISTED_ROWS.max(self.count() / LISTS), None);
        listed.reserve_exact((2 * most).min(self.count()));
        let taken = self.states.iter().zip(0..).filter(|(state, _)| state.taken());
        for (&SlotState { row, .. }, slot) in taken {
            if after.is_some_and(|after| row <= after) || end.is_some_and(|end| row >= end) {
                continue;
            }
            listed.push(RowSlot { row, slot });
            if listed.len() == 2 * most {
                end = Some(listed.select_nth_unstable(most).1.row);
                listed.truncate(most);
            }
        }
        listed.sort_unstable();
        listed.truncate(most);
    }
}

#[inline(always)]
fn tag_of(row: RowId) -> Tag {
    Tag::of(row.number())
}

/// The list of this batch. It is created if it does not exist.
fn slots_of_batch<'a>(
    lists: &'a mut VecDeque<BatchSlots>,
    spare: &mut Vec<Vec<u32>>,
    batch: u64,
) -> &'a mut Vec<u32> {
    let at = lists.partition_point(|list| list.batch < batch);
    if lists.get(at).is_none_or(|list| list.batch != batch) {
        lists.insert(at, BatchSlots { batch, slots: spare.pop().unwrap_or_default() });
    }
    &mut lists[at].slots
}

#[cfg(test)]
mod tests;
