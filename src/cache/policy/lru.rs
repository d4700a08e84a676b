//! Eviction of the longest unused entries, which approximates LRU: every index entry stores the number of the
//! batch that used it last, and the oldest are evicted first.
//!
//! With the list of exact LRU, every hit would take a lock to move its row to the front. A stamp is written
//! without a lock, in a cache line that the hit reads anyway. In return, eviction must search for old
//! entries. The background sweep does that, with a threshold from sampled ages.
//!
//! Limits: rows of one batch are equally old, and uses within a few batches
//! ([`FRESH`](super::super::index::FRESH)) are not distinguished. Among entries of equal age, the sweep
//! evicts those that it reaches first. LRU ignores how often a row was used, so rows used once displace rows
//! in regular use. Admission must keep rows used once out of the cache.

/// The coldness of an entry that was last used `age` batches ago. Larger values are evicted first.
#[inline]
#[must_use]
pub(crate) fn coldness(age: u32) -> u64 {
    age.into()
}
