//! Launches kernels on the simulator of `kernels/cusim`: CUDA's own sources, compiled as C++ and run
//! on the CPU with random preemption, for tests on machines with no GPU.
//!
//! The kernels of the product are launched by safe functions that check what the kernel takes for
//! granted. The small kernels that try the simulator itself are launched by name, which is unsafe.
#![allow(unsafe_code)]

mod device;
mod driver;
mod launch;

use bytemuck::Pod;

use crate::compute::pool::{Pool, PoolError};
use crate::device::cuda::pool_args::PoolArgs;
use crate::device::cuda::pool_args::{AT_MISS, BatchHeader, BatchState};
pub use driver::{SimDriver, SimEvent, SimGraph, SimStream};
use launch::Running;

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks of the grid.
    pub blocks: u32,
    /// Threads of a block, at most 1024.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: usize,
    /// What preemption and the order of blocks are drawn from; 0 preempts nowhere.
    pub seed: u64,
}

/// Why a simulated launch did not finish, or did not begin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimError {
    /// The simulator stopped the kernel: what it did wrong, and which block and lane did it.
    #[error("cusim {kernel}: {reason}")]
    Stopped {
        /// The kernel's name.
        kernel: String,
        /// What the simulator says.
        reason: String,
    },
    /// The arguments are not what the kernel may be given.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The output is not `samples x stride`.
    #[error("gather-pool out: expected {expected} elements, got {got}")]
    Output {
        /// Elements that the arguments ask for.
        expected: usize,
        /// Elements that came.
        got: usize,
    },
    /// The launch has a shape that the kernel does not take.
    #[error(
        "gather-pool launch: expected at least one block of whole warps, got {blocks} of {threads} threads"
    )]
    Shape {
        /// Blocks asked for.
        blocks: u32,
        /// Threads a block asked for.
        threads: u32,
    },
}

/// One argument of a kernel, as the bytes that the kernel's parameter has.
#[derive(Clone, Debug)]
pub struct Argument(Vec<u64>);

impl Argument {
    /// A value passed by copy, such as a number, an address or a `#[repr(C)]` struct.
    #[must_use]
    pub fn value<T: Pod>(value: T) -> Self {
        Self::bytes(bytemuck::bytes_of(&value))
    }

    /// A value as the bytes it has.
    #[must_use]
    pub fn bytes(bytes: &[u8]) -> Self {
        // Words keep the copy aligned for any parameter of up to eight-byte alignment.
        let mut words = vec![0_u64; bytes.len().div_ceil(size_of::<u64>())];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Self(words)
    }

    /// The address of memory that the kernel reads.
    #[must_use]
    pub fn read<T: Pod>(memory: &[T]) -> Self {
        Self::value(memory.as_ptr() as u64)
    }

    /// The address of memory that the kernel writes.
    #[must_use]
    pub fn write<T: Pod>(memory: &mut [T]) -> Self {
        Self::value(memory.as_mut_ptr() as u64)
    }
}

/// Launches the kernel of this name and waits for it. What is given as [`Running::begin`]'s.
///
/// # Errors
/// [`SimError::Stopped`] when there is no such kernel, or when it deadlocks or breaks a rule of warp
/// operations and barriers.
///
/// # Safety
/// `arguments` must be the kernel's parameters, in order and of its types, and every address among
/// them must be of memory that lives through the call, is as long as the kernel reaches under this
/// launch, and, where the kernel writes, is borrowed by nobody else.
pub unsafe fn launch(kernel: &str, launch: Launch, arguments: &[Argument]) -> Result<(), SimError> {
    // SAFETY: the caller has promised what this asks for, and all of it lives through this call.
    let mut running = unsafe { Running::begin(kernel, launch, arguments)? };
    while !running.advance(u64::MAX)? {}
    Ok(())
}

/// Runs the kernel `gather_pool`, writing `out`, which is `samples x stride`. The launch's shared
/// memory is chosen here.
///
/// # Errors
/// [`SimError`] when the arguments do not hold together, or when the simulator stops the kernel.
pub fn gather_pool(pool: &Pool, out: &mut [f32], shape: Launch) -> Result<(), SimError> {
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
    // Every unique row is a miss that the host has fetched.
    let misses = rows.len() as u32;
    let header = BatchHeader { samples: pool.samples as u32, staged: misses, ..BatchHeader::default() };
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
        unused: 0,
    };
    let shape = Launch { shared_bytes: size_of_val(scan.as_slice()), ..shape };
    // SAFETY: `gather_pool` takes one `PoolArgs`, whose layout is the kernel's. `Pool::check` has shown
    // that every offset, occurrence, row and column it reaches is in range; the shared memory holds the
    // scan; `out` is `samples x stride` and borrowed mutably; every slice outlives the call.
    unsafe { launch("gather_pool", shape, &[Argument::value(args)]) }
}
