//! Launches of the trainer's kernels: a function a kernel, which knows its name, its argument and its shape.
//!
//! The functions are unsafe, because an address is only a number here. The callers own the memory and have checked
//! what the kernels require: [`super::scratchpad`] for slots and records, `super::stepper` for updates.

#![allow(unsafe_code)]

use bytemuck::bytes_of;

use super::args::{RecordArgs, UpdateArgs};
use crate::device::cuda::launch::{blocks, shape};
use crate::device::cuda::{Driver, DriverError};

/// Moves records of so many warps of words out of a scratchpad's slots.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]; slots are within the scratchpad, records within the buffer, and the scan is the runs' and ends
/// with `warps`.
pub(crate) unsafe fn take_records<D: Driver>(
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
pub(crate) unsafe fn put_records<D: Driver>(
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
pub(crate) unsafe fn update_rows<D: Driver>(
    d: &D,
    s: &D::Stream,
    warps: u32,
    args: &UpdateArgs,
) -> Result<(), DriverError> {
    let shape = shape(blocks(d, warps), args.table_count as usize + 1);
    // SAFETY: the layout is the kernel's; the rest is the caller's promise.
    unsafe { d.launch(s, "update_rows", shape, bytes_of(args)) }
}
