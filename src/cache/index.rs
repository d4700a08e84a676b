//! The index: from flat key to location, read without a lock.
//!
//! Buckets are lines of 128 bytes: eight slots of two words. The first word is the key. The second
//! packs the location (40 bits) and a stamp (24 bits) of when the entry was last used, which is the
//! clock of approximate LRU. A key may lie in one of two buckets, both given by its hash, and in any
//! slot of them, so a lookup reads at most two lines; an insert takes the emptier bucket, which keeps
//! buckets even enough to be filled to 0.8. Entries never move while they are linked.
//!
//! **Writers** (insert, evict) hold the locks of the buckets they change: plain mutexes, striped,
//! always taken in ascending order. **Readers** take none. A writer links an entry by storing the
//! second word, then the key; it unlinks by storing another key and leaves the second word as it is.
//! A reader loads word, key and word again, once it has seen its key:
//!
//! - a changed key means that the entry went away: it probes again;
//! - a changed location means that another entry took the slot between: it probes again;
//! - a changed stamp means that someone else found the entry too, which is no conflict.
//!
//! **Why a reader's location is its key's.** The reader holds a pin (`epoch.rs`), so a location that it
//! saw linked is not linked anew before the pin ends: equal locations in both words are of one linking,
//! call it L. Having read a word that L stored, by acquire, the key that it reads next is L's or a
//! later one. Having read that key, by acquire, its last word is that linking's or a later one's; but it
//! is L's. So the key is L's. And a location can only be seen stale, from a linking that ended before the
//! pin began, together with a key from before that end, which the pin's own ordering rules out.
//!
//! A location in host memory may well be linked anew, under another key, while a pin lasts. It says no more than
//! that a row is there: which row, the reader knows of itself, and never takes from the location.
//!
//! A touch is one compare-exchange of the second word that changes the stamp alone; where it fails, the
//! entry went or was touched by someone else, and nothing is lost. A stamp of the last few batches ([`FRESH`]) is left
//! as it is: cores that find the same hot rows would else hand their lines to each other in every batch, only to
//! write. Stamps wrap after 2^24 batches: an entry that nobody used for just so long passes for a young one, once.

#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::sync::PoisonError;

use super::epoch::Pin;
use super::key::{EMPTY, TOMBSTONE, mix64};
use crate::mem::prefetch::prefetch;
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering, yield_now};
use crate::types::FlatKey;

/// Slots a bucket. Under loom few, because each is a thing that may interleave.
pub(crate) const SLOTS: usize = if cfg!(flechette_loom) { 2 } else { 8 };
/// Bytes a bucket.
pub(crate) const BUCKET_BYTES: usize = 128;
/// The share of slots that may be in use.
pub(crate) const LOAD: f64 = 0.8;

const LOCATION_BITS: u32 = 40;
const LOCATION_MASK: u64 = (1 << LOCATION_BITS) - 1;
const STAMP_MASK: u64 = (1 << (u64::BITS - LOCATION_BITS)) - 1;
/// A stamp that is at most so many batches old is not renewed. An entry so passes for at most so much older than it
/// is: nothing to an eviction that puts out what was unused for many times that, as it does where the cache holds
/// the rows of many batches. Where it holds hardly those of one, each step more costs hits
/// (`benches/hit_rates`, batches of 256), and a row that every batch asks for is already written in every third only.
/// The rule and the number of `FRESH` in kernels/probe.cu.
pub const FRESH: u32 = 2;
/// How far batches may overtake each other.
const AHEAD: u64 = 1 << 16;
/// Most locks; fewer where there are fewer buckets.
const STRIPES: usize = if cfg!(flechette_loom) { 2 } else { 1024 };

/// Where a row is: an offset into the pool, or a row in host memory (the unified index, later).
/// The lowest bit says which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Location(u64);

impl Location {
    /// Offsets are below this.
    pub(crate) const OFFSETS: u64 = 1 << (LOCATION_BITS - 1);

