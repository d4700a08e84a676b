//! The index: from flat key to location, read without a lock.
//!
//! A bucket has 128 bytes: eight slots of two words. The first word is the key. The second word packs the
//! location (40 bits) and a stamp (24 bits), which is the number of the batch that last used the entry, for
//! approximate LRU. A key may be in any slot of two buckets, both given by its hash, so a lookup reads at
//! most two buckets. An insert takes the bucket with more empty slots. This fills the buckets so evenly that
//! 0.8 of all slots can be used. Entries never move while they are linked.
//!
//! **Writers** (insert, evict) hold the locks of the buckets that they change: plain mutexes, striped, always
//! taken in ascending order. **Readers** take none. A writer links an entry by storing the second word, then
//! the key. It unlinks an entry by storing another key, and leaves the second word as it is. A reader that
//! has found its key loads the second word, the key and the second word again:
//!
//! - a changed key means that the entry was removed: the reader probes again;
//! - a changed location means that another entry took the slot in between: the reader probes again;
//! - a changed stamp means that another reader found the entry too, which is no conflict.
//!
//! **Why the location that a reader gets belongs to its key.** The reader holds a pin (`epoch.rs`), so a
//! location that it saw linked is not linked again before the pin ends. So if both loads of the second word
//! have the same location, one link operation L has stored both. The first load acquires the word that L
//! stored. So the reader's key, which is loaded next, was stored by L or by a later link. That load acquires
//! too. So the last load has the word of the link that stored the key, or of a later link. But that word is
//! from L. So L has stored the key, too. A reader cannot see a link that ended before its pin began, because
//! the pin's order makes the later key visible.
//!
//! A location in host memory may be linked again, under another key, while a pin lasts. It says only that the
//! row is in host memory. The reader knows which row it is from the key, never from the location.
//!
//! A lookup renews the stamp with one compare-exchange of the second word. If the exchange fails, the entry
//! was removed or another lookup renewed the stamp, and nothing is lost. A stamp of the last few batches
//! ([`FRESH`]) is not renewed: otherwise all cores would write to the cache lines of the same hot rows in
//! every batch. Stamps wrap after 2^24 batches, so an entry unused for about that long looks recently used.

#![allow(unsafe_code)]

mod bucket;
mod entry;

use std::io;

use super::epoch::Pin;
use super::key::{EMPTY, TOMBSTONE, hash_key};
use crate::mem::prefetch::prefetch;
use crate::sync::{AtomicU64, EvenPoisoned, Mutex, MutexGuard, Ordering, yield_now};
use crate::types::FlatKey;
use bucket::{Buckets, IndexSlot, Probe, link, touch, unlink};
use entry::{location_of, stamp_of};

pub(crate) use entry::{
    Entry, EntryAge, EntryDecision, LinkOutcome, Location, PinnedLocation, Stamp, Unlinked,
};

/// Slots of a bucket. Few under loom, because each slot multiplies the number of interleavings.
pub(crate) const SLOTS: usize = if cfg!(flechette_loom) { 2 } else { 8 };
/// Bytes of a bucket.
pub(crate) const BUCKET_BYTES: usize = 128;
/// How many keys ahead a loop prefetches buckets.
pub(crate) const BUCKETS_AHEAD: usize = 12;
/// The share of slots that may be in use.
pub(crate) const LOAD: f64 = 0.8;
/// A stamp that is at most this many batches old is not renewed, so an entry may look that much older than it
/// is. A row that every batch uses is stamped in every third batch only. The error does not matter if the
/// cache holds the rows of many batches: then eviction removes rows that were unused for much longer. If the
/// cache holds little more than the rows of one batch, each increment of this number costs hits
/// (`benches/hit_rates`, batches of 256). kernels/probe.cu has the same rule and number.
pub(crate) const FRESH: u32 = 2;
/// Batches may run this far out of order: a stamp that is at most this many batches ahead has age 0.
const AHEAD: u64 = 1 << 16;
/// The most locks. An index with fewer buckets has one lock per bucket.
const STRIPES: usize = if cfg!(flechette_loom) { 2 } else { 1024 };

/// The locks of one or two buckets.
type BucketLocks<'i> = (MutexGuard<'i, ()>, Option<MutexGuard<'i, ()>>);

/// The index.
#[derive(Debug)]
pub(crate) struct Index {
    buckets: Buckets,
    locks: Box<[Mutex<()>]>,
    entries: AtomicU64,
}

