//! Batch pins: they decide when the memory of an evicted row may be reused (epoch-based reclamation, FLECHE
//! 4).
//!
//! Every batch takes a number when it is pinned, and is unfinished until its pin is dropped. After a row was
//! unlinked from the index, it is tagged with the newest number issued. Its slot is free once the oldest
//! unfinished batch is newer than the tag: later batches cannot find the row, and earlier batches no longer
//! read it.
//!
//! **Why that holds.** A pin first claims a cell, then takes its number by a read-modify-write of `issued`,
//! then reads the index. An unlinker first removes the key, then takes its tag by a read-modify-write of
//! `issued`, then reads the cells (or hands the tag to a thread that does). Both read-modify-writes are of
//! one atomic, so one is first, and the other sees what preceded it:
//!
//! - Pin first: number <= tag, and the claimed cell is visible to the reader of the cells, which waits until
//!   the cell is free again. It sees the cell free only after all reads of the batch, because a pin is
//!   dropped by a release store that the reader of the cells acquires.
//! - Tag first: number > tag, and the removal is visible to the batch, which cannot find the row.
//!
//! No fence and no lock is needed. A batch pays two stores and one addition.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock, PoisonError};

use super::index::{Location, Unlinked};
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering};

/// A cell that no batch uses.
const FREE: u64 = 0;
/// A cell whose batch has no number yet. It counts as older than every batch.
const CLAIMED: u64 = 1;
/// The number before the first batch's.
const BEFORE_FIRST: u64 = 1;
/// Cells per block. Under loom few, because loom tracks each.
const CELLS: usize = if cfg!(flechette_loom) { 2 } else { 64 };

/// The numbers of the unfinished batches.
#[derive(Debug)]
pub(crate) struct Epochs {
    issued: AtomicU64,
    cells: Block,
}

/// Some cells, and a further block once these did not suffice. Blocks are never removed.
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

/// A batch's pin: until it is dropped, no row that the batch may have found is overwritten.
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

/// A [`Pin`] that may outlive the call that made it, for a batch whose kernels are still running.
#[derive(Debug)]
pub(crate) struct OwnedPin {
    epochs: Arc<Epochs>,
    cell: CellId,
    number: u64,
}

impl OwnedPin {
    /// The batch's number. Later pins have larger ones.
    #[must_use]
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

/// A cell's block and its place there.
#[derive(Clone, Copy, Debug)]
struct CellId {
    block: usize,
    place: usize,
}

impl Drop for OwnedPin {
    fn drop(&mut self) {
        let mut block = Some(&self.epochs.cells);
        for _ in 0..self.cell.block {
            block = block.and_then(|b| b.more.get().map(|more| &**more));
        }
        // It exists: blocks are never removed.
        if let Some(block) = block {
            block.cells[self.cell.place].store(FREE, Ordering::Release);
        }
    }
}

impl Default for Epochs {
    fn default() -> Self {
        Self { issued: AtomicU64::new(BEFORE_FIRST), cells: Block::new() }
    }
}

impl Epochs {
    /// Pins a batch. Never waits, whatever the number of unfinished batches.
    #[must_use]
    pub(crate) fn pin(&self) -> Pin<'_> {
        let (cell, _) = self.claim();
        Pin { cell, number: self.number(cell) }
    }

    /// As [`Self::pin`], without borrowing.
    #[must_use]
    pub(crate) fn pin_owned(self: &Arc<Self>) -> OwnedPin {
        let (cell, id) = self.claim();
        OwnedPin { epochs: self.clone(), cell: id, number: self.number(cell) }
    }

    /// Gives a claimed cell its number.
    fn number(&self, cell: &AtomicU64) -> u64 {
        let number = self.issued.fetch_add(1, Ordering::AcqRel) + 1;
        cell.store(number, Ordering::Release);
        number
    }

    fn claim(&self) -> (&AtomicU64, CellId) {
        let (mut block, mut blocks) = (&self.cells, 0);
        loop {
            for (i, cell) in block.cells.iter().enumerate() {
                let free = cell.load(Ordering::Relaxed) == FREE;
                // Acquire orders the end of the cell's previous batch before this one, for `oldest`.
                if free && cell.compare_exchange(FREE, CLAIMED, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                    return (cell, CellId { block: blocks, place: i });
                }
            }
            block = block.more.get_or_init(|| Box::new(Block::new()));
            blocks += 1;
        }
    }

    /// The newest number issued: the tag for everything that was unlinked before this call.
    ///
    /// A read-modify-write instead of a load: the module's argument relies on its order among those of the
    /// pins.
    #[must_use]
    pub(crate) fn tag(&self) -> u64 {
        self.issued.fetch_add(0, Ordering::AcqRel)
    }

