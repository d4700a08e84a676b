//! Grid sizes, and the launch of gather-pool, which the cache and the trainer share.

#![allow(unsafe_code)]

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

/// Defines functions that launch kernels of the same names: the driver, the argument, sometimes a number of
/// blocks or warps, and the launch's shape.
macro_rules! launches {
    ($(
        $(#[$doc:meta])* $name:ident($d:ident, $args:ident: $type:ty $(, $number:ident)?) $shape:expr;
    )+) => {$(
        $(#[$doc])*
        pub(crate) unsafe fn $name<D: Driver>(
            $d: &D,
            stream: &D::Stream,
            $($number: u32,)?
            $args: &$type,
        ) -> Result<(), DriverError> {
            // SAFETY: the arguments have the layout of the kernel's parameter; the caller ensures the rest.
            unsafe { $d.launch(stream, stringify!($name), $shape, bytemuck::bytes_of($args)) }
        }
    )+};
}
pub(crate) use launches;

launches! {
/// Launches gather-pool for a batch.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]. Places and owners were written by operations before this one on the stream. Bags
/// and columns satisfy the conditions of [`crate::compute::pool`]. If `staged` equals the number of misses,
/// `rows` has an address for each miss.
gather_pool(d, args: PoolArgs, blocks) shape(blocks, args.lookup_count as usize + 2);
}
