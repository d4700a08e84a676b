//! What the kernel `gather_pool` is given, by the cache and by the trainer: field for field as in `kernels/`.

use bytemuck::{Pod, Zeroable};

#[cfg(doc)]
use crate::compute::pool::{Pool, PoolLookup};

#[cfg(test)]
mod tests;

/// The kind of a place, in its upper three bits: the number of a miss.
pub(crate) const AT_MISS: u64 = 1 << 61;
/// The kind of the place of an absent row.
pub(crate) const AT_NOTHING: u64 = 4 << 61;

/// `BatchHeader` of common.cuh: what changes from batch to batch besides the data.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct BatchHeader {
    /// The batch's number, which is its stamp.
    pub now: u64,
    /// The overlay that the batch asks before the index; 0 for none.
    pub overlay: u64,
    /// The overlay's slots, a power of two, less one.
    pub overlay_mask: u64,
    /// Of the deduplication; never 0.
    pub generation: u32,
    /// How many samples.
    pub samples: u32,
    /// Rows of misses that are there.
    pub staged: u32,
    /// Zero.
    pub unused: u32,
}

/// `BatchState` of common.cuh: what a batch's kernels leave each other.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct BatchState {
    /// 0 between launches.
    pub cursor: u32,
    /// 0 between launches.
    pub pointed: u32,
    /// 0 between launches.
    pub blocks: u32,
    /// Misses of the last probe.
    pub misses: u32,
    /// Words of the copy buffer in use.
    pub copied: u32,
    /// Zero.
    pub unused: u32,
}

/// The argument of the kernel `gather_pool`, by value. All but the last four fields are addresses in the
/// memory of the device that runs it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct PoolArgs {
    /// [`BatchHeader`].
    pub header: u64,
    /// [`BatchState`].
    pub state: u64,
    /// `lookup_count` of [`PoolLookup`].
    pub lookups: u64,
    /// `lookup_count + 2` u32, as [`Pool::scan`] gives them.
    pub scan: u64,
    /// u32, as [`Pool::offsets`].
    pub offsets: u64,
    /// u64: the place of each occurrence, as the probe writes them.
    pub places: u64,
    /// u32: the owner of each occurrence.
    pub owners: u64,
    /// u64: the address of each missed row, a multiple of 4; 0 is an absent row, read as zeros.
    pub rows: u64,
    /// The cache's pool.
    pub pool: u64,
    /// What rows of the host are counted from.
    pub host: u64,
    /// The batch's copy buffer.
    pub copies: u64,
    /// f32, `samples x dense_width`.
    pub dense: u64,
    /// f32, `samples x stride`: written.
    pub out: u64,
    /// How many lookups.
    pub lookup_count: u32,
    /// Dense values a sample.
    pub dense_width: u32,
    /// Elements from one output row to the next.
    pub stride: u32,
    /// Zero.
    pub unused: u32,
}
