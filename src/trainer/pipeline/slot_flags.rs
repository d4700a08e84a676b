//! Claims on the slots of a scratchpad: one flag per slot. The flags are in host memory, also when the slots
//! are on a device.
//!
//! Plan decides which stage may use which slot, and when. Flags turn a mistake of Plan into an error instead
//! of a data race: a stage uses only slots that it has claimed, and a claim fails if another claim has one
//! of its slots. Flags are set and cleared once per batch, not once per access.

use std::sync::atomic::{AtomicBool, Ordering};

/// Stands in a list of slots for a row that has no slot.
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// A claim failed, because another claim has the slot or no slot has this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("slot {slot}: already claimed, or out of range: there are {count} slots")]
pub struct ClaimError {
    /// The first slot that could not be claimed.
    pub slot: u32,
    /// The number of slots.
    pub count: usize,
}

/// A flag for each of the slots of one size.
#[derive(Debug)]
pub(crate) struct SlotFlags(Box<[AtomicBool]>);

/// Slots that stay claimed until this is dropped. Except for [`NO_SLOT`] they exist and are distinct.
#[derive(Debug)]
pub(crate) struct HeldSlots<'a> {
    flags: &'a SlotFlags,
    list: &'a [u32],
}

impl SlotFlags {
    /// `count` flags; no slot is claimed.
    #[must_use]
    pub(crate) fn new(count: usize) -> Self {
        Self((0..count).map(|_| AtomicBool::new(false)).collect())
    }

    /// The number of slots.
    #[must_use]
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Claims these slots; [`NO_SLOT`] is ignored. Writes to a slot under an earlier claim are visible under
    /// this claim.
    ///
    /// # Errors
    /// [`ClaimError`] for the first slot that another claim has, or that is listed twice. Nothing is
    /// claimed then.
    pub(crate) fn claim<'a>(&'a self, list: &'a [u32]) -> Result<HeldSlots<'a>, ClaimError> {
        let take = |slot: u32| {
            let flag = self.0.get(slot as usize);
            flag.is_some_and(|f| {
                f.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
            })
        };
        match list.iter().position(|&slot| slot != NO_SLOT && !take(slot)) {
            None => Ok(HeldSlots { flags: self, list }),
            Some(failed) => {
                drop(HeldSlots { flags: self, list: &list[..failed] });
                Err(ClaimError { slot: list[failed], count: self.count() })
            }
        }
    }
}

impl<'a> HeldSlots<'a> {
    /// The slots, in the order in which they were listed.
    #[inline(always)]
    #[must_use]
    pub(crate) fn list(&self) -> &'a [u32] {
        self.list
    }

    /// Whether the slots were claimed through `flags`.
    #[must_use]
    pub(crate) fn is_of(&self, flags: &SlotFlags) -> bool {
        std::ptr::eq(self.flags, flags)
    }
}

impl Drop for HeldSlots<'_> {
    fn drop(&mut self) {
        for &slot in self.list.iter().filter(|&&slot| slot != NO_SLOT) {
            self.flags.0[slot as usize].store(false, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests;
