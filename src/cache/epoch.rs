//! Batch pins: when may the memory of an evicted row be used again?
//!
//! Every batch has a number, taken when it is pinned, and is unfinished until its pin is dropped.
//! A row that leaves the index is tagged, after it was unlinked, with the newest number issued;
//! its slot is free once the oldest unfinished batch is newer than the tag. A later batch can no
//! longer find the row, an earlier one can no longer be reading it.
//!
//! **Why that holds.** A pin first claims a cell, then takes its number by a read-modify-write of
//! `issued`, then reads the index. An unlinker first removes the key, then takes its tag by a
//! read-modify-write of `issued`, then (it, or whoever it hands the tag to) reads the cells. The two
//! read-modify-writes are of one atomic, so one comes first and the other sees what preceded it:
//!
//! - pin first: number <= tag, and the claimed cell is visible to the reader of the cells, who
//!   therefore waits until the cell is free again; and sees it free only after all reads that the
//!   batch made, because a pin is dropped by a release store that the reader of the cells acquires;
//! - tag first: number > tag, and the removal is visible to the batch, which cannot find the row.
//!
//! No fence and no lock is needed, and a batch pays two stores and one addition.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock, PoisonError};

use super::index::{Location, Unlinked};
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering};

/// A cell that no batch holds.
const FREE: u64 = 0;
/// A cell whose batch has no number yet: older than every batch.
const CLAIMED: u64 = 1;
/// The number before that of the first batch.
const BEFORE_FIRST: u64 = 1;
/// Cells a block. Under loom few, because loom tracks each.
const CELLS: usize = if cfg!(flechette_loom) { 2 } else { 64 };

/// The numbers of the batches that are not finished.
#[derive(Debug)]
pub(crate) struct Epochs {
    issued: AtomicU64,
    cells: Block,
}

/// Some cells and, where they did not suffice once, more. Blocks are never taken away.
#[derive(Debug)]
struct Block {
    cells: [AtomicU64; CELLS],
    more: OnceLock<Box<Block>>,
}

impl Block {
    fn new() -> Self {
        Self { cells: std::array::from_fn(|_| AtomicU64::new(FREE)), more: OnceLock::new() }
    }
}

/// One batch's hold: no row that it may have found is overwritten until it is dropped.
#[derive(Debug)]
pub(crate) struct Pin<'a> {
    cell: &'a AtomicU64,
    number: u64,
}

impl Pin<'_> {
    /// The batch's number. Later pins have larger ones.
    #[must_use]
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.cell.store(FREE, Ordering::Release);
    }
}

/// A [`Pin`] that may outlive the call that made it: a batch's whose kernels are still under way.
#[derive(Debug)]
pub(crate) struct OwnedPin {
    epochs: Arc<Epochs>,
    /// The cell's place: its block, and where in it.
    cell: (usize, usize),
    number: u64,
}

impl OwnedPin {
    /// The batch's number. Later pins have larger ones.
    #[must_use]
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for OwnedPin {
    fn drop(&mut self) {
        let mut block = Some(&self.epochs.cells);
        for _ in 0..self.cell.0 {
            block = block.and_then(|b| b.more.get().map(|more| &**more));
        }
        // Always there: blocks are never taken away.
        if let Some(block) = block {
            block.cells[self.cell.1].store(FREE, Ordering::Release);
        }
    }
}

impl Default for Epochs {
    fn default() -> Self {
        Self { issued: AtomicU64::new(BEFORE_FIRST), cells: Block::new() }
    }
}

impl Epochs {
    /// Begins a batch. Never waits, however many are unfinished.
    #[must_use]
    pub(crate) fn pin(&self) -> Pin<'_> {
        let (cell, _) = self.claim();
        Pin { cell, number: self.number(cell) }
    }

