//! Whose each slot of a trainer's scratchpad is at the moment: one flag a slot, wherever the slots are.
//!
//! Who may touch which slot when is for the trainer's plan to say, far from here. So that a fault in it is
//! told and never becomes two threads at one row, nobody touches a slot that it has not claimed, and a claim
//! is given only while no other has any of its slots: flags are taken and given back once a batch, not once
//! an access.

use std::sync::atomic::{AtomicBool, Ordering};

/// Stands in a list of slots for a row that has none.
pub const NO_SLOT: u32 = u32::MAX;

/// A slot that another claim holds, or that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("slot {slot}: claimed twice at a time, or past the {count} slots there are")]
pub struct NotClaimed {
    /// Which one.
    pub slot: u32,
    /// How many there are.
    pub count: usize,
}

/// A flag for each of the slots of one size.
#[derive(Debug)]
pub struct SlotFlags(Box<[AtomicBool]>);

/// Slots that are someone's, until this is dropped: distinct and among those there are, but for each
/// [`NO_SLOT`].
#[derive(Debug)]
pub struct Held<'a> {
    flags: &'a SlotFlags,
    list: &'a [u32],
}

impl SlotFlags {
    /// For so many slots, which nobody has yet.
    #[must_use]
    pub(crate) fn new(count: usize) -> Self {
        Self((0..count).map(|_| AtomicBool::new(false)).collect())
    }

    /// How many slots.
    #[must_use]
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Claims these slots; each [`NO_SLOT`] among them stands for none. What was done with a slot before it
    /// was given back is seen by whoever claims it next.
    ///
    /// # Errors
    /// [`NotClaimed`] for the first that another claim has, or that stands there twice; nothing is
    /// claimed then.
    pub fn claim<'a>(&'a self, list: &'a [u32]) -> Result<Held<'a>, NotClaimed> {
        let take = |slot: u32| {
            let flag = self.0.get(slot as usize);
            flag.is_some_and(|f| {
                f.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
            })
        };
        match list.iter().position(|&slot| slot != NO_SLOT && !take(slot)) {
            None => Ok(Held { flags: self, list }),
            Some(failed) => {
                drop(Held { flags: self, list: &list[..failed] });
                Err(NotClaimed { slot: list[failed], count: self.count() })
            }
        }
    }
}

impl<'a> Held<'a> {
    /// The slots, in the order in which they were claimed.
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

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for &slot in self.list.iter().filter(|&&slot| slot != NO_SLOT) {
            self.flags.0[slot as usize].store(false, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests;
