//! The arguments of the cache's kernels, field for field as in `kernels/`. Tests compare sizes and offsets.
//! Fields that are named after an array contain the array's address.

use bytemuck::{Pod, Zeroable};

use crate::cache::index::Location;

/// Slots of a bucket.
pub(crate) const SLOTS: usize = 8;
/// Bytes of a bucket. A slot has two words of 64 bits.
pub(crate) const BUCKET_BYTES: usize = SLOTS * 16;
/// The key of an empty slot.
pub(crate) const EMPTY_KEY: u64 = 0;
/// The location of a row that is not cached.
pub(crate) const NOWHERE: u64 = u64::MAX;

/// `ProbeColumn` of common.cuh: the ids that one lookup reads, and how they become own keys.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct ProbeColumn {
    /// The first own key of the lookup's table.
    pub base: u64,
    /// Rows of the table. Ids that are not below this number read as zeros.
    pub rows: u64,
    /// Index of the lookup's first id in the batch's ids.
    pub ids_at: u32,
    /// Number of the lookup's first occurrence. Occurrences are numbered lookup by lookup.
    pub occurrences_at: u32,
    /// Number of the lookup's ids.
    pub ids: u32,
    /// Words of 4 bytes in a row.
    pub row_words: u32,
}

/// `NarrowColumn` of common.cuh: how a lookup's ids become keys of an index of narrow keys.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct NarrowColumn {
    /// The first index key of the lookup's table.
    pub base: u64,
    /// The table has `2^bits` index keys.
    pub bits: u32,
    /// 1 if ids are hashed to keys, so that rows have tags; else 0.
    pub tagged: u32,
}

/// `Changed` of common.cuh: a slot of a version's overlay.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct Changed {
    /// The row's own key, or [`EMPTY_KEY`].
    pub key: u64,
    /// Bits of the row's location, or [`NOWHERE`].
    pub location: u64,
}

/// `ProbeArgs` of probe.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[allow(missing_docs)] // see probe.cu
pub(crate) struct ProbeArgs {
    pub header: u64,
    pub columns: u64,
    pub scan: u64,
    pub narrow: u64,
    pub ids: u64,
    pub index: u64,
    pub pool: u64,
    pub scratch: u64,
    pub keys: u64,
    pub owners: u64,
    pub places: u64,
    pub counts: u64,
    pub state: u64,
    pub misses: u64,
    pub pointed: u64,
    pub report: u64,
    pub buckets: u64,
    pub scratch_mask: u32,
    pub column_count: u32,
}

/// `CopyArgs` of `copy_rows.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[allow(missing_docs)] // see copy_rows.cu
pub(crate) struct CopyArgs {
    pub columns: u64,
    pub scan: u64,
    pub owners: u64,
    pub places: u64,
    pub state: u64,
    pub pool: u64,
    pub host: u64,
    pub buffer: u64,
    pub column_count: u32,
    pub capacity: u32,
}

/// What a job does if its key is in the index already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum JobKind {
    /// Keeps the entry. A pointer is replaced by the row.
    Keep = 0,
    /// Replaces the location.
    Swap = 1,
    /// Unlinks the entry. A missing key is not linked.
    Withdraw = 2,
    /// Reports the location and changes nothing. Must not be launched together with other kinds of jobs.
    Look = 3,
}

/// `ReplaceJob` of replace.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct ReplaceJob {
    /// The row's key in the index.
    pub key: u64,
    /// Bits of the row's new location.
    pub location: u64,
    /// The address of the row. If it is 0, the slot is filled with poison.
    pub row: u64,
    /// The row's own key, stored before the row, if several rows may share its key in the index; else 0.
    pub tag: u64,
    /// Words to copy.
    pub words: u32,
    /// A [`JobKind`].
    pub kind: u32,
    /// The initial age of the entry: its stamp is `now` minus this many batches.
    pub older: u32,
    /// Padding, 0.
    pub unused: u32,
}

/// What a job may evict in addition to the entry of its own row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum MayReplace {
    /// Nothing.
    Nothing = 0,
    /// Another row with its key.
    SameKey = 1,
    /// Another row with its key, or the least recently used entry of a full pair of buckets.
    Coldest = 2,
}

