//! Launches of the trainer's kernels, one function per kernel. A function sets the kernel's name, argument
//! and launch shape.
//!
//! The functions are unsafe because addresses are plain numbers. Callers own the memory and have checked the
//! kernels' requirements: [`super::scratchpad`] for slots and records, `super::stepper` for updates.

#![allow(unsafe_code)]

use bytemuck::bytes_of;

use super::args::{RecordArgs, UpdateArgs};
use crate::device::cuda::launch::{blocks, shape};
use crate::device::cuda::{Driver, DriverError};

/// Copies records out of slots, with one thread per word, in `warps` warps.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]. Slots are within the scratchpad and records within the buffer. The scan is the
/// prefix sum of the runs' warps and ends with `warps`.
pub(crate) unsafe fn take_records<D: Driver>(
    d: &D,
    s: &D::Stream,
    warps: u32,
    args: &RecordArgs,
) -> Result<(), DriverError> {
    let shape = shape(blocks(d, warps), args.run_count as usize + 1);
    // SAFETY: `args` has the layout that the kernel reads; the caller promises the rest.
    unsafe { d.launch(s, "take_records", shape, bytes_of(args)) }
}

/// Copies records into slots.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`take_records`].
pub(crate) unsafe fn put_records<D: Driver>(
    d: &D,
    s: &D::Stream,
    warps: u32,
    args: &RecordArgs,
) -> Result<(), DriverError> {
    let shape = shape(blocks(d, warps), args.run_count as usize + 1);
    // SAFETY: `args` has the layout that the kernel reads; the caller promises the rest.
    unsafe { d.launch(s, "put_records", shape, bytes_of(args)) }
}

/// Updates rows, in `warps` warps.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]. Slots are within the scratchpad and distinct, and their records have the
/// optimizer's states. Sources are within the samples and columns of the gradients. The scan is the prefix
/// sum of the tables' warps and ends with `warps`.
pub(crate) unsafe fn update_rows<D: Driver>(
    d: &D,
    s: &D::Stream,
    warps: u32,
    args: &UpdateArgs,
) -> Result<(), DriverError> {
    let shape = shape(blocks(d, warps), args.table_count as usize + 1);
    // SAFETY: `args` has the layout that the kernel reads; the caller promises the rest.
    unsafe { d.launch(s, "update_rows", shape, bytes_of(args)) }
}
