//! Launches of the trainer's kernels, one function per kernel. A function sets the kernel's name, argument
//! and launch shape.
//!
//! The functions are unsafe because addresses are plain numbers. Callers own the memory and have checked the
//! kernels' requirements: [`super::scratchpad`] for slots and records, `super::stepper` for updates.

#![allow(unsafe_code)]

use super::args::{RecordArgs, UpdateArgs};
use crate::device::cuda::launch::{blocks, launches, shape};
use crate::device::cuda::{Driver, DriverError};

launches! {
/// Copies records out of slots, with one thread per word, in `warps` warps.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]. Slots are within the scratchpad and records within the buffer. The scan is the
/// prefix sum of the runs' warps and ends with `warps`.
take_records(d, args: RecordArgs, warps) shape(blocks(d, warps), args.run_count as usize + 1);

/// Copies records into slots.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`take_records`].
put_records(d, args: RecordArgs, warps) shape(blocks(d, warps), args.run_count as usize + 1);

/// Updates rows, in `warps` warps.
///
/// # Errors
/// As [`Driver::launch`].
///
/// # Safety
/// As [`Driver::launch`]. Slots are within the scratchpad and distinct, and their records have the
/// optimizer's states. Sources are within the samples and columns of the gradients. The scan is the prefix
/// sum of the tables' warps and ends with `warps`.
update_rows(d, args: UpdateArgs, warps) shape(blocks(d, warps), args.table_count as usize + 1);
}
