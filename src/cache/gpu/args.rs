//! What the cache's kernels are given, field for field as in `kernels/`: sizes and offsets are tested, and
//! plain data so that they are passed as bytes. Fields called after what they hold are addresses.

use bytemuck::{Pod, Zeroable};

/// The key of no row.
pub const EMPTY_KEY: u64 = 0;
/// No location.
pub(crate) const NOWHERE: u64 = u64::MAX;

/// `ProbeColumn` of common.cuh: the ids that one lookup reads, and how they become keys.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct ProbeColumn {
    /// The first of its table's own keys.
    pub base: u64,
    /// Ids of the table are below.
    pub rows: u64,
    /// Where its ids begin.
    pub ids_at: u32,
    /// Where its occurrences begin.
    pub occurrences_at: u32,
    /// How many ids.
    pub ids: u32,
    /// Words of 4 bytes in a row.
    pub row_words: u32,
}

/// `NarrowColumn` of common.cuh: how a lookup's ids become keys of an index of narrow keys.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct NarrowColumn {
    /// The first key of its table's block in the index.
    pub base: u64,
    /// The block has `2^bits` keys.
    pub bits: u32,
    /// 1 where ids are hashed into them, so that rows bear tags; else 0.
    pub tagged: u32,
}

/// `Changed` of common.cuh: a slot of a version's overlay.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct Changed {
    /// Whose row, by its own key; [`EMPTY_KEY`] for none.
    pub key: u64,
    /// Bits of where it is; [`NOWHERE`] where the cache does not hold it.
    pub location: u64,
}

/// `ProbeArgs` of probe.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[allow(missing_docs)] // probe.cu has them
pub struct ProbeArgs {
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
#[allow(missing_docs)] // copy_rows.cu has them
pub struct CopyArgs {
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

/// What a job does where its key is in the index already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum JobKind {
    /// Leaves what is there, but for a pointer, which a row takes the place of.
    Keep = 0,
    /// Puts the new location in the old one's place.
    Swap = 1,
    /// Unlinks it, and links nothing where it is not.
    Withdraw = 2,
    /// Says where it is, and changes nothing. Not to be launched with other jobs.
    Look = 3,
}

/// `ReplaceJob` of replace.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct ReplaceJob {
    /// Whose row.
    pub key: u64,
    /// Where it is to be: bits of a location.
    pub location: u64,
    /// The address of the row; 0 poisons the slot.
    pub row: u64,
    /// The row's own key, which goes before it where others may have its key; else 0.
    pub tag: u64,
    /// Words to copy.
    pub words: u32,
    /// A [`JobKind`].
    pub kind: u32,
    /// How many batches before now it is linked as if used.
    pub older: u32,
    /// Zero.
    pub unused: u32,
}

/// What a job may put out besides the entry of its own row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MayReplace {
    /// Nothing.
    Nothing = 0,
    /// Another row of its key.
    SameKey = 1,
    /// That, or the longest unused entry of a full pair of buckets.
    Coldest = 2,
}

/// The key was not there and is found from now on.
pub const LINK_NEW: u32 = 0;
/// The key was there, and the job did nothing.
pub const LINK_PRESENT: u32 = 1;
/// The key is found from now on, and the entry reported no longer.
pub const LINK_REPLACED: u32 = 2;
/// There was no room for the key.
pub const LINK_FULL: u32 = 3;
/// The key is found at its new location, the old one is reported.
pub const LINK_SWAPPED: u32 = 4;
/// The key is found no more.
pub const LINK_WITHDRAWN: u32 = 5;
/// The key to be withdrawn was not there.
pub const LINK_ABSENT: u32 = 6;

/// `Outcome` of replace.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Outcome {
    /// Of the entry that left the index, or that was looked for and found; else 0.
    pub key: u64,
    /// Its location.
    pub location: u64,
    /// One of the `LINK_` numbers.
    pub link: u32,
    /// Zero.
    pub unused: u32,
}

/// `ReplaceArgs` of replace.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[allow(missing_docs)] // replace.cu has them
pub struct ReplaceArgs {
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
pub struct Listed {
    /// 0 for a slot without an entry.
    pub key: u64,
    /// Bits of its location.
    pub location: u64,
    /// The own key of its row, if its table's rows bear tags.
    pub tag: u64,
    /// How many batches ago it was used.
    pub age: u32,
    /// Zero.
    pub unused: u32,
}

/// `ListArgs` of list.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[allow(missing_docs)] // list.cu has them
pub struct ListArgs {
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
#[allow(missing_docs)] // sweep.cu has them
pub struct SampleArgs {
    pub index: u64,
    pub ages: u64,
    pub buckets: u64,
    pub now: u64,
    pub draw: u64,
    pub count: u32,
    pub pointers: u32,
}

/// `Evicted` of sweep.cu: an entry that left the index.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Evicted {
    /// 0 where the place was taken in vain.
    pub key: u64,
    /// Bits of the location that it had.
    pub location: u64,
    /// 1 where the key stays, and is found in memory of the host.
    pub moved: u64,
}

/// What a sweep puts out: everything so old.
pub(crate) const VICTIM_AGED: u32 = 0;
/// Rows of the pool that are so old; those of tables that may be pointed at become pointers.
pub(crate) const VICTIM_AGED_ROW: u32 = 1;
/// Rows that lie in some slabs.
pub(crate) const VICTIM_IN_SLABS: u32 = 2;
/// Pointers into some memory.
pub(crate) const VICTIM_POINTER: u32 = 3;

/// `Pointable` of sweep.cu: a table whose rows lie one after the other in registered memory of the host.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Pointable {
    /// Its keys are `base + id`.
    pub base: u64,
    /// For ids below.
    pub rows: u64,
    /// Bits of the location of row 0.
    pub first: u64,
    /// Words of 4 bytes of a row.
    pub words: u64,
}

impl Pointable {
    /// Bits of a row's location, of an id below `rows`.
    #[must_use]
    pub(crate) fn location(&self, id: u64) -> u64 {
        self.first + ((id * self.words) << 1)
    }
}

/// `SweepArgs` of sweep.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[allow(missing_docs)] // sweep.cu has them
pub struct SweepArgs {
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
