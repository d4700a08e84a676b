//! The index: from flat key to location, read without a lock.
//!
//! A bucket is a line of 128 bytes: eight slots of two words. The first word is the key. The second word
//! packs the location (40 bits) and a stamp (24 bits) of when the entry was last used, which is the clock of
//! approximate LRU. A key may be in one of two buckets, both given by its hash, and in any slot of them, so a
//! lookup reads at most two lines. An insert takes the bucket with more empty slots, which keeps buckets even
//! enough to fill 0.8 of the slots. Entries never move while they are linked.
//!
//! **Writers** (insert, evict) hold the locks of the buckets that they change: plain mutexes, striped, always
//! taken in ascending order. **Readers** take none. A writer links an entry by storing the second word, then
//! the key. It unlinks an entry by storing another key, and leaves the second word as it is. A reader that
//! has seen its key loads the word, the key and the word again:
//!
//! - a changed key means that the entry was removed: the reader probes again;
//! - a changed location means that another entry took the slot in between: the reader probes again;
//! - a changed stamp means that another reader found the entry too, which is no conflict.
//!
//! **Why a reader's location is its key's.** The reader holds a pin (`epoch.rs`), so a location that it saw
//! linked is not linked again before the pin ends. Equal locations in both words are therefore of one
//! linking, called L. The reader read by acquire a word that L stored, so the key that it reads next is L's
//! or a later one. It read that key by acquire, so its last word is of that key's linking or of a later one;
//! but the word is L's. So the key is L's. A location can be seen stale, from a linking that ended before the
//! pin began, only together with a key from before that end, which the pin's own ordering rules out.
//!
//! A location in host memory may be linked again, under another key, while a pin lasts. It says only that the
//! row is in host memory. Which row it is, the reader knows from its own key, never from the location.
//!
//! A lookup renews the stamp with one compare-exchange of the second word. If it fails, the entry was removed
//! or another lookup renewed the stamp, and nothing is lost. A stamp of the last few batches ([`FRESH`]) is
//! not renewed: cores that find the same hot rows would otherwise pass those lines to each other in every
//! batch, only to write. Stamps wrap after 2^24 batches: an entry unused for exactly that long looks young
//! once.

#![allow(unsafe_code)]

mod bucket;
mod entry;

use std::io;
use std::marker::PhantomData;
use std::sync::PoisonError;

use super::epoch::Pin;
use super::key::{EMPTY, TOMBSTONE, mix64};
use crate::mem::prefetch::prefetch;
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering, yield_now};
use crate::types::FlatKey;
use bucket::{Buckets, IndexSlot, Probe, link, touch, unlink};
use entry::{location_of, stamp_of};

pub(crate) use entry::{Entry, Fate, Held, Link, Location, Stamp, Unlinked};