    /// A slot of the pool, in units of 4 bytes from its start; below [`Self::OFFSETS`].
    #[must_use]
    pub(crate) fn slot(offset: u64) -> Self {
        debug_assert!(offset < Self::OFFSETS);
        Self(offset << 1)
    }

    /// Row `id` of its key's table in host memory, an entry of the unified index; below
    /// [`Self::OFFSETS`].
    #[must_use]
    pub(crate) fn host(id: u64) -> Self {
        debug_assert!(id < Self::OFFSETS);
        Self(id << 1 | 1)
    }

    /// The offset of a slot of the pool, in units of 4 bytes.
    #[must_use]
    pub(crate) fn offset(self) -> u64 {
        self.0 >> 1
    }

    /// The location of these bits, as a device reports them.
    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(bits & LOCATION_MASK)
    }

    /// As a device has it.
    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    /// Whether the row lies in host memory and not in the pool.
    #[must_use]
    pub(crate) fn is_host(self) -> bool {
        self.0 & 1 == 1
    }
}

/// When an entry was used: the low 24 bits of a batch's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp(u64);

impl Stamp {
    /// The stamp of a batch.
    #[must_use]
    pub(crate) fn of(batch: u64) -> Self {
        Self(batch & STAMP_MASK)
    }

    /// How many batches ago `earlier` was. The stamp of a batch with a larger number, which may well
    /// run before one with a smaller, is age 0.
    #[must_use]
    pub(crate) fn age(self, earlier: Stamp) -> u32 {
        let age = self.0.wrapping_sub(earlier.0) & STAMP_MASK;
        if age > STAMP_MASK - AHEAD { 0 } else { age as u32 }
    }
}

fn pack(location: Location, stamp: Stamp) -> u64 {
    location.0 | stamp.0 << LOCATION_BITS
}

fn location_of(word: u64) -> Location {
    Location(word & LOCATION_MASK)
}

fn stamp_of(word: u64) -> Stamp {
    Stamp(word >> LOCATION_BITS)
}

#[repr(C)]
#[derive(Debug)]
struct Slot {
    key: AtomicU64,
    word: AtomicU64,
}

#[repr(C, align(128))]
#[derive(Debug)]
struct Bucket([Slot; SLOTS]);

/// A location that was found: by a lookup, as long as the pin it was found under, or by a writer, as long as
/// it has the bucket's lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held<'p> {
    location: Location,
    pin: PhantomData<&'p Pin<'p>>,
}

impl<'p> Held<'p> {
    /// What batch `found_by` found, held again through the same batch's pin.
    ///
    /// # Panics
    /// Where the pin is another batch's: its location may have been used anew.
    #[inline]
    #[must_use]
    pub(crate) fn again(location: Location, found_by: u64, pin: &'p Pin<'_>) -> Self {
        assert_eq!(found_by, pin.number(), "a location is read under the pin it was found under");
        Self { location, pin: PhantomData }
    }

    /// The location.
    #[inline]
    #[must_use]
    pub(crate) fn location(self) -> Location {
        self.location
    }
}

/// An entry that left the index. Its location may be read by batches that are pinned now, and is
/// linked no more. Only the index makes these, and they cannot be copied.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unlinked {
    /// The key it had.
    pub key: FlatKey,
    location: Location,
}

impl Unlinked {
    /// A slot that batches found elsewhere than in this index (the overlay of a version, a device's index),
    /// and find no more.
    pub(crate) fn withdrawn(key: FlatKey, location: Location) -> Self {
        Self { key, location }
    }

    /// Where its row still is.
    #[must_use]
    pub(crate) fn location(&self) -> Location {
        self.location
    }
}

/// What is to be linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The key, neither empty nor a tombstone.
    pub key: FlatKey,
    /// Where its row is.
    pub location: Location,
    /// When it was used.
    pub now: Stamp,
}