    /// The number of the oldest unfinished batch; `u64::MAX` if there is none. A slot with a smaller tag is
    /// free, if this thread made the tag or has synchronised with the thread that did.
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

/// The time between two checks whether batches have finished.
const PATIENCE: std::time::Duration = std::time::Duration::from_micros(200);

impl Epochs {
    /// Waits until every batch pinned before this call has finished. A thread that has a pin must not call
    /// it.
    pub(crate) fn wait_for_earlier(&self) {
        let tag = self.tag();
        while self.oldest() <= tag {
            std::thread::sleep(PATIENCE);
        }
    }
}

/// A slot that is not in the index and that no batch can read. Only [`RetireList`] creates it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Freed(Location);

impl Freed {
    #[must_use]
    pub(crate) fn location(&self) -> Location {
        self.0
    }
}

/// The retired slots: unlinked slots that wait for batches to finish, each with its tag.
#[derive(Debug, Default)]
pub(crate) struct RetireList {
    queue: Mutex<Queue>,
    waiting: AtomicUsize,
}

#[derive(Debug, Default)]
struct Queue {
    slots: VecDeque<(u64, Location)>,
    /// Whether batches may find slots outside the index, so that tags do not free them.
    held: bool,
}

impl RetireList {
    /// Retires a slot.
    pub(crate) fn put(&self, unlinked: Unlinked, epochs: &Epochs) {
        // The tag is taken under the lock: either it is after a release, or the release renews it. Also, tags
        // ascend along the queue.
        let mut queue = self.queue();
        let tag = epochs.tag();
        queue.slots.push_back((tag, unlinked.location()));
        self.waiting.store(queue.slots.len(), std::sync::atomic::Ordering::Relaxed);
    }

    /// Frees nothing until [`Self::release`]: from now on, batches may find unlinked slots outside the index.
    pub(crate) fn hold(&self) {
        self.queue().held = true;
    }

    /// Ends [`Self::hold`]: batches no longer find slots outside the index. All waiting slots get a new tag,
    /// since a batch may have found them until now.
    pub(crate) fn release(&self, epochs: &Epochs) {
        let mut queue = self.queue();
        let tag = epochs.tag();
        queue.slots.iter_mut().for_each(|slot| slot.0 = tag);
        queue.held = false;
    }

    /// Passes the slots that have become free to `free`. Returns how many still wait.
    pub(crate) fn reclaim(&self, epochs: &Epochs, free: impl FnMut(Freed)) -> usize {
        self.reclaim_some(epochs, usize::MAX, free)
    }

    /// As [`Self::reclaim`] for at most `most` slots, the longest waiting first. Tags ascend along the queue,
    /// so only its front is examined.
    pub(crate) fn reclaim_some(&self, epochs: &Epochs, most: usize, mut free: impl FnMut(Freed)) -> usize {
        let mut queue = self.queue();
        if queue.slots.is_empty() || queue.held {
            return queue.slots.len();
        }
        // After taking the lock, which orders reading the cells after all tags in the queue.
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

    /// How many slots wait; may be slightly out of date.
    #[must_use]
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(std::sync::atomic::Ordering::Relaxed)
    }
}

/// An object that is replaced as a whole while other threads read it. crossbeam-epoch keeps a replaced object
/// until no thread reads it. A [`Reading`] cannot leave its thread and delays freeing, so it lasts one call;
/// a batch, which may end on a device, uses a [`Pin`] instead.
#[derive(Debug)]
pub(crate) struct Replaceable<T>(crossbeam_epoch::Atomic<T>);

impl<T: Send + Sync + 'static> Replaceable<T> {
    pub(crate) fn new(object: T) -> Self {
        Self(crossbeam_epoch::Atomic::new(object))
    }

    /// Reads the current object. Never waits.
    pub(crate) fn read(&self) -> Reading<T> {
        let guard = crossbeam_epoch::pin();
        let object = self.0.load(Ordering::Acquire, &guard).as_raw();
        Reading { object, _guard: guard }
    }

    /// Replaces the object for later reads.
    pub(crate) fn replace(&self, object: T) {
        let guard = crossbeam_epoch::pin();
        let old = self.0.swap(crossbeam_epoch::Owned::new(object), Ordering::AcqRel, &guard);
        // SAFETY: `old` was returned by the swap, so no later reading finds it and no other thread retires
        // it; it was made by `Owned::new`. Readings that found it hold guards, which keep it.
        unsafe { guard.defer_destroy(old) };
        // Makes it available to be freed by any reader: this thread may not replace anything for long, and
        // the object may be large.
        guard.flush();
    }
}

impl<T> Drop for Replaceable<T> {
    fn drop(&mut self) {
        let guard = crossbeam_epoch::pin();
        let last = self.0.swap(crossbeam_epoch::Shared::null(), Ordering::AcqRel, &guard);
        // SAFETY: by `&mut` no new reading can begin, so `last` is not found again; it was made by
        // `Owned::new`. A `Reading` that outlives `self` still has its guard, which keeps it.
        unsafe { guard.defer_destroy(last) };
    }
}

/// Read access to an object.
#[derive(Debug)]
pub(crate) struct Reading<T> {
    object: *const T,
    _guard: crossbeam_epoch::Guard,
}

impl<T> std::ops::Deref for Reading<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: `object` was loaded from a `Replaceable` under `_guard`, is never null while the
        // `Replaceable` lives, and is destroyed no earlier than the guard is dropped.
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