    /// Begins a batch whose pin may be kept anywhere.
    #[must_use]
    pub(crate) fn pin_owned(self: &Arc<Self>) -> OwnedPin {
        let (cell, place) = self.claim();
        OwnedPin { epochs: self.clone(), cell: place, number: self.number(cell) }
    }

    /// Gives a claimed cell its number.
    fn number(&self, cell: &AtomicU64) -> u64 {
        let number = self.issued.fetch_add(1, Ordering::AcqRel) + 1;
        cell.store(number, Ordering::Release);
        number
    }

    fn claim(&self) -> (&AtomicU64, (usize, usize)) {
        let (mut block, mut blocks) = (&self.cells, 0);
        loop {
            for (i, cell) in block.cells.iter().enumerate() {
                let free = cell.load(Ordering::Relaxed) == FREE;
                // Acquire joins the batch before us to those whose end `oldest` must see.
                if free && cell.compare_exchange(FREE, CLAIMED, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                    return (cell, (blocks, i));
                }
            }
            block = block.more.get_or_init(|| Box::new(Block::new()));
            blocks += 1;
        }
    }

    /// The newest number issued: the tag of everything that was unlinked before this call.
    ///
    /// A read-modify-write, not a load: the module's argument rests on its place among the pins'.
    #[must_use]
    pub(crate) fn tag(&self) -> u64 {
        self.issued.fetch_add(0, Ordering::AcqRel)
    }

    /// The oldest unfinished batch, or `u64::MAX` where there is none. What was tagged below it,
    /// by this thread or by one that this thread has synchronised with since, is free.
    #[must_use]
    pub(crate) fn oldest(&self) -> u64 {
        let mut oldest = u64::MAX;
        let mut block = Some(&self.cells);
        while let Some(b) = block {
            for cell in &b.cells {
                match cell.load(Ordering::Acquire) {
                    FREE => {}
                    number => oldest = oldest.min(number),
                }
            }
            block = b.more.get().map(|more| &**more);
        }
        oldest
    }
}

/// How long unfinished batches are left before it is seen again whether they are.
const PATIENCE: std::time::Duration = std::time::Duration::from_micros(200);

impl Epochs {
    /// Waits until every batch that began before this call has finished. Not for a thread that has a pin itself.
    pub(crate) fn wait_for_earlier(&self) {
        let tag = self.tag();
        while self.oldest() <= tag {
            std::thread::sleep(PATIENCE);
        }
    }
}

/// A slot that is in no index and that no batch can read. Only [`RetireList`] makes these.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Freed(Location);

impl Freed {
    /// Which slot.
    #[must_use]
    pub(crate) fn location(&self) -> Location {
        self.0
    }
}

/// Unlinked slots that wait for batches to finish, each with its tag.
#[derive(Debug, Default)]
pub(crate) struct RetireList {
    queue: Mutex<Queue>,
    waiting: AtomicUsize,
}

#[derive(Debug, Default)]
struct Queue {
    slots: VecDeque<(u64, Location)>,
    /// Whether slots are found elsewhere than in the index, and so are not freed by their tags.
    held: bool,
}

impl RetireList {
    /// Puts a slot aside.
    pub(crate) fn put(&self, unlinked: Unlinked, epochs: &Epochs) {
        // The tag under the lock: either it comes after a release, or the release tags the slot anew. And tags
        // rise along the queue.
        let mut queue = self.queue();
        let tag = epochs.tag();
        queue.slots.push_back((tag, unlinked.location()));
        self.waiting.store(queue.slots.len(), std::sync::atomic::Ordering::Relaxed);
    }

    /// Frees nothing until [`Self::release`]: from now on batches may find slots that are, or will be, out of
    /// the index.
    pub(crate) fn hold(&self) {
        self.queue().held = true;
    }

    /// Nothing is found outside the index any more: all that waits is tagged anew, since a batch may have
    /// found it until now.
    pub(crate) fn release(&self, epochs: &Epochs) {
        let mut queue = self.queue();
        let tag = epochs.tag();
        queue.slots.iter_mut().for_each(|slot| slot.0 = tag);
        queue.held = false;
    }

