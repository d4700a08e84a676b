//! Batch pins: they decide when the memory of an evicted row may be reused (epoch-based reclamation, FLECHE
//! section 4).
//!
//! Every batch takes a number when it is pinned, and is unfinished until its pin is dropped. After a row was
//! unlinked from the index, it is tagged with the newest number issued. Its slot is free once every
//! unfinished batch has a number above the tag: these batches cannot find the row, and all others have
//! finished.
//!
//! **Why that holds.** A pin first claims a cell, then takes its number by a read-modify-write of `issued`,
//! then reads the index. An unlinker first removes the key, then takes its tag by a read-modify-write of
//! `issued`, then reads the cells (or hands the tag to a thread that does). Both read-modify-writes are on
//! the same atomic. So one of them is first, and the thread of the second sees what the first thread did
//! before:
//!
//! - Pin first: number <= tag, and the thread that reads the cells sees the claimed cell. It frees the slot
//!   only when it sees the cell free or with a number above the tag. By then all reads of the batch are done,
//!   because a pin is dropped by a release store that the reader of the cells acquires.
//! - Tag first: number > tag, and the removal is visible to the batch, which cannot find the row.
//!
//! No fence and no lock is needed. A batch pays one compare-exchange, one addition and two stores.

mod replaceable;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::index::{Location, Unlinked};
use crate::sync::{AtomicU64, EvenPoisoned, Mutex, MutexGuard, Ordering, nap};

pub(crate) use replaceable::Replaceable;

/// A cell that no batch uses.
const FREE: u64 = 0;
/// A cell whose batch has no number yet. It counts as older than every batch.
const CLAIMED: u64 = 1;
/// The initial value of `issued`. The first batch gets the next number.
const BEFORE_FIRST: u64 = 1;
/// Cells per block. Few under loom, because loom tracks each cell.
const CELLS: usize = if cfg!(flechette_loom) { 2 } else { 64 };

/// The numbers of the unfinished batches.
#[derive(Debug)]
pub(crate) struct Epochs {
    issued: AtomicU64,
    cells: Block,
}

/// Some cells, and a further block that is added when all of them are in use. Blocks are never removed.
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
        // The block exists, since blocks are never removed.
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
                // Acquire: a thread that sees this batch's number in `oldest` must also see that the cell's
                // previous batch has ended.
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
    /// This is a read-modify-write and not a load, because the module's argument relies on its order among
    /// the read-modify-writes of the pins.
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

/// The time between two checks whether batches have dropped their pins.
const PIN_POLL: Duration = Duration::from_micros(200);

/// How often a wait without a limit says that it goes on.
const SAID_EVERY: Duration = Duration::from_secs(10);

/// Waits for batches. A thread that has a pin must not wait, because it would wait for itself.
impl Epochs {
    /// Waits until every batch pinned before this call has finished. There is no limit, because a batch that
    /// does not end may still read the rows that it has found; after some seconds the log says so.
    pub(crate) fn wait_for_earlier(&self) {
        let Ok(()) = self.wait_for_earlier_while(|| Ok::<(), Infallible>(()));
    }

    /// As [`Self::wait_for_earlier`], but waits at most this long. Returns whether they have finished.
    pub(crate) fn earlier_end_within(&self, limit: Duration) -> bool {
        let Ok(ended) = self.earlier_end_within_while(limit, || Ok::<(), Infallible>(()));
        ended
    }

    /// As [`Self::wait_for_earlier`]. An error of `go_on`, which is asked meanwhile, ends the wait.
    pub(crate) fn wait_for_earlier_while<E>(
        &self,
        mut go_on: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        // One tag for the whole wait: batches that begin meanwhile are not waited for.
        let (tag, begun) = (self.tag(), Instant::now());
        while !self.end_up_to(tag, SAID_EVERY, &mut go_on)? {
            let seconds = begun.elapsed().as_secs();
            tracing::warn!(seconds, "the cache waits for a batch that does not end");
        }
        Ok(())
    }

    /// As [`Self::earlier_end_within`]. An error of `go_on`, which is asked meanwhile, ends the wait.
    pub(crate) fn earlier_end_within_while<E>(
        &self,
        limit: Duration,
        go_on: impl FnMut() -> Result<(), E>,
    ) -> Result<bool, E> {
        self.end_up_to(self.tag(), limit, go_on)
    }

    /// Waits at most this long until the batches whose number is at most the tag have finished.
    fn end_up_to<E>(
        &self,
        tag: u64,
        limit: Duration,
        mut go_on: impl FnMut() -> Result<(), E>,
    ) -> Result<bool, E> {
        let until = Instant::now() + limit;
        while self.oldest() <= tag {
            go_on()?;
            if Instant::now() >= until {
                return Ok(false);
            }
            nap(PIN_POLL);
        }
        Ok(true)
    }
}

/// A slot that is not in the index and that no batch can read. Only [`RetireList`] creates this type.
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

/// A slot that batches with an earlier tag may read.
#[derive(Clone, Copy, Debug)]
struct RetiredSlot {
    tag: u64,
    location: Location,
}

#[derive(Debug, Default)]
struct Queue {
    slots: VecDeque<RetiredSlot>,
    /// Set while batches may find slots in a version's overlay. Then no slot is freed, whatever its tag.
    held: bool,
}

impl RetireList {
    /// Retires a slot.
    pub(crate) fn put(&self, unlinked: Unlinked, epochs: &Epochs) {
        // The tag is taken under the queue's lock. So tags ascend along the queue, and a concurrent `release`
        // either has ended before or renews this tag.
        let mut queue = self.queue();
        let tag = epochs.tag();
        queue.slots.push_back(RetiredSlot { tag, location: unlinked.location() });
        self.waiting.store(queue.slots.len(), std::sync::atomic::Ordering::Relaxed);
    }

    /// Frees nothing until [`Self::release`]: from now on, batches may find unlinked slots in an overlay.
    pub(crate) fn hold(&self) {
        self.queue().held = true;
    }

    /// Ends [`Self::hold`]: batches no longer find slots in an overlay. All waiting slots get a new tag,
    /// because a batch may have found them until now.
    pub(crate) fn release(&self, epochs: &Epochs) {
        let mut queue = self.queue();
        let tag = epochs.tag();
        queue.slots.iter_mut().for_each(|slot| slot.tag = tag);
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
        // Called under the lock, so that the cells are read after all tags in the queue were made.
        let oldest = epochs.oldest();
        let mut left = most;
        while let Some(&RetiredSlot { tag, location }) = queue.slots.front()
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
        self.queue.lock().even_poisoned()
    }

    /// How many slots wait. The number may be slightly out of date.
    #[must_use]
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(std::sync::atomic::Ordering::Relaxed)
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;

#[cfg(test)]
#[cfg(flechette_loom)]
#[allow(unsafe_code)]
mod models;
