//! Shapes of launches, and the launch of gather-pool, which the cache and the trainer share.

#![allow(unsafe_code)]

use bytemuck::bytes_of;

use super::{Driver, DriverError, LaunchShape};
use crate::compute::pool::WARP_LANES;
use crate::device::cuda::pool_args::PoolArgs;

/// Threads of a block.
const THREADS: u32 = 128;
/// Blocks a multiprocessor has at a time, about.
const BLOCKS_EACH: u32 = 16;

/// The shape of a launch of our kernels.
#[must_use]
pub(crate) fn shape(blocks: u32, shared_words: usize) -> LaunchShape {
    LaunchShape { blocks, threads: THREADS, shared_bytes: (shared_words * size_of::<u32>()) as u32 }
}

/// A grid for so many warps: no more blocks than the device has room for, because kernels loop.
#[must_use]
pub(crate) fn blocks<D: Driver>(driver: &D, warps: u32) -> u32 {
    let most = driver.multiprocessors().saturating_mul(BLOCKS_EACH).max(1);
    // A power of two, so that batches of about a size share their graph.
    warps.div_ceil(THREADS / WARP_LANES).max(1).next_power_of_two().min(most)
}

/// Pools a batch's rows.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]; after the batch's probe, in its stream. Bags and columns are as [`crate::compute::pool`]
/// asks, and `rows` has an address for each miss when the header says that they are staged.
pub(crate) unsafe fn gather_pool<D: Driver>(
    d: &D,
    s: &D::Stream,
    blocks: u32,
    args: &PoolArgs,
) -> Result<(), DriverError> {
    let shape = shape(blocks, args.lookup_count as usize + 2);
    // SAFETY: the layout is the kernel's; the rest is the caller's promise.
    unsafe { d.launch(s, "gather_pool", shape, bytes_of(args)) }
}
