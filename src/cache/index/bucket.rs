//! The memory of the index: buckets of slots, and how one slot is read and changed.

use super::entry::{Location, PinnedLocation, Stamp, Unlinked, location_of, pack, stamp_of};
use super::{BUCKET_BYTES, BucketLocks, EMPTY, FRESH, SLOTS};
use crate::sync::{AtomicU64, Ordering};
use crate::types::FlatKey;

pub(super) use memory::Buckets;

#[repr(C)]
#[derive(Debug)]
pub(super) struct IndexSlot {
    pub key: AtomicU64,
    pub word: AtomicU64,
}

#[repr(C, align(128))]
#[derive(Debug)]
pub(super) struct Bucket(pub [IndexSlot; SLOTS]);

/// The result of searching one bucket.
pub(super) enum Probe {
    Found(Location),
    Absent,
    /// A writer changed the entry meanwhile: probe again.
    Changed,
}

/// Renews the stamp of a slot whose second word was `word`, unless the stamp is fresh.
#[inline]
pub(super) fn touch(slot: &IndexSlot, word: u64, now: Stamp) {
    if now.age(stamp_of(word)) > FRESH {
        let stamped = pack(location_of(word), now);
        // The exchange may fail: then the entry was removed or another lookup stamped it. Relaxed is enough:
        // a read-modify-write continues the release sequence of the writer that linked the entry.
        let _ = slot.word.compare_exchange(word, stamped, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Links an entry. The caller holds the bucket's lock.
pub(super) fn link(slot: &IndexSlot, key: FlatKey, location: Location, now: Stamp) {
    // A swap and not a store: it reads the word of the last `touch`, so it is ordered after that `touch`. (In
    // the C++ memory model, a plain store would be too, since a `touch` directly follows the word that it
    // changes. loom lacks that rule, and would show a reader the touched word of the previous entry.)
    slot.word.swap(pack(location, now), Ordering::AcqRel);
    slot.key.store(key.0, Ordering::Release);
}

/// Unlinks an entry by storing the key `to`. The caller holds the bucket's lock, so the location cannot
/// change. The stamp may change, which does not matter.
pub(super) fn unlink(slot: &IndexSlot, to: FlatKey) -> Unlinked {
    let unlinked = Unlinked {
        key: FlatKey(slot.key.load(Ordering::Relaxed)),
        location: location_of(slot.word.load(Ordering::Relaxed)),
    };
    slot.key.store(to.0, Ordering::Release);
    unlinked
}

impl IndexSlot {
    /// The location of the slot's entry.
    ///
    /// # Safety
    /// The slot has an entry, `_locks` include the lock of its bucket, and the entry is not unlinked while
    /// the result is used.
    pub(super) unsafe fn pinned<'l>(&self, _locks: &'l BucketLocks<'_>) -> PinnedLocation<'l> {
        // SAFETY: entries are unlinked only under the lock of their bucket. The caller holds it during `'l`,
        // and guarantees the rest.
        unsafe { PinnedLocation::found(location_of(self.word.load(Ordering::Relaxed))) }
    }
}

impl Bucket {
    /// The slot of a key. Unless the caller holds the bucket's lock, the slot may be another key's at once.
    pub(super) fn find(&self, key: FlatKey) -> Option<&IndexSlot> {
        self.0.iter().find(|slot| slot.key.load(Ordering::Relaxed) == key.0)
    }

    /// The number of empty slots. The caller holds the bucket's lock.
    pub(super) fn vacancies(&self) -> usize {
        self.0.iter().filter(|slot| slot.key.load(Ordering::Relaxed) == EMPTY.0).count()
    }
}

/// The buckets' memory: zeroed pages of the system, huge pages if available.
#[cfg(not(flechette_loom))]
mod memory {
    use std::io;

    use memmap2::MmapRaw;

    use super::{BUCKET_BYTES, Bucket};
    use crate::mem::{Pages, huge_pages};

    const _: () = assert!(size_of::<Bucket>() == BUCKET_BYTES);

    #[derive(Debug)]
    pub(crate) struct Buckets {
        memory: Pages<MmapRaw>,
        count: usize,
    }

    impl Buckets {
        pub(crate) fn new(count: usize) -> io::Result<Self> {
            Ok(Self { memory: huge_pages(count * BUCKET_BYTES)?, count })
        }

        /// Gets the memory from the system now.
        pub(crate) fn prefault(&self) {
            self.memory.prefault();
        }

        #[inline]
        pub(crate) fn all(&self) -> &[Bucket] {
            // SAFETY: the mapping is private to `self` and has the length of `count` buckets. Pages are
            // aligned to more than 128 bytes and begin as zeros, which are valid buckets of empty slots.
            // Buckets consist of atomics, so shared references suffice for all accesses.
            unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.count) }
        }
    }
}

/// loom's atomics are larger than their values and must be created one by one.
#[cfg(flechette_loom)]
mod memory {
    use super::{AtomicU64, Bucket, EMPTY, IndexSlot};
    use std::io;

    #[derive(Debug)]
    pub(crate) struct Buckets(Vec<Bucket>);

    impl Buckets {
        pub(crate) fn new(count: usize) -> io::Result<Self> {
            let slot = |_| IndexSlot { key: AtomicU64::new(EMPTY.0), word: AtomicU64::new(0) };
            Ok(Self((0..count).map(|_| Bucket(std::array::from_fn(slot))).collect()))
        }

        pub(crate) fn prefault(&self) {}

        pub(crate) fn all(&self) -> &[Bucket] {
            &self.0
        }
    }
}