    /// Hands out the slots that have become free. Returns how many still wait.
    pub(crate) fn reclaim(&self, epochs: &Epochs, free: impl FnMut(Freed)) -> usize {
        self.reclaim_some(epochs, usize::MAX, free)
    }

    /// Hands out up to `most` slots that have become free, those first that wait longest. Returns how many are
    /// left. Tags rise along the queue, so it is enough to look at the front.
    pub(crate) fn reclaim_some(&self, epochs: &Epochs, most: usize, mut free: impl FnMut(Freed)) -> usize {
        let mut queue = self.queue();
        if queue.slots.is_empty() || queue.held {
            return queue.slots.len();
        }
        // After the lock: it orders the cells' reading after the tags of all that is queued.
        let oldest = epochs.oldest();
        let mut left = most;
        while let Some(&(tag, location)) = queue.slots.front()
            && tag < oldest
            && left > 0
        {
            queue.slots.pop_front();
            free(Freed(location));
            left -= 1;
        }
        self.waiting.store(queue.slots.len(), std::sync::atomic::Ordering::Relaxed);
        queue.slots.len()
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many slots wait, as of a moment ago.
    #[must_use]
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(std::sync::atomic::Ordering::Relaxed)
    }
}

/// A host object that is replaced whole while others read it: crossbeam-epoch keeps what was replaced
/// until nobody reads it any more. A reading cannot leave its thread and holds memory back, so it lasts one
/// host call; a batch, which may end on a device, has a [`Pin`].
#[derive(Debug)]
pub(crate) struct Replaceable<T>(crossbeam_epoch::Atomic<T>);

impl<T: Send + Sync + 'static> Replaceable<T> {
    /// Begins with this object.
    pub(crate) fn new(object: T) -> Self {
        Self(crossbeam_epoch::Atomic::new(object))
    }

    /// Reads the object as it is now; never waits.
    pub(crate) fn read(&self) -> Reading<T> {
        let guard = crossbeam_epoch::pin();
        let object = self.0.load(Ordering::Acquire, &guard).as_raw();
        Reading { object, _guard: guard }
    }

    /// Replaces the object for everyone who reads it from now on.
    pub(crate) fn replace(&self, object: T) {
        let guard = crossbeam_epoch::pin();
        let old = self.0.swap(crossbeam_epoch::Owned::new(object), Ordering::AcqRel, &guard);
        // SAFETY: `old` came out of the swap, so no later reading finds it and nobody else retires it; it was
        // made by `Owned::new`. Readings that found it hold guards, until which it is kept.
        unsafe { guard.defer_destroy(old) };
        // To where any reader may free it: this thread may replace nothing more for long, and what it replaced may be
        // large.
        guard.flush();
    }
}

impl<T> Drop for Replaceable<T> {
    fn drop(&mut self) {
        let guard = crossbeam_epoch::pin();
        let last = self.0.swap(crossbeam_epoch::Shared::null(), Ordering::AcqRel, &guard);
        // SAFETY: by `&mut` nobody can begin a reading any more, so nobody finds `last` again; it was made by
        // `Owned::new`. A `Reading` that outlives us still has its guard, until which it is kept.
        unsafe { guard.defer_destroy(last) };
    }
}

/// An object while it is read.
#[derive(Debug)]
pub(crate) struct Reading<T> {
    object: *const T,
    _guard: crossbeam_epoch::Guard,
}

impl<T> std::ops::Deref for Reading<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: `object` was loaded from a `Replaceable` under the guard that stands beside it, is never
        // null while the `Replaceable` lives, and is destroyed no earlier than the guard is dropped.
        unsafe { &*self.object }
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;

#[cfg(test)]
#[cfg(flechette_loom)]
#[allow(unsafe_code)]
mod models;