/// What an entry is to become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It stays.
    Stay,
    /// It is found no more.
    Leave,
    /// It is found at another location.
    Move(Location),
}

/// What came of an insert.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Link {
    /// The key is found from now on.
    New,
    /// The key is found from now on, and the coldest entry of its two buckets no longer.
    Replaced(Unlinked),
    /// The key was there already; nothing changed.
    Present,
    /// Both buckets are full and nothing was to be replaced.
    Full,
}

/// The index.
#[derive(Debug)]
pub(crate) struct Index {
    buckets: memory::Buckets,
    locks: Box<[Mutex<()>]>,
    entries: AtomicU64,
}

impl Index {
    /// An empty index of `buckets` lines, 1 to 2^32.
    ///
    /// # Errors
    /// The system's, where it refuses the memory.
    pub(crate) fn new(buckets: usize) -> io::Result<Self> {
        let stripes = buckets.min(STRIPES);
        Ok(Self {
            buckets: memory::Buckets::new(buckets)?,
            locks: (0..stripes).map(|_| Mutex::new(())).collect(),
            entries: AtomicU64::new(0),
        })
    }

    /// How many buckets there are.
    #[must_use]
    pub(crate) fn buckets(&self) -> usize {
        self.buckets.all().len()
    }

    /// How many entries there may be at a load of [`LOAD`].
    #[must_use]
    pub(crate) fn capacity(&self) -> u64 {
        capacity(self.buckets())
    }

    /// How many entries there are.
    #[must_use]
    pub(crate) fn entries(&self) -> u64 {
        self.entries.load(Ordering::Relaxed)
    }

    /// The location of a key, which is stamped as used `now`.
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

    /// Asks the processor to fetch a key's lines.
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

