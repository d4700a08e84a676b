//! The parameter of the kernel `gather_pool`, for the cache and the trainer. Structs have the fields of the
//! structs in `kernels/common.cuh` and `kernels/gather_pool.cu`.

use bytemuck::{Pod, Zeroable};

#[cfg(doc)]
use crate::compute::pool::PoolLookup;

#[cfg(test)]
mod tests;

/// A place is a u64 whose upper three bits are its kind. This kind: the lower bits are the number of a miss.
#[cfg(feature = "cusim")]
pub(crate) const AT_MISS: u64 = 1 << 61;
/// Kind of a place: an absent row.
pub(crate) const AT_NOTHING: u64 = 4 << 61;

/// `BatchHeader` of common.cuh: the host's input to a batch's kernels besides the data.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct BatchHeader {
    /// The batch's number; rows that it uses get it as their stamp.
    pub now: u64,
    /// Address of the overlay that the probe searches before the index; 0 for none.
    pub overlay: u64,
    /// Slots of the overlay, which are a power of two, minus one.
    pub overlay_mask: u64,
    /// Generation of the deduplication table's entries; never 0.
    pub generation: u32,
    pub samples: u32,
    /// Misses whose rows are staged.
    pub staged: u32,
    /// Padding, 0.
    pub unused: u32,
}

/// `BatchState` of common.cuh: what a batch's kernels leave for each other.
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
    /// Padding, 0.
    pub unused: u32,
}

/// The parameter of the kernel `gather_pool`. All fields but the last four are device addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct PoolArgs {
    /// [`BatchHeader`].
    pub header: u64,
    /// [`BatchState`].
    pub state: u64,
    /// `lookup_count` elements of [`PoolLookup`].
    pub lookups: u64,
    /// `lookup_count + 2` u32: the exclusive prefix sum of the segments' warps, for each lookup, for the
    /// dense values, and the total.
    pub scan: u64,
    /// u32: the bag bounds of all lookups.
    pub offsets: u64,
    /// u64: the place of each occurrence, written by the probe.
    pub places: u64,
    /// u32: the owner of each occurrence.
    pub owners: u64,
    /// u64: the address of each missed row, a multiple of 4; 0 for an absent row, which reads as zeros.
    pub rows: u64,
    /// The cache's row memory.
    pub pool: u64,
    /// Base address of rows in host memory.
    pub host: u64,
    /// The batch's copy buffer.
    pub copies: u64,
    /// f32, `samples x dense_width`.
    pub dense: u64,
    /// f32, `samples x stride`: the output.
    pub out: u64,
    /// Number of lookups.
    pub lookup_count: u32,
    /// Dense values per sample.
    pub dense_width: u32,
    /// Elements from one output row to the next.
    pub stride: u32,
    /// Padding, 0.
    pub unused: u32,
}
