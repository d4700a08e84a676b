//! Launches of the cache's kernels, one function per kernel.
//!
//! The functions are unsafe because an address is only a number here. The callers own the memory and have
//! checked the requirements of the kernels: [`super::table`] for the index and the pool, [`super::context`]
//! for a batch.

#![allow(unsafe_code)]

use bytemuck::bytes_of;

use super::args::{CopyArgs, ListArgs, ProbeArgs, ReplaceArgs, SampleArgs, SweepArgs};
use crate::compute::pool::WARP_LANES;
use crate::device::cuda::launch::{blocks, shape};
use crate::device::cuda::{Driver, DriverError};

/// Probes the index for a batch.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]. The columns' ids and occurrences lie within their arrays, and the scan is the
/// prefix sum of the columns' warps. The number of slots of the scratch table is a power of two and at least
/// twice the number of occurrences. All generations in it are older than the header's.
pub(crate) unsafe fn probe<D: Driver>(
    d: &D,
    s: &D::Stream,
    blocks: u32,
    args: &ProbeArgs,
) -> Result<(), DriverError> {
    let shape = shape(blocks, args.column_count as usize + 1);
    // SAFETY: the arguments have the kernel's layout; the caller ensures the rest.
    unsafe { d.launch(s, "probe", shape, bytes_of(args)) }
}

/// Copies a batch's hits out of the pool.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]. The launch follows the batch's probe in the same stream.
pub(crate) unsafe fn copy_rows<D: Driver>(
    d: &D,
    s: &D::Stream,
    blocks: u32,
    args: &CopyArgs,
) -> Result<(), DriverError> {
    let shape = shape(blocks, args.column_count as usize + 1);
    // SAFETY: the arguments have the kernel's layout; the caller ensures the rest.
    unsafe { d.launch(s, "copy_rows", shape, bytes_of(args)) }
}

/// Copies the jobs' rows into their slots.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]. The jobs' slots lie within the pool, and no batch reads them.
pub(crate) unsafe fn copy_in<D: Driver>(d: &D, s: &D::Stream, args: &ReplaceArgs) -> Result<(), DriverError> {
    // SAFETY: the arguments have the kernel's layout; the caller ensures the rest.
    unsafe { d.launch(s, "copy_in", shape(blocks(d, args.count), 0), bytes_of(args)) }
}

/// Links the jobs' keys.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]. The launch follows [`copy_in`] of the same jobs, in the only stream that changes
/// the index. The keys of jobs are distinct, and keys to link are above TOMBSTONE.
pub(crate) unsafe fn link_keys<D: Driver>(
    d: &D,
    s: &D::Stream,
    args: &ReplaceArgs,
) -> Result<(), DriverError> {
    let blocks = blocks(d, args.count.div_ceil(WARP_LANES));
    // SAFETY: the arguments have the kernel's layout; the caller ensures the rest.
    unsafe { d.launch(s, "link_keys", shape(blocks, 0), bytes_of(args)) }
}

/// Samples the ages of entries.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]. `ages` has 8 words per bucket.
pub(crate) unsafe fn sample_ages<D: Driver>(
    d: &D,
    s: &D::Stream,
    args: &SampleArgs,
) -> Result<(), DriverError> {
    let warps = args.count.saturating_mul(8).div_ceil(WARP_LANES);
    // SAFETY: the arguments have the kernel's layout; the caller ensures the rest.
    unsafe { d.launch(s, "sample_ages", shape(blocks(d, warps), 0), bytes_of(args)) }
}

/// Unlinks old entries, entries of draining slabs, or pointers.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`], in the only stream that changes the index. `evicted` has room for `most` entries.
pub(crate) unsafe fn sweep<D: Driver>(d: &D, s: &D::Stream, args: &SweepArgs) -> Result<(), DriverError> {
    let warps = args.stretch.saturating_mul(8).div_ceil(WARP_LANES);
    // SAFETY: the arguments have the kernel's layout; the caller ensures the rest.
    unsafe { d.launch(s, "sweep", shape(blocks(d, warps), 0), bytes_of(args)) }
}

/// Lists the entries of some buckets.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`], in the only stream that changes the index. `listed` has room for 8 entries per
/// bucket, and the pool has `pool_words` words.
pub(crate) unsafe fn list_entries<D: Driver>(
    d: &D,
    s: &D::Stream,
    args: &ListArgs,
) -> Result<(), DriverError> {
    let warps = args.count.saturating_mul(8).div_ceil(WARP_LANES);
    // SAFETY: the arguments have the kernel's layout; the caller ensures the rest.
    unsafe { d.launch(s, "list_entries", shape(blocks(d, warps), 0), bytes_of(args)) }
}