    /// Links a key to a location whose row is already written. Where both of its buckets are full,
    /// the entry coldest by key and age makes room, if `coldness` is given. An entry of the key itself is replaced unless
    /// `same` says, of its location, that it is as good.
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
            let cold = |slot: &&Slot| {
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

    /// Does with each entry of a bucket what `fate` says by key, location and age, and hands out what was
    /// unlinked.
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

    /// Unlinks a key if `victim` says so of its location.
    pub(crate) fn remove(&self, key: FlatKey, victim: impl FnOnce(Held<'_>) -> bool) -> Option<Unlinked> {
        let (first, second) = self.pair(key);
        let _guards = self.lock(first, second);
        let (first, second) = (&self.buckets.all()[first], &self.buckets.all()[second]);
        let slot = first.find(key).or_else(|| second.find(key)).filter(|slot| victim(slot.held()))?;
        self.entries.fetch_sub(1, Ordering::Relaxed);
        Some(unlink(slot, EMPTY))
    }

    /// Whether a key is there, without using it, and `same` says so of its location.
    pub(crate) fn contains(&self, key: FlatKey, same: impl FnOnce(Held<'_>) -> bool) -> bool {
        let (first, second) = self.pair(key);
        let _guards = self.lock(first, second);
        let (first, second) = (&self.buckets.all()[first], &self.buckets.all()[second]);
        first.find(key).or_else(|| second.find(key)).is_some_and(|slot| same(slot.held()))
    }

    /// Keys, locations and ages of a bucket's entries, as good as they can be had without a lock.
    pub(crate) fn ages(&self, bucket: usize, now: Stamp) -> impl Iterator<Item = (FlatKey, Location, u32)> {
        self.buckets.all()[bucket].0.iter().filter_map(move |slot| {
            let key = FlatKey(slot.key.load(Ordering::Relaxed));
            let live = key.0 > TOMBSTONE.0;
            let word = slot.word.load(Ordering::Relaxed);
            live.then(|| (key, location_of(word), now.age(stamp_of(word))))
        })
    }

    /// A key's two buckets, which may be one. The hash's halves are mapped by multiplication, so that
    /// any number of buckets will do.
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

/// Entries that an index of so many buckets may have.
#[must_use]
pub(crate) fn capacity(buckets: usize) -> u64 {
    ((buckets * SLOTS) as f64 * LOAD) as u64
}

enum Probe {
    Found(Location),
    Absent,
    Changed,
}

/// Stamps a slot whose second word was `word`, unless its stamp is fresh.
#[inline]
fn touch(slot: &Slot, word: u64, now: Stamp) {
    if now.age(stamp_of(word)) > FRESH {
        let stamped = pack(location_of(word), now);
        // Failing is fine, and the order is the writer's: a read-modify-write carries it on.
        let _ = slot.word.compare_exchange(word, stamped, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Under the bucket's lock.
fn link(slot: &Slot, key: FlatKey, location: Location, now: Stamp) {
    // A swap and not a store: having read the last touch, it comes after it by any reckoning. (C++ orders
    // a plain store after the touch too, since a touch directly follows the word that it changes; loom
    // does not know that rule, and would show a reader the touched word of the entry before.)
    slot.word.swap(pack(location, now), Ordering::AcqRel);
    slot.key.store(key.0, Ordering::Release);
}

/// Under the bucket's lock. The location cannot change; the stamp may, and does not matter.
fn unlink(slot: &Slot, to: FlatKey) -> Unlinked {
    let unlinked = Unlinked {
        key: FlatKey(slot.key.load(Ordering::Relaxed)),
        location: location_of(slot.word.load(Ordering::Relaxed)),
    };
    slot.key.store(to.0, Ordering::Release);
    unlinked
}

impl Slot {
    /// Under the bucket's lock, without which the slot's entry is not unlinked, and as long.
    fn held(&self) -> Held<'_> {
        Held { location: location_of(self.word.load(Ordering::Relaxed)), pin: PhantomData }
    }
}

impl Bucket {
    /// Under the bucket's lock.
    fn find(&self, key: FlatKey) -> Option<&Slot> {
        self.0.iter().find(|slot| slot.key.load(Ordering::Relaxed) == key.0)
    }

    /// Under the bucket's lock.
    fn vacancies(&self) -> usize {
        self.0.iter().filter(|slot| slot.key.load(Ordering::Relaxed) == EMPTY.0).count()
    }
}

/// The buckets' memory: fresh pages of the system, huge where it has them.
#[cfg(not(flechette_loom))]
mod memory {
    use super::{BUCKET_BYTES, Bucket};
    use std::io;

    const _: () = assert!(size_of::<Bucket>() == BUCKET_BYTES);

    #[derive(Debug)]
    pub(crate) struct Buckets {
        memory: memmap2::MmapRaw,
        count: usize,
    }

    impl Buckets {
        pub(crate) fn new(count: usize) -> io::Result<Self> {
            let memory = crate::mem::huge_pages(count * BUCKET_BYTES)?;
            Ok(Self { memory: memory.into(), count })
        }

        #[inline]
        pub(crate) fn all(&self) -> &[Bucket] {
            // SAFETY: the mapping is private to `self` and as long as `count` buckets; pages are
            // aligned to more than 128 and begin as zeros, which is a bucket of empty slots. Buckets
            // are atomics, so that sharing them is all that is ever needed.
            unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.count) }
        }
    }
}

/// loom's atomics are larger than their value and must be made one by one.
#[cfg(flechette_loom)]
mod memory {
    use super::{AtomicU64, Bucket, EMPTY, Slot};
    use std::io;

    #[derive(Debug)]
    pub(crate) struct Buckets(Vec<Bucket>);

    impl Buckets {
        pub(crate) fn new(count: usize) -> io::Result<Self> {
            let slot = |_| Slot { key: AtomicU64::new(EMPTY.0), word: AtomicU64::new(0) };
            Ok(Self((0..count).map(|_| Bucket(std::array::from_fn(slot))).collect()))
        }

        pub(crate) fn all(&self) -> &[Bucket] {
            &self.0
        }
    }
}

/// Inserts, and puts out the longest unused if need be.
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