/// Slots of a bucket. Under loom few, because each multiplies the interleavings.
pub(crate) const SLOTS: usize = if cfg!(flechette_loom) { 2 } else { 8 };
/// Bytes of a bucket.
pub(crate) const BUCKET_BYTES: usize = 128;
/// The share of slots that may be in use.
pub(crate) const LOAD: f64 = 0.8;
/// A stamp that is at most this many batches old is not renewed, so an entry may look older than it is by as
/// much. That does not matter for an eviction of rows unused for much longer, which is the case if the cache
/// holds the rows of many batches. If it holds hardly the rows of one, each step more costs hits
/// (`benches/hit_rates`, batches of 256). A row that every batch uses is written in every third batch only.
/// kernels/probe.cu has the same rule and number.
pub(crate) const FRESH: u32 = 2;
/// How far batches may overtake each other.
const AHEAD: u64 = 1 << 16;
/// Most locks; fewer if there are fewer buckets.
const STRIPES: usize = if cfg!(flechette_loom) { 2 } else { 1024 };

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

    #[must_use]
    pub(crate) fn buckets(&self) -> usize {
        self.buckets.all().len()
    }

    /// The number of entries at a load of [`LOAD`].
    #[must_use]
    pub(crate) fn capacity(&self) -> u64 {
        capacity(self.buckets())
    }

    #[must_use]
    pub(crate) fn entries(&self) -> u64 {
        self.entries.load(Ordering::Relaxed)
    }

    /// The location of a key. Renews the key's stamp to `now`.
    #[inline]
    pub(crate) fn get<'p>(&self, key: FlatKey, now: Stamp, _pin: &'p Pin<'_>) -> Option<Held<'p>> {
        let (first, second) = self.pair(key);
        loop {
            let mut conflict = false;
            for bucket in [first, second] {
                match self.probe(bucket, key, now) {
                    Probe::Found(location) => return Some(Held { location, pin: PhantomData }),
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
        let (first, second) = self.pair(key);
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

    /// Links a key to a location whose row is already written. If both of its buckets are full and `coldness`
    /// is given, the coldest entry by key and age is replaced. An entry of the same key is replaced unless
    /// `same` accepts its location.
    pub(crate) fn insert(
        &self,
        entry: Entry,
        coldness: Option<&dyn Fn(FlatKey, u32) -> u64>,
        same: impl FnOnce(Held<'_>) -> bool,
    ) -> Link {
        let Entry { key, location, now } = entry;
        debug_assert!(key != EMPTY && key != TOMBSTONE);
        let (first, second) = self.pair(key);
        let _guards = self.lock(first, second);
        let (first, second) = (&self.buckets.all()[first], &self.buckets.all()[second]);
        if let Some(slot) = first.find(key).or_else(|| second.find(key)) {
            if same(slot.held()) {
                return Link::Present;
            }
            let unlinked = unlink(slot, TOMBSTONE);
            link(slot, key, location, now);
            return Link::Replaced(unlinked);
        }
        let emptier = if second.vacancies() > first.vacancies() { second } else { first };
        if let Some(slot) = emptier.find(EMPTY) {
            link(slot, key, location, now);
            self.entries.fetch_add(1, Ordering::Relaxed);
            return Link::New;
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
                Link::Replaced(unlinked)
            }
            None => Link::Full,
        }
    }

    /// Applies `fate`, given key, location and age, to each entry of a bucket. Passes unlinked entries to
    /// `unlinked`.
    pub(crate) fn evict(
        &self,
        bucket: usize,
        now: Stamp,
        mut fate: impl FnMut(FlatKey, Held<'_>, u32) -> Fate,
        mut unlinked: impl FnMut(Unlinked),
    ) {
        let _guards = self.lock(bucket, bucket);
        for slot in &self.buckets.all()[bucket].0 {
            let (key, word) = (slot.key.load(Ordering::Relaxed), slot.word.load(Ordering::Relaxed));
            if key == EMPTY.0 {
                continue;
            }
            let key = FlatKey(key);
            match fate(key, slot.held(), now.age(stamp_of(word))) {
                Fate::Stay => {}
                Fate::Leave => {
                    unlinked(unlink(slot, EMPTY));
                    self.entries.fetch_sub(1, Ordering::Relaxed);
                }
                Fate::Move(location) => {
                    unlinked(unlink(slot, TOMBSTONE));
                    link(slot, key, location, stamp_of(word));
                }
            }
        }
    }

    /// Unlinks a key if `victim` accepts its location.
    pub(crate) fn remove(&self, key: FlatKey, victim: impl FnOnce(Held<'_>) -> bool) -> Option<Unlinked> {
        let (first, second) = self.pair(key);
        let _guards = self.lock(first, second);
        let (first, second) = (&self.buckets.all()[first], &self.buckets.all()[second]);
        let slot = first.find(key).or_else(|| second.find(key)).filter(|slot| victim(slot.held()))?;
        self.entries.fetch_sub(1, Ordering::Relaxed);
        Some(unlink(slot, EMPTY))
    }

    /// Whether a key is linked and `same` accepts its location. Does not renew its stamp.
    pub(crate) fn contains(&self, key: FlatKey, same: impl FnOnce(Held<'_>) -> bool) -> bool {
        let (first, second) = self.pair(key);
        let _guards = self.lock(first, second);
        let (first, second) = (&self.buckets.all()[first], &self.buckets.all()[second]);
        first.find(key).or_else(|| second.find(key)).is_some_and(|slot| same(slot.held()))
    }

    /// Keys, locations and ages of a bucket's entries, read without a lock: they may be inconsistent.
    pub(crate) fn ages(&self, bucket: usize, now: Stamp) -> impl Iterator<Item = (FlatKey, Location, u32)> {
        self.buckets.all()[bucket].0.iter().filter_map(move |slot| {
            let key = FlatKey(slot.key.load(Ordering::Relaxed));
            let live = key.0 > TOMBSTONE.0;
            let word = slot.word.load(Ordering::Relaxed);
            live.then(|| (key, location_of(word), now.age(stamp_of(word))))
        })
    }

    /// A key's two buckets, which may be the same. The hash's halves are mapped by multiplication, so the
    /// number of buckets is arbitrary.
    #[inline]
    fn pair(&self, key: FlatKey) -> (usize, usize) {
        let (hash, buckets) = (mix64(key), self.buckets.all().len() as u64);
        let (high, low) = (hash >> 32, hash & 0xFFFF_FFFF);
        (((high * buckets) >> 32) as usize, ((low * buckets) >> 32) as usize)
    }

    fn lock(&self, a: usize, b: usize) -> (MutexGuard<'_, ()>, Option<MutexGuard<'_, ()>>) {
        let (a, b) = (a % self.locks.len(), b % self.locks.len());
        let one = |stripe: usize| self.locks[stripe].lock().unwrap_or_else(PoisonError::into_inner);
        (one(a.min(b)), (a != b).then(|| one(a.max(b))))
    }
}

/// Entries that an index of `buckets` buckets may have.
#[must_use]
pub(crate) fn capacity(buckets: usize) -> u64 {
    ((buckets * SLOTS) as f64 * LOAD) as u64
}

/// Inserts a key. With `replace`, a full bucket evicts its longest unused entry.
#[cfg(test)]
fn tests_insert(index: &Index, key: u64, offset: u64, batch: u64, replace: bool) -> Link {
    let entry = Entry { key: FlatKey(key), location: Location::slot(offset), now: Stamp::of(batch) };
    let coldness = |_, age| u64::from(age);
    index.insert(entry, replace.then_some(&coldness), |_| true)
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;

#[cfg(test)]
#[cfg(flechette_loom)]
mod models;
