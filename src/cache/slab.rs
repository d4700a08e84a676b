//! The pool: one allocation of rows of several sizes.
//!
//! Which slots are free is `slots`' affair; this is their memory on the host.
//!
//! **Who may touch a slot's bytes.** `take` hands a [`Slot`] to one owner, who alone may write it
//! ([`Pool::fill`], by `&mut`) until its location is linked in the index and the `Slot` is gone.
//! From then on the bytes are only read, through what the index found ([`Held`]). When the location has
//! left the index and no batch can read it any more ([`Freed`]), [`Pool::free`] takes it back.

#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;

use memmap2::MmapRaw;

use super::epoch::Freed;
use super::index::{Held, Location};
use super::slots::UNIT;
use crate::mem::huge_pages;

pub(crate) use super::slots::{Class, SlabShape, Slot, Slots};

/// What freed slots hold where `debug_assertions` are on: a NaN that no arithmetic makes.
pub(crate) const POISON: u32 = 0x7FC0_DEAD;

/// The memory of the rows.
#[derive(Debug)]
pub(crate) struct Pool {
    slots: Slots,
    memory: MmapRaw,
}

impl Pool {
    /// Takes the memory, all of it free.
    ///
    /// # Errors
    /// The system's, where it refuses the memory.
    pub(crate) fn new(shape: SlabShape) -> io::Result<Self> {
        let memory = huge_pages(shape.data_bytes())?;
        Ok(Self { slots: Slots::new(shape), memory: memory.into() })
    }

    /// The pool's sizes.
    pub(crate) fn shape(&self) -> &SlabShape {
        self.slots.shape()
    }

    /// As [`Slots::take`].
    pub(crate) fn take(&self, class: Class) -> Option<Slot> {
        self.slots.take(class)
    }

    /// Which slots are free.
    pub(crate) fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Copies a tag and a row into a slot that is not published. Together they must be as long as the slot.
    pub(crate) fn fill(&self, slot: &mut Slot, tag: &[u8], row: &[u8]) {
        assert_eq!(tag.len() + row.len(), slot.bytes(), "a row of its slot's size");
        let start = self.start(slot.location());
        // SAFETY: `slot` was made by `take`, so `start..start + bytes` lies in the allocation. Nobody else
        // accesses these bytes: slots do not overlap, the bit of this one is taken, and its location is
        // published nowhere while the `Slot` lives. Readers of other slots hold slices of those bytes only; no
        // reference to the whole allocation exists. Sources and slot cannot overlap, since a reference
        // into the pool never covers an unpublished slot.
        unsafe {
            start.copy_from_nonoverlapping(NonNull::from(tag).cast(), tag.len());
            start.add(tag.len()).copy_from_nonoverlapping(NonNull::from(row).cast(), row.len());
        }
    }

    /// The tag of a published row that has one.
    #[inline]
    pub(crate) fn tag(&self, held: Held<'_>) -> u64 {
        bytemuck::pod_read_unaligned(self.row(held, 0, size_of::<u64>()))
    }

    /// `bytes` of a published slot from `from` on; they begin on a multiple of 4 where `from` does. How long
    /// a slot is, its key's table says.
    #[inline]
    pub(crate) fn row<'a>(&'a self, held: Held<'a>, from: usize, bytes: usize) -> &'a [u8] {
        assert!(!held.location().is_host(), "a row in the pool");
        let offset = held.location().offset() as usize * UNIT;
        assert!(offset + from + bytes <= self.shape().data_bytes(), "a row within the pool");
        // SAFETY: in bounds by the assertion; initialised, since pages begin as zeros. `held` was found in
        // the index or in a version's overlay, hence filled before it was published there and seen by an
        // acquire; until its pin ends, or the bucket's lock is given back, which outlives `'a`, `RetireList` does not free
        // the slot, and nothing but `free` and the `fill` of a slot taken after it writes there.
        unsafe { std::slice::from_raw_parts(self.start(held.location()).add(from).as_ptr(), bytes) }
    }

    /// Takes back a slot that was unlinked and outlasted its readers.
    pub(crate) fn free(&self, slot: Freed) {
        // SAFETY: what `Freed` stands for.
        unsafe { self.release(slot.location()) };
    }

    /// Takes a slot back.
    ///
    /// # Safety
    /// `location` is of a slot taken from this pool and not freed since; it is in no index and no
    /// batch can read it any more.
    unsafe fn release(&self, location: Location) {
        if cfg!(debug_assertions) {
            let start = self.start(location).cast::<u32>();
            for i in 0..self.slots.bytes_at(location) / UNIT {
                // SAFETY: in bounds as in `fill`; nobody else accesses the slot, by the caller's promise.
                unsafe { start.add(i).write(POISON) };
            }
        }
        self.slots.give_back(location);
    }

    /// Gives back a slot that was never published.
    pub(crate) fn put_back(&self, slot: Slot) {
        // SAFETY: `slot` came from `take` and is consumed; it was in no index.
        unsafe { self.release(slot.location()) };
    }

    /// Whether a slot lies in a slab that is to be emptied.
    pub(crate) fn draining(&self) -> impl Fn(Location) -> bool {
        let states = self.slots.draining();
        let slab_units = (self.shape().slab_bytes / UNIT) as u64;
        move |location| states[(location.offset() / slab_units) as usize]
    }

    fn start(&self, location: Location) -> NonNull<u8> {
        let offset = location.offset() as usize * UNIT;
        debug_assert!(offset < self.shape().data_bytes());
        // SAFETY: locations are made by `take` alone, below the allocation's end.
        unsafe { NonNull::new_unchecked(self.memory.as_mut_ptr().add(offset)) }
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