impl Index {
    /// An empty index of `buckets` buckets, 1 to 2^32.
    ///
    /// # Errors
    /// When the allocation fails.
    pub(crate) fn new(buckets: usize) -> io::Result<Self> {
        let stripes = buckets.min(STRIPES);
        Ok(Self {
            buckets: Buckets::new(buckets)?,
            locks: (0..stripes).map(|_| Mutex::new(())).collect(),
            entries: AtomicU64::new(0),
        })
    }

    /// Gets the memory from the system now.
    pub(crate) fn prefault(&self) {
        self.buckets.prefault();
    }

    #[must_use]
    pub(crate) fn buckets(&self) -> usize {
        self.buckets.all().len()
    }

    #[must_use]
    pub(crate) fn entries(&self) -> u64 {
        self.entries.load(Ordering::Relaxed)
    }

    /// The location of a key. Renews the key's stamp to `now`.
    #[inline]
    pub(crate) fn get<'p>(&self, key: FlatKey, now: Stamp, _pin: &'p Pin<'_>) -> Option<PinnedLocation<'p>> {
        let [first, second] = self.pair(key);
        loop {
            let mut conflict = false;
            for bucket in [first, second] {
                match self.probe(bucket, key, now) {
                    // SAFETY: found in the index, under a pin that lives for `'p`.
                    Probe::Found(location) => return Some(unsafe { PinnedLocation::found(location) }),
                    Probe::Absent => {}
                    Probe::Changed => conflict = true,
                }
            }
            if !conflict {
                return None;
            }
            yield_now();
        }
    }

    /// Prefetches a key's two buckets.
    #[inline]
    pub(crate) fn prefetch(&self, key: FlatKey) {
        let [first, second] = self.pair(key);
        for bucket in [first, second] {
            prefetch(std::slice::from_ref(&self.buckets.all()[bucket]));
        }
    }

    #[inline]
    fn probe(&self, bucket: usize, key: FlatKey, now: Stamp) -> Probe {
        for slot in &self.buckets.all()[bucket].0 {
            if slot.key.load(Ordering::Acquire) != key.0 {
                continue;
            }
            let word = slot.word.load(Ordering::Acquire);
            if slot.key.load(Ordering::Acquire) != key.0 {
                return Probe::Changed;
            }
            let again = slot.word.load(Ordering::Relaxed);
            if location_of(again) != location_of(word) {
                return Probe::Changed;
            }
            touch(slot, again, now);
            return Probe::Found(location_of(word));
        }
        Probe::Absent
    }

