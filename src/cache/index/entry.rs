//! The types that the index stores and returns: locations, stamps, entries to link, and unlinked entries.

use std::marker::PhantomData;

use super::super::epoch::Pin;
use super::AHEAD;
use crate::types::FlatKey;

const LOCATION_BITS: u32 = 40;
const LOCATION_MASK: u64 = (1 << LOCATION_BITS) - 1;
const STAMP_MASK: u64 = (1 << (u64::BITS - LOCATION_BITS)) - 1;

/// Where a row is: an offset into the pool (lowest bit 0), or a row in host memory (lowest bit 1, the unified
/// index).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Location(u64);

impl Location {
    /// Offsets are below this.
    pub(crate) const OFFSETS: u64 = 1 << (LOCATION_BITS - 1);

    /// A slot of the pool, in words from its start; below [`Self::OFFSETS`].
    #[must_use]
    pub(crate) fn slot(offset: u64) -> Self {
        debug_assert!(offset < Self::OFFSETS);
        Self(offset << 1)
    }

    /// A row in host memory: its number in the table of the entry's key, or on a device the distance of its
    /// first word from the origin of host locations; below [`Self::OFFSETS`].
    #[must_use]
    pub(crate) fn pointer(number: u64) -> Self {
        debug_assert!(number < Self::OFFSETS);
        Self(number << 1 | 1)
    }

    /// The location this many words after this one.
    #[must_use]
    pub(crate) fn after(self, words: u64) -> Self {
        Self(self.0 + (words << 1))
    }

    /// The offset of a slot of the pool, or of a word of host memory, in words.
    #[must_use]
    pub(crate) fn offset(self) -> u64 {
        self.0 >> 1
    }

    /// The location that a kernel reported.
    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(bits & LOCATION_MASK)
    }

    /// The location with these bits; `None` if they are not those of a location.
    #[must_use]
    pub(crate) fn try_from_bits(bits: u64) -> Option<Self> {
        (bits <= LOCATION_MASK).then_some(Self(bits))
    }

    /// The bits that kernels use.
    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    /// Whether the row lies in host memory and not in the pool.
    #[must_use]
    pub(crate) fn is_pointer(self) -> bool {
        self.0 & 1 == 1
    }
}

/// When an entry was last used: the low 24 bits of the batch's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp(u64);

impl Stamp {
    #[must_use]
    pub(crate) fn of(batch: u64) -> Self {
        Self(batch & STAMP_MASK)
    }

    /// How many batches ago `earlier` was. Batches may run out of order, so `earlier` may be the stamp of a
    /// batch with a larger number. Then the age is 0.
    #[must_use]
    pub(crate) fn age(self, earlier: Stamp) -> u32 {
        let age = self.0.wrapping_sub(earlier.0) & STAMP_MASK;
        if age > STAMP_MASK - AHEAD { 0 } else { age as u32 }
    }
}

pub(super) fn pack(location: Location, stamp: Stamp) -> u64 {
    location.0 | stamp.0 << LOCATION_BITS
}

pub(super) fn location_of(word: u64) -> Location {
    Location(word & LOCATION_MASK)
}

pub(super) fn stamp_of(word: u64) -> Stamp {
    Stamp(word >> LOCATION_BITS)
}

/// A location that was found and whose slot is not freed during `'p`: while the pin of the lookup that found
/// it lives, or while the writer that found it holds the bucket's lock. Only unsafe functions make one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PinnedLocation<'p> {
    location: Location,
    pin: PhantomData<&'p ()>,
}

impl<'p> PinnedLocation<'p> {
    /// # Safety
    /// The location was found under a pin that lives for `'p`, in the index or in the overlay of the batch's
    /// version, whose slots are not freed either until the batch has finished (`version.rs`). Or it was found
    /// in the index under the lock of its bucket, and the entry is not unlinked during `'p`.
    #[inline]
    pub(super) unsafe fn found(location: Location) -> Self {
        Self { location, pin: PhantomData }
    }

    /// The location that batch `found_by` found, readable again under the same batch's pin.
    ///
    /// # Panics
    /// When the pin belongs to another batch: the location may have been reused since.
    ///
    /// # Safety
    /// The batch has found the location under this pin, in the index or in the overlay of its version.
    #[inline]
    #[must_use]
    pub(crate) unsafe fn again(location: Location, found_by: u64, pin: &'p Pin<'_>) -> Self {
        assert_eq!(found_by, pin.number(), "the location was found under another batch's pin");
        // SAFETY: the caller guarantees that it was found under this pin, which lives for `'p`.
        unsafe { Self::found(location) }
    }

    #[inline]
    #[must_use]
    pub(crate) fn location(self) -> Location {
        self.location
    }
}

/// An entry that was unlinked. Batches that are pinned now may still read its location. It cannot be copied,
/// so each location is retired once.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unlinked {
    pub key: FlatKey,
    pub(super) location: Location,
}

impl Unlinked {
    /// A slot that batches could find outside this index (in the overlay of a version, in a device's index),
    /// and no longer can.
    pub(crate) fn withdrawn(key: FlatKey, location: Location) -> Self {
        Self { key, location }
    }

    #[must_use]
    pub(crate) fn location(&self) -> Location {
        self.location
    }
}

/// An entry, and how many batches ago it was last used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryAge {
    pub key: FlatKey,
    pub location: Location,
    pub age: u32,
}

/// An entry to be linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Neither [`EMPTY`](super::EMPTY) nor [`TOMBSTONE`](super::TOMBSTONE).
    pub key: FlatKey,
    pub location: Location,
    /// When it was last used.
    pub now: Stamp,
}

/// What [`Index::visit_bucket`](super::Index::visit_bucket) does with an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryDecision {
    Keep,
    Unlink,
    /// The key is linked to another location.
    Relink(Location),
}

/// The result of an insert.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum LinkOutcome {
    /// The key was linked in an empty slot.
    New,
    /// The key was linked in place of the coldest entry of its two buckets, or of its own old entry.
    Replaced(Unlinked),
    /// The key was linked already; nothing changed.
    Present,
    /// Both buckets are full and no entry may be replaced; nothing changed.
    Full,
}
