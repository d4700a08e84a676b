//! The scratchpad's memory on the host. Several threads read and write it at the same time, each in
//! different slots.
//!
//! Plan decides which stage may use which slot, and when. A mistake of Plan can corrupt a row, but it cannot
//! cause a data race: a slot is used only under a [`Claim`], and claiming a slot fails while another claim
//! has it ([`crate::trainer::pipeline::slot_flags`]).
#![allow(unsafe_code)]

use crate::compute::gather_pool::rows_ahead;
use crate::compute::simd::copy_past_caches;
use crate::mem::prefetch::{prefetch, prefetch_line};
use crate::mem::{HostBlock, HostMemory, OutOfHostMemory};
pub(crate) use crate::trainer::pipeline::slot_flags::{ClaimError, NO_SLOT};
use crate::trainer::pipeline::slot_flags::{HeldSlots, SlotFlags};

/// `count` slots of `width` f32 each.
pub(crate) struct Slots {
    width: usize,
    flags: SlotFlags,
    /// Points to the first word of `_memory`.
    words: *mut f32,
    /// Owns the words. They are accessed only through `words`.
    _memory: Box<dyn HostBlock>,
}

// SAFETY: `words` points into memory that `Slots` owns, that does not move (`HostBlock`) and that is tied to
// no thread. It is read and written only under claims. No two claims have a slot in common at a time, and
// their flags order what one thread did before what the next one does (release when dropped, acquire when
// taken).
unsafe impl Send for Slots {}
// SAFETY: shared references give access to the words only under claims, as for `Send`. `flags` is `Sync`, and
// `_memory` is not used before the drop.
unsafe impl Sync for Slots {}

/// Exclusive access to some slots, until the claim is dropped.
pub(crate) struct Claim<'a> {
    slots: &'a Slots,
    held: HeldSlots<'a>,
}

/// Writes of at least this size bypass the processor's caches. These would evict the rows before Train reads
/// them.
const MANY_BYTES: usize = 1 << 20;

/// Mutable access to the rows of a claim.
pub(crate) struct ClaimedRows<'a> {
    slots: &'a Slots,
    list: &'a [u32],
}

impl Slots {
    /// The most slots of one size. Slot numbers have 32 bits, and [`NO_SLOT`] is not a slot number.
    pub(crate) const MOST: u64 = NO_SLOT as u64 - 1;

    /// `count` zeroed slots of `width` f32 each.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the allocation fails.
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

    /// The number of slots.
    #[must_use]
    pub(crate) fn count(&self) -> usize {
        self.flags.count()
    }

    /// Elements per slot.
    #[must_use]
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// Claims these slots; [`NO_SLOT`] is ignored.
    ///
    /// # Errors
    /// As [`SlotFlags::claim`].
    pub(crate) fn claim<'a>(&'a self, list: &'a [u32]) -> Result<Claim<'a>, ClaimError> {
        Ok(Claim { slots: self, held: self.flags.claim(list)? })
    }

    /// Pointer to the row in the slot.
    ///
    /// # Safety
    /// The slot exists. Every slot of a claim does: it has a flag. [`NO_SLOT`] does not.
    #[inline(always)]
    unsafe fn row(&self, slot: u32) -> *mut f32 {
        debug_assert!((slot as usize) < self.count());
        // SAFETY: the slot is below `count`, so this stays within the `count * width` words of the memory,
        // whose length `new` has checked.
        unsafe { self.words.add(slot as usize * self.width) }
    }
}

impl<'a> Claim<'a> {
    /// The row in the slot at index `k` of the claim's list. `None` if that is [`NO_SLOT`] or past the end
    /// of the list.
    #[inline(always)]
    #[must_use]
    pub(crate) fn row(&self, k: usize) -> Option<&[f32]> {
        let slot = self.held.list().get(k).copied().filter(|&slot| slot != NO_SLOT)?;
        // SAFETY: the claim has the slot, so it exists, and no other claim uses it. This claim writes only
        // through `rows_mut`, which borrows it mutably, so not while the returned reference lives. The words
        // are initialised (zeroed).
        Some(unsafe { std::slice::from_raw_parts(self.slots.row(slot), self.slots.width) })
    }

    /// Prefetches the slot number that [`Self::row`] reads for `k`.
    #[inline(always)]
    pub(crate) fn prefetch_slot(&self, k: usize) {
        prefetch_line(self.held.list().as_ptr().wrapping_add(k));
    }

    /// All rows, mutably.
    pub(crate) fn rows_mut(&mut self) -> ClaimedRows<'_> {
        ClaimedRows { slots: self.slots, list: self.held.list() }
    }

    /// Copies the rows to `out`, end to end.
    ///
    /// # Panics
    /// If `out` is not as long as all rows together, or a slot is [`NO_SLOT`].
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

    /// Copies rows that are end to end into the slots.
    ///
    /// # Panics
    /// As [`Self::read`].
    pub(crate) fn write(&mut self, from: &[f32]) {
        assert_eq!(from.len(), self.held.list().len() * self.slots.width, "elements");
        assert!(!self.held.list().contains(&NO_SLOT), "a row without a slot");
        let (width, many) = (self.slots.width.max(1), size_of_val(from) >= MANY_BYTES);
        let pairs = self.rows_mut().each().zip(from.chunks_exact(width));
        if many { copy_past_caches(pairs) } else { pairs.for_each(|(to, from)| to.copy_from_slice(from)) }
    }
}

impl<'a> ClaimedRows<'a> {
    /// As [`Claim::row`], for writing.
    #[inline(always)]
    pub(crate) fn row_mut(&mut self, k: usize) -> Option<&mut [f32]> {
        let slot = self.list.get(k).copied().filter(|&slot| slot != NO_SLOT)?;
        // SAFETY: the slots of a claim exist and are distinct, and this has exclusive use of the claim
        // (`rows_mut` borrows it mutably), so there is no other reference to this row.
        Some(unsafe { std::slice::from_raw_parts_mut(self.slots.row(slot), self.slots.width) })
    }

    /// The rows of all slots except [`NO_SLOT`].
    pub(crate) fn each(self) -> impl Iterator<Item = &'a mut [f32]> {
        let Self { slots, list } = self;
        let list = list.iter().filter(|&&slot| slot != NO_SLOT);
        // SAFETY: the slots of a claim exist and are distinct, so each comes up once. `self` is consumed, and
        // it had exclusive use of the claim for `'a`. So there is no other reference to these rows.
        list.map(|&slot| unsafe { std::slice::from_raw_parts_mut(slots.row(slot), slots.width) })
    }
}

#[cfg(test)]
mod tests;
