//! Launches kernels in the simulator of `kernels/cusim`, which compiles the CUDA sources as C++ and runs them
//! on the CPU, with random preemption and weak memory order, for tests without a GPU.
//!
//! Launching a kernel is unsafe: it accesses what its arguments point at.
#![allow(unsafe_code)]

mod device;
mod driver;
mod launch;
#[cfg(target_os = "linux")]
pub mod stub;
#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;

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

/// Why the simulator has not begun a launch, or has stopped it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cusim {kernel}: {reason}")]
pub(crate) struct SimError {
    kernel: String,
    reason: String,
}

/// One argument of a kernel: the bytes of its parameter.
#[derive(Clone, Debug)]
pub(crate) struct Argument(Vec<u64>);

impl Argument {
    /// A value passed by copy, as bytes.
    #[must_use]
    pub(crate) fn bytes(bytes: &[u8]) -> Self {
        // Words, so that the copy is aligned for every parameter of at most eight-byte alignment.
        let mut words = vec![0_u64; bytes.len().div_ceil(size_of::<u64>())];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Self(words)
    }
}

/// Launches a kernel by name, and waits for it.
///
/// # Errors
/// [`SimError`] if there is no such kernel, or if it deadlocks or breaks a rule of warp operations
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
