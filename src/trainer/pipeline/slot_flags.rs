//! Claims on the slots of a scratchpad: one flag a slot, on the host, wherever the slots are.
//!
//! The trainer's plan decides which stage may use which slot when. Flags make a fault of the plan an error
//! instead of a data race: a stage uses only slots that it has claimed, and a claim fails if another claim
//! has one of its slots. Flags are set and cleared once a batch, not once an access.

use std::sync::atomic::{AtomicBool, Ordering};

/// In a list of slots: a row without a slot.
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// A claim failed: another claim has the slot, or there is no such slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("slot {slot}: claimed twice at a time, or past the {count} slots there are")]
pub struct ClaimError {
    /// The first slot that could not be claimed.
    pub slot: u32,
    /// How many slots there are.
    pub count: usize,
}

/// A flag for each of the slots of one size.
#[derive(Debug)]
pub(crate) struct SlotFlags(Box<[AtomicBool]>);

/// Claimed slots, until this is dropped. They exist and are distinct, apart from [`NO_SLOT`].
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

    /// How many slots.
    #[must_use]
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Claims these slots; [`NO_SLOT`] is ignored. All that was done with a slot under its last claim is
    /// visible to this one.
    ///
    /// # Errors
    /// [`ClaimError`] for the first slot that another claim has, or that is listed twice; then nothing is
    /// claimed.
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
    /// The slots as they were listed.
    #[inline(always)]
    #[must_use]
    pub(crate) fn list(&self) -> &'a [u32] {
        self.list
    }

    /// Whether they are slots of these flags.
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
