//! Eviction of the longest unused, which is LRU approximately: every entry of the index bears the number of the batch
//! that used it last, and the older that is the sooner it goes.
//!
//! LRU's list would have every hit take a lock to move its row to the front. A stamp is written where the hit reads
//! anyway, without a lock; the price is that somebody has to look for the old ones, which is the sweep's work
//! in the background, by sampled ages.
//!
//! Its limits: rows of one batch are equally old, and so is to a batch or two whatever was used since
//! ([`super::super::index::FRESH`]); of equals, those go first that the sweep comes to first. What it does not know is how
//! often a row was used: rows that come once push out rows that come again, and to keep them out is the admission's
//! part.

/// How cold an entry is that was last used `age` batches ago: what is larger goes first.
#[inline]
#[must_use]
pub(crate) fn coldness(age: u32) -> u64 {
    age.into()
}
