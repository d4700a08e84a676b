//! The definition of gather-pool, the last step of the embedding layer: it makes a model's input from rows.
//!
//! For every lookup of every sample, the rows of the sample's ids are added in id order. The sum is written
//! to the lookup's columns of the sample's output row, behind the dense values. Rows are deduplicated: each
//! occurrence (one id of one sample) refers to a unique row by its number.
//!
//! On a device one launch pools all lookups of a batch, by self-identified fusion (FLECHE section 3.2). Each
//! lookup is a segment of `samples x dim` threads, rounded up to whole warps. A warp finds its segment in the
//! prefix sum of the segments' warps. [`KernelLookup`] is read by the kernel, so its fields equal those in
//! `kernels/gather_pool.cu`.
//!
//! Every implementation gives the same bits, those of [`super::gather_pool::gather_pool`]. The sum of a bag
//! starts as its first row; the others are added one by one in f32. An absent row is +0 if it is the first,
//! and adds nothing otherwise. A mean divides the sum by the bag's count, absent ids included. An empty bag
//! is +0. f16 elements convert to f32 exactly. int8 elements are `q * scale + bias`, where the product is
//! rounded before the sum, never fused (`types::element`).

use crate::schema::Pooling;
#[cfg(doc)]
use crate::types::Element;

/// Threads of a warp.
pub(crate) const WARP_LANES: u32 = 32;

/// Most lookups in one launch: their prefix sum uses at most 32 KiB of a block's 48 KiB of shared memory.
pub(crate) const MAX_LOOKUPS: usize = 8_190;

/// One lookup, in the layout that the kernel reads.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct KernelLookup {
    /// Index of its first bag bound among those of the batch. A lookup has `samples + 1` bounds.
    pub offsets_at: u32,
    /// Index of its first occurrence among those of the batch. Bag bounds count from this occurrence.
    pub occurrences_at: u32,
    /// Elements per row.
    pub dim: u32,
    /// First column in an output row.
    pub column: u32,
    /// [`pooling_code`]: 0 sum, 1 mean.
    pub pooling: u32,
    /// [`Element::code`] of its rows.
    pub element: u32,
}

/// The number that kernels use for a pooling.
#[must_use]
pub(crate) fn pooling_code(pooling: Pooling) -> u32 {
    match pooling {
        Pooling::Sum => 0,
        Pooling::Mean => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lookup_has_the_size_of_the_kernels_struct() {
        assert_eq!(size_of::<KernelLookup>(), 24);
    }
}
