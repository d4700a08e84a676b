//! The parameter of the kernel `gather_pool`, which the cache and the trainer launch. The structs equal those
//! in `kernels/common.cuh` and `kernels/gather_pool.cu`, field by field.

use bytemuck::{Pod, Zeroable};

#[cfg(doc)]
use crate::compute::pool::KernelLookup;

#[cfg(test)]
mod tests;

/// Kind of a place: an absent row, which reads as zeros. (A place says where the row of an occurrence is. It
/// is a u64 with a kind in the upper three bits and a value in the others.)
pub(crate) const AT_NOTHING: u64 = 4 << 61;

/// `BatchHeader` of common.cuh: written by the host before each batch, and read by all kernels of the batch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct BatchHeader {
    /// The number of the batch. It becomes the stamp of the rows that the batch uses.
    pub now: u64,
    /// Address of the overlay, a hash table of the rows that a new version changed (`cache/gpu/version.rs`);
    /// 0 for none. The probe searches it before the index.
    pub overlay: u64,
    /// Number of the overlay's slots (a power of two) minus one.
    pub overlay_mask: u64,
    /// Generation of this batch's entries in the deduplication table; never 0. Entries of older generations
    /// count as free (probe.cu).
    pub generation: u32,
    pub samples: u32,
}

/// `BatchState` of common.cuh: what a batch's kernels pass to each other, in device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct BatchState {
    /// Misses numbered so far; 0 between launches.
    pub cursor: u32,
    /// Rows found in host memory and numbered so far; 0 between launches.
    pub pointed: u32,
    /// Finished blocks; 0 between launches.
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
    /// `lookup_count` elements of [`KernelLookup`].
    pub lookups: u64,
    /// `lookup_count + 2` u32: the exclusive prefix sum of the segments' warps. It has an entry for each
    /// lookup, one for the dense values, and the total.
    pub scan: u64,
    /// u32: the bag bounds of all lookups.
    pub offsets: u64,
    /// u64: the place of each occurrence, written by the probe or, in training, by the host.
    pub places: u64,
    /// u32: the owner of each occurrence (probe.cu).
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
    /// Number of missed rows that the host has staged.
    pub staged: u32,
}
