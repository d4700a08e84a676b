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
pub struct Epochs {
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
pub struct Pin<'a> {
    cell: &'a AtomicU64,
    number: u64,
}

impl Pin<'_> {
    /// The batch's number. Later pins have larger ones.
    #[must_use]
    pub fn number(&self) -> u64 {
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
pub struct OwnedPin {
    epochs: Arc<Epochs>,
    /// The cell's place: its block, and where in it.
    cell: (usize, usize),
    number: u64,
}

impl OwnedPin {
    /// The batch's number. Later pins have larger ones.
    #[must_use]
    pub fn number(&self) -> u64 {
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
    pub fn pin(&self) -> Pin<'_> {
        let (cell, _) = self.claim();
        Pin { cell, number: self.number(cell) }
    }

    /// Begins a batch whose pin may be kept anywhere.
    #[must_use]
    pub fn pin_owned(self: &Arc<Self>) -> OwnedPin {
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
    pub fn tag(&self) -> u64 {
        self.issued.fetch_add(0, Ordering::AcqRel)
    }

    /// The oldest unfinished batch, or `u64::MAX` where there is none. What was tagged below it,
    /// by this thread or by one that this thread has synchronised with since, is free.
    #[must_use]
    pub fn oldest(&self) -> u64 {
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
    pub fn wait_for_earlier(&self) {
        let tag = self.tag();
        while self.oldest() <= tag {
            std::thread::sleep(PATIENCE);
        }
    }
}

/// A slot that is in no index and that no batch can read. Only [`Limbo`] makes these.
#[derive(Debug, PartialEq, Eq)]
pub struct Freed(Location);

impl Freed {
    /// Which slot.
    #[must_use]
    pub fn location(&self) -> Location {
        self.0
    }
}

/// Unlinked slots that wait for batches to finish, each with its tag.
#[derive(Debug, Default)]
pub struct Limbo {
    queue: Mutex<Queue>,
    waiting: AtomicUsize,
}

#[derive(Debug, Default)]
struct Queue {
    slots: VecDeque<(u64, Location)>,
    /// Whether slots are found elsewhere than in the index, and so are not freed by their tags.
    held: bool,
}

impl Limbo {
    /// Puts a slot aside.
    pub fn put(&self, unlinked: Unlinked, epochs: &Epochs) {
        // The tag under the lock: either it comes after a release, or the release tags the slot anew. And tags
        // rise along the queue.
        let mut queue = self.queue();
        let tag = epochs.tag();
        queue.slots.push_back((tag, unlinked.location()));
        self.waiting.store(queue.slots.len(), std::sync::atomic::Ordering::Relaxed);
    }

    /// Frees nothing until [`Self::release`]: from now on batches may find slots that are, or will be, out of
    /// the index.
    pub fn hold(&self) {
        self.queue().held = true;
    }

    /// Nothing is found outside the index any more: all that waits is tagged anew, since a batch may have
    /// found it until now.
    pub fn release(&self, epochs: &Epochs) {
        let mut queue = self.queue();
        let tag = epochs.tag();
        queue.slots.iter_mut().for_each(|slot| slot.0 = tag);
        queue.held = false;
    }

    /// Hands out the slots that have become free. Returns how many still wait.
    pub fn reclaim(&self, epochs: &Epochs, free: impl FnMut(Freed)) -> usize {
        self.reclaim_some(epochs, usize::MAX, free)
    }

    /// Hands out up to `most` slots that have become free, those first that wait longest. Returns how many are
    /// left. Tags rise along the queue, so it is enough to look at the front.
    pub fn reclaim_some(&self, epochs: &Epochs, most: usize, mut free: impl FnMut(Freed)) -> usize {
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
    pub fn waiting(&self) -> usize {
        self.waiting.load(std::sync::atomic::Ordering::Relaxed)
    }
}

/// A host object that is replaced whole while others read it: crossbeam-epoch keeps what was replaced
/// until nobody reads it any more. A reading cannot leave its thread and holds memory back, so it lasts one
/// host call; a batch, which may end on a device, has a [`Pin`].
#[derive(Debug)]
pub struct Replaceable<T>(crossbeam_epoch::Atomic<T>);

impl<T: Send + Sync + 'static> Replaceable<T> {
    /// Begins with this object.
    pub fn new(object: T) -> Self {
        Self(crossbeam_epoch::Atomic::new(object))
    }

    /// Reads the object as it is now; never waits.
    pub fn read(&self) -> Reading<T> {
        let guard = crossbeam_epoch::pin();
        let object = self.0.load(Ordering::Acquire, &guard).as_raw();
        Reading { object, _guard: guard }
    }

    /// Replaces the object for everyone who reads it from now on.
    pub fn replace(&self, object: T) {
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
pub struct Reading<T> {
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
mod tests {
    use super::*;

    #[test]
    fn an_object_is_kept_while_it_is_read_and_dropped_afterwards() {
        let drops = std::sync::Arc::new(());
        let object = Replaceable::new((1, drops.clone()));
        let reading = object.read();
        for i in 2..2000 {
            object.replace((i, drops.clone()));
            assert_eq!((reading.0, object.read().0), (1, i));
        }
        drop(reading);
        drop(object);
        // Whoever pins next collects: nothing is left but by a bounded delay.
        for _ in 0..10_000 {
            crossbeam_epoch::pin().flush();
        }
        assert_eq!(std::sync::Arc::strong_count(&drops), 1);
    }

    #[test]
    fn what_was_replaced_is_freed_by_those_who_read_on() {
        let drops = std::sync::Arc::new(());
        let object = Replaceable::new(drops.clone());
        object.replace(std::sync::Arc::default());
        for _ in 0..100_000 {
            std::thread::yield_now();
            drop(object.read());
            if std::sync::Arc::strong_count(&drops) == 1 {
                return;
            }
        }
        panic!("it is kept though nobody reads it");
    }

    #[test]
    fn held_slots_are_freed_only_by_batches_that_begin_after_the_release() {
        let (epochs, limbo) = (Epochs::default(), Limbo::default());
        limbo.hold();
        limbo.put(Unlinked::withdrawn(crate::types::FlatKey(9), Location::slot(5)), &epochs);
        let between = epochs.pin();
        let mut freed = 0;
        assert_eq!(limbo.reclaim(&epochs, |_| freed += 1), 1, "held");
        limbo.release(&epochs);
        assert_eq!(limbo.reclaim(&epochs, |_| freed += 1), 1, "a batch began before the release");
        drop(between);
        assert_eq!(limbo.reclaim(&epochs, |_| freed += 1), 0);
        assert_eq!(freed, 1);
    }

    #[test]
    fn no_more_slots_are_freed_at_once_than_asked_for_and_in_the_order_they_came() {
        let (epochs, limbo) = (Epochs::default(), Limbo::default());
        let put =
            |slot| limbo.put(Unlinked::withdrawn(crate::types::FlatKey(9), Location::slot(slot)), &epochs);
        (0..10).for_each(put);
        let mut freed = Vec::new();
        for (most, left) in [(0, 10), (3, 7), (1, 6)] {
            assert_eq!(limbo.reclaim_some(&epochs, most, |slot| freed.push(slot.location().offset())), left);
        }
        let pin = epochs.pin();
        put(10);
        assert_eq!(limbo.reclaim(&epochs, |slot| freed.push(slot.location().offset())), 1, "the pin's");
        drop(pin);
        assert_eq!(limbo.reclaim(&epochs, |slot| freed.push(slot.location().offset())), 0);
        assert_eq!(freed, (0..11).collect::<Vec<_>>());
    }

    #[test]
    fn a_tag_is_free_when_every_batch_up_to_it_is_finished() {
        let epochs = Epochs::default();
        let first = epochs.pin();
        let second = epochs.pin();
        let tag = epochs.tag();
        let third = epochs.pin();
        assert_eq!(tag, second.number());
        assert!(epochs.oldest() <= tag);
        drop(first);
        assert!(epochs.oldest() <= tag);
        drop(second);
        assert!(epochs.oldest() > tag, "the third batch is newer than the tag");
        assert_eq!(epochs.oldest(), third.number());
        drop(third);
        assert_eq!(epochs.oldest(), u64::MAX);
    }

    #[test]
    fn an_owned_pin_is_seen_until_it_is_dropped_wherever_that_is() {
        let epochs = Arc::new(Epochs::default());
        let mut pins: Vec<_> = (0..2 * CELLS + 1).map(|_| epochs.pin_owned()).collect();
        while !pins.is_empty() {
            assert_eq!(epochs.oldest(), pins[0].number());
            let first = pins.remove(0);
            std::thread::spawn(move || drop(first)).join().unwrap();
        }
        assert_eq!(epochs.oldest(), u64::MAX);
        drop(epochs.pin());
        assert_eq!(epochs.oldest(), u64::MAX, "its cell serves others");
    }

    #[test]
    fn more_pins_than_one_block_has_cells_are_all_seen() {
        let epochs = Epochs::default();
        let mut pins: Vec<_> = (0..3 * CELLS + 1).map(|_| epochs.pin()).collect();
        assert!(pins.windows(2).all(|w| w[0].number() < w[1].number()));
        while !pins.is_empty() {
            assert_eq!(epochs.oldest(), pins[0].number());
            pins.remove(0);
        }
        assert_eq!(epochs.oldest(), u64::MAX);
    }
}

#[cfg(test)]
#[cfg(flechette_loom)]
#[allow(unsafe_code)]
mod models {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    /// One slot and its link. The batch reads the slot if it finds the link; the evictor unlinks,
    /// tags, and overwrites the slot if the tag is free. loom fails the model on a data race.
    #[test]
    fn a_slot_is_never_overwritten_under_a_batch_that_found_it() {
        loom::model(|| {
            let epochs = Arc::new(Epochs::default());
            let link = Arc::new(AtomicU64::new(1));
            let slot = Arc::new(UnsafeCell::new(7u64));
            let batch = {
                let (epochs, link, slot) = (epochs.clone(), link.clone(), slot.clone());
                loom::thread::spawn(move || {
                    let pin = epochs.pin();
                    if link.load(Ordering::Acquire) == 1 {
                        // SAFETY: the model's claim: no write while the pin lives; loom checks it.
                        assert_eq!(slot.with(|s| unsafe { *s }), 7);
                    }
                    drop(pin);
                })
            };
            link.store(0, Ordering::Release);
            let tag = epochs.tag();
            if epochs.oldest() > tag {
                // SAFETY: as above.
                slot.with_mut(|s| unsafe { *s = 8 });
            }
            batch.join().unwrap();
        });
    }

    /// The same with a cell that passes from one batch to the next.
    #[test]
    fn a_cell_taken_over_still_orders_the_batch_before() {
        loom::model(|| {
            let epochs = Arc::new(Epochs::default());
            let link = Arc::new(AtomicU64::new(1));
            let slot = Arc::new(UnsafeCell::new(7u64));
            let batches = {
                let (epochs, link, slot) = (epochs.clone(), link.clone(), slot.clone());
                loom::thread::spawn(move || {
                    for _ in 0..2 {
                        let _pin = epochs.pin();
                        if link.load(Ordering::Acquire) == 1 {
                            // SAFETY: as above.
                            assert_eq!(slot.with(|s| unsafe { *s }), 7);
                        }
                    }
                })
            };
            link.store(0, Ordering::Release);
            let tag = epochs.tag();
            if epochs.oldest() > tag {
                // SAFETY: as above.
                slot.with_mut(|s| unsafe { *s = 8 });
            }
            batches.join().unwrap();
        });
    }

    /// The slot of a version's overlay (`version.rs`) is linked, evicted and, once it may be, overwritten, while
    /// a batch finds it in the overlay. loom fails the model on a data race.
    #[test]
    fn a_slot_of_the_overlay_is_not_overwritten_under_a_batch_though_the_index_evicts_it() {
        loom::model(|| {
            let shared = Arc::new((Epochs::default(), Limbo::default(), AtomicU64::new(1)));
            let slot = Arc::new(UnsafeCell::new(7u64));
            shared.1.hold();
            let batch = {
                let (shared, slot) = (shared.clone(), slot.clone());
                loom::thread::spawn(move || {
                    let (epochs, _, current) = &*shared;
                    let pin = epochs.pin();
                    if current.load(Ordering::Acquire) == 1 {
                        // SAFETY: the model's claim: no write while the pin lives; loom checks it.
                        assert_eq!(slot.with(|s| unsafe { *s }), 7);
                    }
                    drop(pin);
                })
            };
            let (epochs, limbo, current) = &*shared;
            limbo.put(Unlinked::withdrawn(crate::types::FlatKey(2), Location::slot(0)), epochs);
            let reuse = |_| {
                // SAFETY: as above.
                slot.with_mut(|s| unsafe { *s = 8 });
            };
            limbo.reclaim(epochs, reuse);
            current.swap(0, Ordering::AcqRel);
            limbo.release(epochs);
            limbo.reclaim(epochs, reuse);
            batch.join().unwrap();
        });
    }

    /// An evictor puts a slot of the overlay aside while the switcher withdraws the overlay: whichever comes first, the
    /// slot has a tag of after the withdrawal. loom fails the model on a data race.
    #[test]
    fn a_slot_put_aside_while_the_overlay_is_withdrawn_is_not_overwritten_under_a_batch() {
        loom::model(|| {
            let shared = Arc::new((Epochs::default(), Limbo::default(), AtomicU64::new(1)));
            let slot = Arc::new(UnsafeCell::new(7u64));
            shared.1.hold();
            let batch = {
                let (shared, slot) = (shared.clone(), slot.clone());
                loom::thread::spawn(move || {
                    let (epochs, _, current) = &*shared;
                    let pin = epochs.pin();
                    if current.load(Ordering::Acquire) == 1 {
                        // SAFETY: the model's claim: no write while the pin lives; loom checks it.
                        assert_eq!(slot.with(|s| unsafe { *s }), 7);
                    }
                    drop(pin);
                })
            };
            let evictor = {
                let shared = shared.clone();
                loom::thread::spawn(move || {
                    let (epochs, limbo, _) = &*shared;
                    limbo.put(Unlinked::withdrawn(crate::types::FlatKey(2), Location::slot(0)), epochs);
                })
            };
            let (epochs, limbo, current) = &*shared;
            current.swap(0, Ordering::AcqRel);
            limbo.release(epochs);
            evictor.join().unwrap();
            limbo.reclaim(epochs, |_| {
                // SAFETY: as above.
                slot.with_mut(|s| unsafe { *s = 8 });
            });
            batch.join().unwrap();
        });
    }
}
