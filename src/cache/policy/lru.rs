//! Eviction of the longest unused entries, which approximates LRU: every index entry stores the number of the
//! batch that used it last, and the oldest are evicted first.
//!
//! With LRU's list, every hit would take a lock to move its row to the front. A stamp is written without a
//! lock, on a line that the hit reads anyway. In return, old entries must be searched for: the background
//! sweep does that, by sampled ages.
//!
//! Limits: rows of one batch are equally old, and uses within a few batches
//! ([`FRESH`](super::super::index::FRESH)) are not distinguished. Among equals, the sweep evicts those that
//! it reaches first. LRU does not know how often a row was used: rows used once displace rows in regular use.
//! Keeping those out is the task of admission.

/// The coldness of an entry that was last used `age` batches ago. Larger values are evicted first.
#[inline]
#[must_use]
pub(crate) fn coldness(age: u32) -> u64 {
    age.into()
}
