//! The only file that launches: a function a kernel, which knows its name, its argument and its shape.
//!
//! The functions are unsafe, because an address is only a number here. Those who own the memory call them, and
//! have checked what the kernels take for granted: [`super::tier`] for the index and the pool, [`super::lane`]
//! for a batch, [`super::scratchpad`] for a trainer's slots and `super::stepper` for its batches.

#![allow(unsafe_code)]

use bytemuck::bytes_of;

use super::args::{CopyArgs, ListArgs, ProbeArgs, ReplaceArgs, SampleArgs, SweepArgs};
use super::train_args::{RecordArgs, UpdateArgs};
use super::{Driver, DriverError, LaunchShape};
use crate::device::pool::{PoolArgs, WARP_LANES};

/// Threads of a block.
const THREADS: u32 = 128;
/// Blocks a multiprocessor has at a time, about.
const BLOCKS_EACH: u32 = 16;

/// A grid for so many warps: no more blocks than the device has room for, because kernels loop.
#[must_use]
pub fn blocks<D: Driver>(driver: &D, warps: u32) -> u32 {
    let most = driver.multiprocessors().saturating_mul(BLOCKS_EACH).max(1);
    // A power of two, so that batches of about a size share their graph.
    warps.div_ceil(THREADS / WARP_LANES).max(1).next_power_of_two().min(most)
}

fn shape(blocks: u32, shared_words: usize) -> LaunchShape {
    LaunchShape { blocks, threads: THREADS, shared_bytes: (shared_words * size_of::<u32>()) as u32 }
}

/// Probes the index for a batch.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]. The columns' ids and occurrences are within their arrays, the scan is theirs, and the
/// scratch table has twice as many slots as there are occurrences, a power of two, and no generation as new
/// as the header's.
pub unsafe fn probe<D: Driver>(
    d: &D,
    s: &D::Stream,
    blocks: u32,
    args: &ProbeArgs,
) -> Result<(), DriverError> {
    let shape = shape(blocks, args.column_count as usize + 1);
    // SAFETY: the layout is the kernel's; the rest is the caller's promise.
    unsafe { d.launch(s, "probe", shape, bytes_of(args)) }
}

/// Copies a batch's hits out of the pool.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]; after the batch's probe, in its stream.
pub unsafe fn copy_rows<D: Driver>(
    d: &D,
    s: &D::Stream,
    blocks: u32,
    args: &CopyArgs,
) -> Result<(), DriverError> {
    let shape = shape(blocks, args.column_count as usize + 1);
    // SAFETY: the layout is the kernel's; the rest is the caller's promise.
    unsafe { d.launch(s, "copy_rows", shape, bytes_of(args)) }
}

/// Pools a batch's rows.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]; after the batch's probe, in its stream. Bags and columns are as [`crate::device::pool`]
/// asks, and `rows` has an address for each miss when the header says that they are staged.
pub unsafe fn gather_pool<D: Driver>(
    d: &D,
    s: &D::Stream,
    blocks: u32,
    args: &PoolArgs,
) -> Result<(), DriverError> {
    let shape = shape(blocks, args.lookup_count as usize + 2);
    // SAFETY: the layout is the kernel's; the rest is the caller's promise.
    unsafe { d.launch(s, "gather_pool", shape, bytes_of(args)) }
}

/// Copies the jobs' rows into their slots.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]; locations and words are within the pool, and no batch reads those slots.
pub unsafe fn copy_in<D: Driver>(d: &D, s: &D::Stream, args: &ReplaceArgs) -> Result<(), DriverError> {
    // SAFETY: the layout is the kernel's; the rest is the caller's promise.
    unsafe { d.launch(s, "copy_in", shape(blocks(d, args.count), 0), bytes_of(args)) }
}

/// Links the jobs' keys.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]; after [`copy_in`] of the same jobs, in the stream that alone changes the index. Keys
/// are distinct and above TOMBSTONE.
pub unsafe fn link_keys<D: Driver>(d: &D, s: &D::Stream, args: &ReplaceArgs) -> Result<(), DriverError> {
    let blocks = blocks(d, args.count.div_ceil(WARP_LANES));
    // SAFETY: the layout is the kernel's; the rest is the caller's promise.
    unsafe { d.launch(s, "link_keys", shape(blocks, 0), bytes_of(args)) }
}

/// Samples the ages of entries.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]; `ages` has 8 words a bucket.
pub unsafe fn sample_ages<D: Driver>(d: &D, s: &D::Stream, args: &SampleArgs) -> Result<(), DriverError> {
    let warps = args.count.saturating_mul(8).div_ceil(WARP_LANES);
    // SAFETY: the layout is the kernel's; the rest is the caller's promise.
    unsafe { d.launch(s, "sample_ages", shape(blocks(d, warps), 0), bytes_of(args)) }
}

/// Unlinks old entries, or those of draining slabs.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]; in the stream that alone changes the index; `evicted` has room for `most`.
pub unsafe fn sweep<D: Driver>(d: &D, s: &D::Stream, args: &SweepArgs) -> Result<(), DriverError> {
    let warps = args.stretch.saturating_mul(8).div_ceil(WARP_LANES);
    // SAFETY: the layout is the kernel's; the rest is the caller's promise.
    unsafe { d.launch(s, "sweep", shape(blocks(d, warps), 0), bytes_of(args)) }
}

/// Lists the entries of some buckets.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]; in the stream that alone changes the index; `listed` has room for 8 entries a bucket, and
/// the pool has `pool_words`.
pub unsafe fn list_entries<D: Driver>(d: &D, s: &D::Stream, args: &ListArgs) -> Result<(), DriverError> {
    let warps = args.count.saturating_mul(8).div_ceil(WARP_LANES);
    // SAFETY: the layout is the kernel's; the rest is the caller's promise.
    unsafe { d.launch(s, "list_entries", shape(blocks(d, warps), 0), bytes_of(args)) }
}

/// Moves records of so many warps of words out of a scratchpad's slots.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]; slots are within the scratchpad, records within the buffer, and the scan is the runs' and ends
/// with `warps`.
pub unsafe fn take_records<D: Driver>(
    d: &D,
    s: &D::Stream,
    warps: u32,
    args: &RecordArgs,
) -> Result<(), DriverError> {
    let shape = shape(blocks(d, warps), args.run_count as usize + 1);
    // SAFETY: the layout is the kernel's; the rest is the caller's promise.
    unsafe { d.launch(s, "take_records", shape, bytes_of(args)) }
}

/// Moves records into slots.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`take_records`].
pub unsafe fn put_records<D: Driver>(
    d: &D,
    s: &D::Stream,
    warps: u32,
    args: &RecordArgs,
) -> Result<(), DriverError> {
    let shape = shape(blocks(d, warps), args.run_count as usize + 1);
    // SAFETY: the layout is the kernel's; the rest is the caller's promise.
    unsafe { d.launch(s, "put_records", shape, bytes_of(args)) }
}

/// Updates rows of a scratchpad, of so many warps of elements.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]; slots are within the scratchpad and distinct, their records have the optimizer's states, sources
/// are of samples and columns of the gradients, and the scan is the tables' and ends with `warps`.
pub unsafe fn update_rows<D: Driver>(
    d: &D,
    s: &D::Stream,
    warps: u32,
    args: &UpdateArgs,
) -> Result<(), DriverError> {
    let shape = shape(blocks(d, warps), args.table_count as usize + 1);
    // SAFETY: the layout is the kernel's; the rest is the caller's promise.
    unsafe { d.launch(s, "update_rows", shape, bytes_of(args)) }
}
