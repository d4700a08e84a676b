//! Grid sizes, and the launch of gather-pool, which the cache and the trainer share.

#![allow(unsafe_code)]

use bytemuck::bytes_of;

use super::{Driver, DriverError, LaunchShape};
use crate::compute::pool::WARP_LANES;
use crate::device::cuda::pool_args::PoolArgs;

/// Threads per block.
const THREADS: u32 = 128;
/// Approximate number of blocks that are resident on one multiprocessor.
const BLOCKS_EACH: u32 = 16;

/// The shape of a launch with `shared_words` words of dynamic shared memory.
#[must_use]
pub(crate) fn shape(blocks: u32, shared_words: usize) -> LaunchShape {
    LaunchShape { blocks, threads: THREADS, shared_bytes: (shared_words * size_of::<u32>()) as u32 }
}

/// The number of blocks for `warps` warps. At most as many as the device can hold at a time: each warp loops
/// over its share.
#[must_use]
pub(crate) fn blocks<D: Driver>(driver: &D, warps: u32) -> u32 {
    let most = driver.multiprocessors().saturating_mul(BLOCKS_EACH).max(1);
    // A power of two, so that batches of similar size use the same graph.
    warps.div_ceil(THREADS / WARP_LANES).max(1).next_power_of_two().min(most)
}

/// Launches gather-pool for a batch.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]. Places and owners were written by operations before this one on the stream. Bags
/// and columns satisfy the conditions of [`crate::compute::pool`]. If the header's `staged` equals the number
/// of misses, `rows` has an address for each miss.
pub(crate) unsafe fn gather_pool<D: Driver>(
    d: &D,
    s: &D::Stream,
    blocks: u32,
    args: &PoolArgs,
) -> Result<(), DriverError> {
    let shape = shape(blocks, args.lookup_count as usize + 2);
    // SAFETY: `PoolArgs` has the layout of the kernel's parameter; the caller guarantees the rest.
    unsafe { d.launch(s, "gather_pool", shape, bytes_of(args)) }
}
