//! Launches of the cache's kernels, one function per kernel.
//!
//! The functions are unsafe because an address is only a number here. The callers own the memory and have
//! checked the requirements of the kernels: [`super::table`] for the index and the pool, [`super::context`]
//! for a batch.

#![allow(unsafe_code)]

use super::args::{CopyArgs, ListArgs, ProbeArgs, ReplaceArgs, SLOTS, SampleArgs, SweepArgs};
use crate::compute::pool::WARP_LANES;
use crate::device::cuda::launch::{blocks, launches, shape};
use crate::device::cuda::{Driver, DriverError};

launches! {
/// Probes the index for a batch.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]. The columns' ids and occurrences lie within their arrays, and the scan is the
/// prefix sum of the columns' warps. The number of slots of the scratch table is a power of two and at least
/// twice the number of occurrences. All generations in it are older than the header's.
probe(d, args: ProbeArgs, blocks) shape(blocks, args.column_count as usize + 1);

/// Copies a batch's hits out of the pool.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]. The launch follows the batch's probe in the same stream.
copy_rows(d, args: CopyArgs, blocks) shape(blocks, args.column_count as usize + 1);

/// Copies the jobs' rows into their slots.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]. The jobs' slots lie within the pool, and no batch reads them.
copy_in(d, args: ReplaceArgs) shape(blocks(d, args.count), 0);

/// Links the jobs' keys.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]. The launch follows [`copy_in`] of the same jobs, in the only stream that changes
/// the index. The keys of jobs are distinct, and keys to link are above TOMBSTONE.
link_keys(d, args: ReplaceArgs) shape(blocks(d, args.count.div_ceil(WARP_LANES)), 0);

/// Samples the ages of entries.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]. `ages` has a word for each slot of the buckets.
sample_ages(d, args: SampleArgs) shape(blocks(d, warps(args.count)), 0);

/// Unlinks old entries, entries of draining slabs, or pointers.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`], in the only stream that changes the index. `evicted` has room for `most` entries.
sweep(d, args: SweepArgs) shape(blocks(d, warps(args.stretch)), 0);

/// Lists the entries of some buckets.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`], in the only stream that changes the index. `listed` has room for the slots of the
/// buckets, and the pool has `pool_words` words.
list_entries(d, args: ListArgs) shape(blocks(d, warps(args.count)), 0);
}

/// The warps for one thread per slot of these buckets.
fn warps(buckets: u32) -> u32 {
    buckets.saturating_mul(SLOTS as u32).div_ceil(WARP_LANES)
}
