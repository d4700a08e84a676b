//! Slots of rows that several threads read and write at once, each of them slots of its own: the memory of a
//! trainer's scratchpad on the host.
//!
//! Who may touch which slot when is for the trainer's plan to say, far from here. So that a fault in it can corrupt a
//! row but never memory, nobody touches a slot without a [`Claim`], and a claim is given only while no other has any of
//! its slots ([`crate::trainer::pipeline::slot_flags`]).
#![allow(unsafe_code)]

use crate::compute::gather_pool::rows_ahead;
use crate::compute::simd::copy_past_caches;
use crate::mem::prefetch::{prefetch, prefetch_line};
use crate::mem::{HostBlock, HostMemory, OutOfHostMemory};
use crate::trainer::pipeline::slot_flags::{Held, SlotFlags};
pub(crate) use crate::trainer::pipeline::slot_flags::{NO_SLOT, NotClaimed};

/// `count` slots of `width` f32.
pub(crate) struct Slots {
    width: usize,
    flags: SlotFlags,
    /// The first word of `memory`.
    words: *mut f32,
    /// Owns what `words` points to; not looked into while this lives.
    _memory: Box<dyn HostBlock>,
}

// SAFETY: `words` points into memory that `Slots` owns and that no thread is tied to; it is read and written only through
// claims, of which no two at a time have a slot in common, and whose flags order what one thread did before what the
// next one does (released when dropped, acquired when taken).
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

/// The right to these slots, exclusive until it is dropped.
pub(crate) struct Claim<'a> {
    slots: &'a Slots,
    held: Held<'a>,
}

/// So many bytes at a time are written past the caches, which would not keep them until they are read.
const MANY_BYTES: usize = 1 << 20;

/// The rows of a claim, to write.
pub(crate) struct ClaimedRows<'a> {
    slots: &'a Slots,
    list: &'a [u32],
}

impl Slots {
    /// The most slots of a size: they are numbered in 32 bits, and [`NO_SLOT`] is none.
    pub(crate) const MOST: u64 = NO_SLOT as u64 - 1;

    /// So many zeroed slots.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the memory is not to be had.
    pub(crate) fn new(memory: &dyn HostMemory, count: usize, width: usize) -> Result<Self, OutOfHostMemory> {
        let bytes = count.checked_mul(width).and_then(|words| words.checked_mul(size_of::<f32>()));
        let bytes =
            bytes.filter(|_| count as u64 <= Self::MOST).ok_or(OutOfHostMemory { bytes: usize::MAX })?;
        let mut memory = memory.take(bytes.max(size_of::<f32>()))?;
        let words = memory.bytes_mut().ok_or(OutOfHostMemory { bytes })?;
        assert!(words.len() >= bytes && words.as_ptr().cast::<f32>().is_aligned(), "host memory is aligned");
        let words = words.as_mut_ptr().cast();
        Ok(Self { width, flags: SlotFlags::new(count), words, _memory: memory })
    }

    /// How many slots.
    #[must_use]
    pub(crate) fn count(&self) -> usize {
        self.flags.count()
    }

    /// Elements a slot.
    #[must_use]
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// Claims these slots; each [`NO_SLOT`] among them stands for none.
    ///
    /// # Errors
    /// As [`SlotFlags::claim`].
    pub(crate) fn claim<'a>(&'a self, list: &'a [u32]) -> Result<Claim<'a>, NotClaimed> {
        Ok(Claim { slots: self, held: self.flags.claim(list)? })
    }

    /// Where the row of the slot begins.
    fn row(&self, slot: u32) -> *mut f32 {
        debug_assert!((slot as usize) < self.count());
        // SAFETY: every slot of a claim is below `count` (it has a flag), so this stays
        // within the `count * width` words of the memory.
        unsafe { self.words.add(slot as usize * self.width) }
    }
}

impl<'a> Claim<'a> {
    /// The row of slot `k` of the claim; none where that is [`NO_SLOT`] or past its end.
    #[inline(always)]
    #[must_use]
    pub(crate) fn row(&self, k: usize) -> Option<&[f32]> {
        let slot = self.held.list().get(k).copied().filter(|&slot| slot != NO_SLOT)?;
        // SAFETY: the claim holds the slot, so no other claim touches it; this one writes only by `rows_mut`, which
        // borrows it mutably, and so not while the reference given here lives. The words are initialised (zeroed).
        Some(unsafe { std::slice::from_raw_parts(self.slots.row(slot), self.slots.width) })
    }

    /// Asks memory for what [`Self::row`] looks at: which slot it is.
    #[inline(always)]
    pub(crate) fn ask(&self, k: usize) {
        prefetch_line(self.held.list().as_ptr().wrapping_add(k));
    }

    /// All rows, to write.
    pub(crate) fn rows_mut(&mut self) -> ClaimedRows<'_> {
        ClaimedRows { slots: self.slots, list: self.held.list() }
    }

    /// Copies the rows end to end over `out`.
    ///
    /// # Panics
    /// When `out` has not room for exactly as many rows as there are slots, or one is [`NO_SLOT`].
    pub(crate) fn read(&self, out: &mut [f32]) {
        assert_eq!(out.len(), self.held.list().len() * self.slots.width, "elements");
        let ahead = rows_ahead(self.slots.width * size_of::<f32>());
        for (k, out) in out.chunks_exact_mut(self.slots.width.max(1)).enumerate() {
            if let Some(next) = self.row(k + ahead) {
                prefetch(next);
            }
            out.copy_from_slice(self.row(k).unwrap_or_default());
        }
    }

    /// Copies rows that lie end to end into the slots.
    ///
    /// # Panics
    /// As [`Self::read`].
    pub(crate) fn write(&mut self, from: &[f32]) {
        assert_eq!(from.len(), self.held.list().len() * self.slots.width, "elements");
        assert!(!self.held.list().contains(&NO_SLOT), "a row that has no slot");
        let (width, many) = (self.slots.width.max(1), size_of_val(from) >= MANY_BYTES);
        let pairs = self.rows_mut().each().zip(from.chunks_exact(width));
        if many { copy_past_caches(pairs) } else { pairs.for_each(|(to, from)| to.copy_from_slice(from)) }
    }
}

impl<'a> ClaimedRows<'a> {
    /// The row of slot `k`; none where that is [`NO_SLOT`] or past the end.
    #[inline(always)]
    pub(crate) fn row_mut(&mut self, k: usize) -> Option<&mut [f32]> {
        let slot = self.list.get(k).copied().filter(|&slot| slot != NO_SLOT)?;
        // SAFETY: the slots of a claim are distinct, and this has the claim to itself (`rows_mut` borrows it mutably), so
        // nobody else has this row.
        Some(unsafe { std::slice::from_raw_parts_mut(self.slots.row(slot), self.slots.width) })
    }

    /// The rows of all slots but [`NO_SLOT`].
    pub(crate) fn each(self) -> impl Iterator<Item = &'a mut [f32]> {
        let Self { slots, list } = self;
        let list = list.iter().filter(|&&slot| slot != NO_SLOT);
        // SAFETY: as in `row_mut`; each slot of the list comes up once, and this is of no more use to get at it again.
        list.map(|&slot| unsafe { std::slice::from_raw_parts_mut(slots.row(slot), slots.width) })
    }
}

#[cfg(test)]
mod tests;
