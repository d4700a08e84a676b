//! Launches kernels in the simulator of `kernels/cusim`, which compiles the CUDA sources as C++ and runs them
//! on the CPU, with random preemption and weak memory order, for tests without a GPU.
//!
//! [`gather_pool`] is safe: it checks what the kernel assumes. Launching a kernel by name is unsafe.
#![allow(unsafe_code)]

mod device;
mod driver;
mod launch;
#[cfg(target_os = "linux")]
pub mod stub;
#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;

use bytemuck::Pod;

use crate::compute::pool::{Pool, PoolError};
use crate::device::cuda::pool_args::PoolArgs;
use crate::device::cuda::pool_args::{AT_MISS, BatchHeader, BatchState};
pub use driver::SimDriver;
use launch::Running;

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    /// Blocks of the grid.
    pub blocks: u32,
    /// Threads of a block, at most 1024.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: usize,
    /// Seed of random preemption, random block order and weak memory order. 0 turns off all three.
    pub seed: u64,
}

/// Errors of a simulated launch.
#[allow(missing_docs)] // the messages are the documentation
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SimError {
    #[error("cusim {kernel}: {reason}")]
    Stopped { kernel: String, reason: String },
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("gather-pool out: expected {expected} elements, got {got}")]
    Output { expected: usize, got: usize },
    #[error("gather-pool launch: expected blocks of whole warps, got {blocks} blocks of {threads} threads")]
    Shape { blocks: u32, threads: u32 },
}

/// One argument of a kernel: the bytes of its parameter.
#[derive(Clone, Debug)]
pub(crate) struct Argument(Vec<u64>);

impl Argument {
    /// A value passed by copy, such as a number, an address or a `#[repr(C)]` struct.
    #[must_use]
    pub(crate) fn value<T: Pod>(value: T) -> Self {
        Self::bytes(bytemuck::bytes_of(&value))
    }

    /// A value passed by copy, as bytes.
    #[must_use]
    pub(crate) fn bytes(bytes: &[u8]) -> Self {
        // Words, so that the copy is aligned for every parameter of at most eight-byte alignment.
        let mut words = vec![0_u64; bytes.len().div_ceil(size_of::<u64>())];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Self(words)
    }

    /// The address of memory that the kernel reads.
    #[must_use]
    #[cfg(test)]
    pub(crate) fn read<T: Pod>(memory: &[T]) -> Self {
        Self::value(memory.as_ptr() as u64)
    }

    /// The address of memory that the kernel writes.
    #[must_use]
    #[cfg(test)]
    pub(crate) fn write<T: Pod>(memory: &mut [T]) -> Self {
        Self::value(memory.as_mut_ptr() as u64)
    }
}

/// Launches a kernel by name, and waits for it.
///
/// # Errors
/// [`SimError::Stopped`] if there is no such kernel, or if it deadlocks or breaks a rule of warp operations
/// and barriers.
///
/// # Safety
/// `arguments` must be the kernel's parameters, in order and with the right types. Every address among them
/// must point to memory that lives through the call and is as long as the kernel accesses. Memory that the
/// kernel writes must not be borrowed elsewhere.
pub(crate) unsafe fn launch(kernel: &str, launch: Launch, arguments: &[Argument]) -> Result<(), SimError> {
    // SAFETY: the caller guarantees the conditions of `begin`, and the launch ends within this call.
    let mut running = unsafe { Running::begin(kernel, launch, arguments)? };
    while !running.advance(u64::MAX)? {}
    Ok(())
}

/// Runs the kernel `gather_pool` and writes `out`, which is `samples x stride`. Ignores `shape.shared_bytes`.
///
/// # Errors
/// [`SimError`] if the arguments are invalid, or if the simulator stops the kernel.
#[cfg_attr(not(test), expect(dead_code))] // tests call it; the program does not yet
pub(crate) fn gather_pool(pool: &Pool, out: &mut [f32], shape: Launch) -> Result<(), SimError> {
    pool.check()?;
    let expected = pool.samples * pool.stride;
    if out.len() != expected {
        return Err(SimError::Output { expected, got: out.len() });
    }
    if shape.blocks == 0
        || shape.threads == 0
        || !shape.threads.is_multiple_of(crate::compute::pool::WARP_LANES)
    {
        return Err(SimError::Shape { blocks: shape.blocks, threads: shape.threads });
    }
    let scan = pool.scan();
    let rows: Vec<u64> =
        pool.rows.iter().map(|row| if row.is_empty() { 0 } else { row.as_ptr() as u64 }).collect();
    // There is no cache here, so every row is a miss that the host has fetched.
    let misses = rows.len() as u32;
    let header = BatchHeader { samples: pool.samples as u32, ..BatchHeader::default() };
    let state = BatchState { misses, ..BatchState::default() };
    let places: Vec<u64> = pool.occurrences.iter().map(|&unique| AT_MISS | u64::from(unique)).collect();
    let args = PoolArgs {
        header: &raw const header as u64,
        state: &raw const state as u64,
        lookups: pool.lookups.as_ptr() as u64,
        scan: scan.as_ptr() as u64,
        offsets: pool.offsets.as_ptr() as u64,
        places: places.as_ptr() as u64,
        owners: 0,
        rows: rows.as_ptr() as u64,
        pool: 0,
        host: 0,
        copies: 0,
        dense: pool.dense.as_ptr() as u64,
        out: out.as_mut_ptr() as u64,
        lookup_count: pool.lookups.len() as u32,
        dense_width: pool.dense_width as u32,
        stride: pool.stride as u32,
        staged: misses,
    };
    let shape = Launch { shared_bytes: size_of_val(scan.as_slice()), ..shape };
    // SAFETY: `gather_pool` takes one `PoolArgs`, whose layout is the kernel's. `Pool::check` has checked
    // that every offset, occurrence, row and column is in range. The shared memory has room for the scan.
    // `out` is `samples x stride` and borrowed mutably. Every slice outlives the call.
    unsafe { launch("gather_pool", shape, &[Argument::value(args)]) }
}