/// What a job did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LinkResult {
    /// The key was not present and is linked.
    New,
    /// The key was present, and the job changed nothing.
    Present,
    /// The key is linked, and the reported entry is evicted.
    Replaced,
    /// No slot for the key: both buckets are full, and the job could evict no entry.
    Full,
    /// The key has its new location; the old one is reported.
    Swapped,
    /// The key is unlinked.
    Withdrawn,
    /// The key to withdraw or to look up was not present.
    Absent,
}

/// `Outcome` of replace.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct Outcome {
    /// The key of the entry that was unlinked or looked up; else 0.
    pub key: u64,
    /// The location bits of that entry.
    pub location: u64,
    /// One of the `LINK_` numbers of replace.cu. [`Self::result`] converts it.
    pub link: u32,
    /// Padding, 0.
    pub unused: u32,
}

impl Outcome {
    /// What the job did. `None` for a number that no job writes.
    pub(crate) fn result(&self) -> Option<LinkResult> {
        use LinkResult::*;
        // In the order of the numbers.
        [New, Present, Replaced, Full, Swapped, Withdrawn, Absent].get(self.link as usize).copied()
    }
}

/// `ReplaceArgs` of replace.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[allow(missing_docs)] // see replace.cu
pub(crate) struct ReplaceArgs {
    pub jobs: u64,
    pub outcomes: u64,
    pub index: u64,
    pub pool: u64,
    pub buckets: u64,
    pub now: u64,
    pub count: u32,
    pub may_replace: u32,
}

/// `Listed` of list.cu: an entry of the index.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct Listed {
    /// 0 for a slot without an entry.
    pub key: u64,
    /// Bits of the entry's location.
    pub location: u64,
    /// The own key of the entry's row, if the rows of its table have tags.
    pub tag: u64,
    /// How many batches ago the entry was used.
    pub age: u32,
    /// Padding, 0.
    pub unused: u32,
}

/// `ListArgs` of list.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[allow(missing_docs)] // see list.cu
pub(crate) struct ListArgs {
    pub index: u64,
    pub pool: u64,
    pub listed: u64,
    pub pool_words: u64,
    pub buckets: u64,
    pub from: u64,
    pub now: u64,
    pub count: u32,
    pub drawn: u32,
}

/// `SampleArgs` of sweep.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[allow(missing_docs)] // see sweep.cu
pub(crate) struct SampleArgs {
    pub index: u64,
    pub ages: u64,
    pub buckets: u64,
    pub now: u64,
    pub draw: u64,
    pub count: u32,
    pub pointers: u32,
}

/// `Evicted` of sweep.cu: an entry that was evicted.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct Evicted {
    /// 0 if this element of the array is unused.
    pub key: u64,
    /// Bits of the location that the entry had.
    pub location: u64,
    /// 1 if the key stays linked, as a pointer to host memory.
    pub moved: u64,
}

/// The entries that a sweep evicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum VictimKind {
    /// All entries with an age of at least `threshold`.
    Aged = 0,
    /// Rows in the pool with an age of at least `threshold`. Of these, at most `pointers` rows of the tables
    /// in `pointable` become pointers.
    AgedRow = 1,
    /// The rows in the slabs of `draining`.
    InSlabs = 2,
    /// Pointers to the locations from `from` to before `to`.
    Pointer = 3,
}

/// `Pointable` of sweep.cu: a table with all rows, in order, in registered host memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct Pointable {
    /// The keys of its rows are `base + id`.
    pub base: u64,
    #[allow(missing_docs)]
    pub rows: u64,
    /// Bits of the location of row 0.
    pub first: u64,
    /// The length of a row, in words of 4 bytes.
    pub words: u64,
}

impl Pointable {
    /// Bits of the location of a row, for an id below `rows`.
    #[must_use]
    pub(crate) fn location(&self, id: u64) -> u64 {
        Location::from_bits(self.first).after(id * self.words).bits()
    }
}

/// `SweepArgs` of sweep.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[allow(missing_docs)] // see sweep.cu
pub(crate) struct SweepArgs {
    pub index: u64,
    pub draining: u64,
    pub pointable: u64,
    pub evicted: u64,
    pub counters: u64,
    pub report: u64,
    pub buckets: u64,
    pub hand: u64,
    pub now: u64,
    pub from: u64,
    pub to: u64,
    pub victims: u32,
    pub stretch: u32,
    pub threshold: u32,
    pub most: u32,
    pub slab_words: u32,
    pub pointables: u32,
    pub pointers: u32,
    pub unused: u32,
}

#[cfg(test)]
mod tests;
