//! The pool: one allocation in host memory for rows of several sizes. `slots` decides which slots are free.
//!
//! **Access to a slot's bytes.** `take` gives a [`Slot`] to one owner. Only the owner may write it
//! ([`Pool::fill`], by `&mut`), until its location is linked in the index and the `Slot` is dropped. From
//! then on the bytes are only read, through a location that was found ([`PinnedLocation`]). When the location
//! was unlinked and no batch can read it any more ([`Freed`]), [`Pool::free`] frees it.

#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;

use memmap2::MmapRaw;

use super::epoch::Freed;
use super::index::{Location, PinnedLocation};
use crate::mem::{Pages, WORD_BYTES, huge_pages};

pub(crate) use super::slabs::{Class, SlabShape, Slot, SlotAllocator};

/// Freed slots are filled with this if `debug_assertions` are on: a NaN that arithmetic does not produce.
pub(crate) const POISON: u32 = 0x7FC0_DEAD;

/// The memory of the rows, and its allocator.
#[derive(Debug)]
pub(crate) struct Pool {
    slots: SlotAllocator,
    memory: Pages<MmapRaw>,
}

impl Pool {
    /// Allocates the memory; all slots are free.
    ///
    /// # Errors
    /// When the allocation fails.
    pub(crate) fn new(shape: SlabShape) -> io::Result<Self> {
        let memory = huge_pages(shape.data_bytes())?;
        Ok(Self { slots: SlotAllocator::new(shape), memory })
    }

    /// Gets the memory from the system now.
    pub(crate) fn prefault(&self) {
        self.memory.prefault();
    }

    pub(crate) fn shape(&self) -> &SlabShape {
        self.slots.shape()
    }

    /// As [`SlotAllocator::take`].
    pub(crate) fn take(&self, class: Class) -> Option<Slot> {
        self.slots.take(class)
    }

    /// As [`SlotAllocator::take_each`].
    pub(crate) fn take_each(&self, classes: impl Iterator<Item = Class>) -> Vec<Option<Slot>> {
        self.slots.take_each(classes)
    }

    pub(crate) fn slots(&self) -> &SlotAllocator {
        &self.slots
    }

    /// Copies a tag and a row into an unpublished slot. Together they are as long as the slot.
    pub(crate) fn fill(&self, slot: &mut Slot, tag: &[u8], row: &[u8]) {
        assert_eq!(tag.len() + row.len(), slot.bytes(), "tag and row must fill the slot");
        let start = self.start(slot.location(), slot.bytes());
        // SAFETY: in bounds by the assertions. `slot` came from `take`: `Shared`, which owns the pool, has no
        // other slots. So no other thread accesses these bytes: slots do not overlap, this one is marked as
        // taken, and its location is not published while the `Slot` lives. Readers of other slots hold slices
        // of those bytes only; no reference to the whole allocation exists. Sources and slot cannot overlap,
        // since a reference into the pool never covers an unpublished slot.
        unsafe {
            start.copy_from_nonoverlapping(NonNull::from(tag).cast(), tag.len());
            start.add(tag.len()).copy_from_nonoverlapping(NonNull::from(row).cast(), row.len());
        }
    }

    /// The tag of a published slot that has a tag.
    #[inline]
    pub(crate) fn tag(&self, pinned: PinnedLocation<'_>) -> u64 {
        bytemuck::pod_read_unaligned(self.row(pinned, 0, size_of::<u64>()))
    }

    /// The `bytes` bytes of a published slot from `from` on, aligned to 4 if `from` is. `from + bytes` is at
    /// most the slot's length, which the caller knows from the table.
    #[inline]
    pub(crate) fn row<'a>(&'a self, pinned: PinnedLocation<'a>, from: usize, bytes: usize) -> &'a [u8] {
        assert!(!pinned.location().is_pointer(), "the row must be in the pool");
        let start = self.start(pinned.location(), from + bytes);
        // SAFETY: in bounds by the assertion of `start`; initialised, since pages begin as zeros. Only unsafe
        // functions make a `PinnedLocation`, and they require that it was found in an index or in a version's
        // overlay. It is a slot of this pool: `Shared`, which owns the pool and one index, links only host
        // rows and slots that it took from this pool, and passes here only what its own index or overlay has.
        // So the slot was filled before it was published there, and its location was read by an acquire. `'a`
        // ends before the pin is dropped or the bucket's lock is released. Until then `RetireList` does not
        // free the slot, and only `free`, or `fill` after a later `take`, would write there.
        let slot = unsafe { std::slice::from_raw_parts(start.as_ptr(), from + bytes) };
        &slot[from..]
    }

    /// Frees a slot that was unlinked and that no batch can read.
    pub(crate) fn free(&self, slot: Freed) {
        // SAFETY: `Freed` comes from the cache's `RetireList`, which guarantees that no batch can read the
        // slot. Each slot is put there once, when it is no longer in the index: the index reports an entry
        // when it unlinks it, and a switch adds the slots of its overlay that it could not link.
        unsafe { self.release(slot.location()) };
    }

    /// Frees a slot.
    ///
    /// # Safety
    /// `location` belongs to a slot that was taken from this pool and not freed since. It is not in the
    /// index, and no batch can read it.
    unsafe fn release(&self, location: Location) {
        if cfg!(debug_assertions) {
            let bytes = self.slots.bytes_at(location);
            let start = self.start(location, bytes).cast::<u32>();
            for i in 0..bytes / WORD_BYTES {
                // SAFETY: in bounds by the assertion of `start`, and aligned, since offsets are in words.
                // No other thread accesses the slot, by the caller's guarantee.
                unsafe { start.add(i).write(POISON) };
            }
        }
        self.slots.give_back(location);
    }

    /// Frees a slot that was never published.
    pub(crate) fn put_back(&self, slot: Slot) {
        // SAFETY: `slot` came from `take` and is consumed; it was never in the index.
        unsafe { self.release(slot.location()) };
    }

    /// Returns a test whether a slot is in a slab that was draining at the time of this call.
    pub(crate) fn draining(&self) -> impl Fn(Location) -> bool {
        let states = self.slots.draining();
        let slab_units = (self.shape().slab_bytes / WORD_BYTES) as u64;
        move |location| states[(location.offset() / slab_units) as usize]
    }

    /// The address of a slot.
    ///
    /// # Panics
    /// When `bytes` bytes from there do not lie within the pool.
    #[inline]
    fn start(&self, location: Location, bytes: usize) -> NonNull<u8> {
        let offset = location.offset() as usize * WORD_BYTES;
        assert!(offset + bytes <= self.shape().data_bytes(), "the slot must end within the pool");
        // SAFETY: in bounds by the assertion: the memory has `data_bytes` bytes, and is not at null.
        unsafe { NonNull::new_unchecked(self.memory.as_mut_ptr().add(offset)) }
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