    /// Links a key to a location that already contains the row. An entry of the same key is replaced unless
    /// `same` accepts its location. If both buckets of the key are full and `coldness` is given, the entry
    /// with the largest `coldness(key, age)` is replaced.
    pub(crate) fn insert(
        &self,
        entry: Entry,
        coldness: Option<&dyn Fn(FlatKey, u32) -> u64>,
        same: impl FnOnce(PinnedLocation<'_>) -> bool,
    ) -> LinkOutcome {
        let Entry { key, location, now } = entry;
        debug_assert!(key != EMPTY && key != TOMBSTONE);
        let [first, second] = self.pair(key);
        let locks = self.lock(first, second);
        let (first, second) = (&self.buckets.all()[first], &self.buckets.all()[second]);
        if let Some(slot) = first.find(key).or_else(|| second.find(key)) {
            // SAFETY: the slot has the key's entry, in a bucket that is locked. The entry is unlinked only
            // after `same` has returned.
            if same(unsafe { slot.pinned(&locks) }) {
                return LinkOutcome::Present;
            }
            let unlinked = unlink(slot, TOMBSTONE);
            link(slot, key, location, now);
            return LinkOutcome::Replaced(unlinked);
        }
        let emptier = if second.vacancies() > first.vacancies() { second } else { first };
        if let Some(slot) = emptier.find(EMPTY) {
            link(slot, key, location, now);
            self.entries.fetch_add(1, Ordering::Relaxed);
            return LinkOutcome::New;
        }
        let coldest = coldness.and_then(|coldness| {
            let cold = |slot: &&IndexSlot| {
                let age = now.age(stamp_of(slot.word.load(Ordering::Relaxed)));
                coldness(FlatKey(slot.key.load(Ordering::Relaxed)), age)
            };
            first.0.iter().chain(&second.0).max_by_key(cold)
        });
        match coldest {
            Some(coldest) => {
                let unlinked = unlink(coldest, TOMBSTONE);
                link(coldest, key, location, now);
                LinkOutcome::Replaced(unlinked)
            }
            None => LinkOutcome::Full,
        }
    }

    /// Calls `decide(key, location, age)` for each entry of a bucket, and does with the entry what it
    /// returns. Passes unlinked entries to `unlinked`.
    pub(crate) fn visit_bucket(
        &self,
        bucket: usize,
        now: Stamp,
        mut decide: impl FnMut(FlatKey, PinnedLocation<'_>, u32) -> EntryDecision,
        mut unlinked: impl FnMut(Unlinked),
    ) {
        let locks = self.lock(bucket, bucket);
        for slot in &self.buckets.all()[bucket].0 {
            let (key, word) = (slot.key.load(Ordering::Relaxed), slot.word.load(Ordering::Relaxed));
            if key == EMPTY.0 {
                continue;
            }
            let key = FlatKey(key);
            // SAFETY: the slot has an entry, and its bucket is locked. The entry is unlinked only after
            // `decide` has returned.
            let location = unsafe { slot.pinned(&locks) };
            match decide(key, location, now.age(stamp_of(word))) {
                EntryDecision::Keep => {}
                EntryDecision::Unlink => {
                    unlinked(unlink(slot, EMPTY));
                    self.entries.fetch_sub(1, Ordering::Relaxed);
                }
                EntryDecision::Relink(location) => {
                    unlinked(unlink(slot, TOMBSTONE));
                    link(slot, key, location, stamp_of(word));
                }
            }
        }
    }

    /// Unlinks a key if `victim` accepts its location.
    pub(crate) fn remove(
        &self,
        key: FlatKey,
        victim: impl FnOnce(PinnedLocation<'_>) -> bool,
    ) -> Option<Unlinked> {
        let [first, second] = self.pair(key);
        let locks = self.lock(first, second);
        let (first, second) = (&self.buckets.all()[first], &self.buckets.all()[second]);
        let slot = first.find(key).or_else(|| second.find(key))?;
        // SAFETY: the slot has the key's entry, in a bucket that is locked. The entry is unlinked only after
        // `victim` has returned.
        if !victim(unsafe { slot.pinned(&locks) }) {
            return None;
        }
        self.entries.fetch_sub(1, Ordering::Relaxed);
        Some(unlink(slot, EMPTY))
    }

    /// Whether a key is linked. Takes no lock: for a key that is just being linked or unlinked, the answer is
    /// that from before or after, and for one whose row just becomes a pointer it may be no.
    #[inline]
    pub(crate) fn has(&self, key: FlatKey) -> bool {
        let [first, second] = self.pair(key);
        [first, second].iter().any(|bucket| self.buckets.all()[*bucket].find(key).is_some())
    }

    /// Passes the location of a key to `look` if the key is linked. Does not renew its stamp.
    pub(crate) fn look<R>(&self, key: FlatKey, look: impl FnOnce(PinnedLocation<'_>) -> R) -> Option<R> {
        let [first, second] = self.pair(key);
        let locks = self.lock(first, second);
        let (first, second) = (&self.buckets.all()[first], &self.buckets.all()[second]);
        let slot = first.find(key).or_else(|| second.find(key))?;
        // SAFETY: the slot has the key's entry, in a bucket that is locked. Nothing is unlinked here.
        Some(look(unsafe { slot.pinned(&locks) }))
    }

    /// Keys, locations and ages of a bucket's entries, read without a lock: they may be inconsistent.
    pub(crate) fn ages(&self, bucket: usize, now: Stamp) -> impl Iterator<Item = EntryAge> {
        self.buckets.all()[bucket].0.iter().filter_map(move |slot| {
            let key = FlatKey(slot.key.load(Ordering::Relaxed));
            let live = key.0 > TOMBSTONE.0;
            let word = slot.word.load(Ordering::Relaxed);
            live.then(|| EntryAge { key, location: location_of(word), age: now.age(stamp_of(word)) })
        })
    }

    /// A key's two buckets, which may be the same. Each half of the hash is mapped to a bucket by
    /// multiplication, so the number of buckets need not be a power of two.
    #[inline]
    fn pair(&self, key: FlatKey) -> [usize; 2] {
        let (hash, buckets) = (hash_key(key), self.buckets.all().len() as u64);
        let (high, low) = (hash >> 32, hash & 0xFFFF_FFFF);
        [high, low].map(|half| ((half * buckets) >> 32) as usize)
    }

    fn lock(&self, a: usize, b: usize) -> BucketLocks<'_> {
        let (a, b) = (a % self.locks.len(), b % self.locks.len());
        let one = |stripe: usize| self.locks[stripe].lock().even_poisoned();
        (one(a.min(b)), (a != b).then(|| one(a.max(b))))
    }
}

/// Entries that an index of `buckets` buckets may have.
#[must_use]
pub(crate) fn capacity(buckets: usize) -> u64 {
    ((buckets * SLOTS) as f64 * LOAD) as u64
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;

#[cfg(test)]
#[cfg(flechette_loom)]
mod models;
