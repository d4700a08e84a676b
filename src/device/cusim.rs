//! Launches kernels on the simulator of `kernels/cusim`: CUDA's own sources, compiled as C++ and run
//! on the CPU with random preemption, for tests on machines with no GPU.
//!
//! The kernels of the product are launched by safe functions that check what the kernel takes for
//! granted. The small kernels that try the simulator itself are launched by name, which is unsafe.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int, c_void};

use bytemuck::Pod;

use super::pool::{Pool, PoolArgs, PoolError};

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

unsafe extern "C" {
    fn cusim_launch(
        name: *const c_char,
        grid: *const u32,
        block: *const u32,
        shared_bytes: usize,
        arguments: *mut *mut c_void,
        seed: u64,
        message: *mut c_char,
        message_bytes: usize,
    ) -> c_int;
}

/// One argument of a kernel, as the bytes that the kernel's parameter has.
#[derive(Clone, Debug)]
pub struct Argument(Vec<u64>);

impl Argument {
    /// A value passed by copy, such as a number, an address or a `#[repr(C)]` struct.
    #[must_use]
    pub fn value<T: Pod>(value: T) -> Self {
        // Words keep the copy aligned for any parameter of up to eight-byte alignment.
        let mut words = vec![0_u64; size_of::<T>().div_ceil(size_of::<u64>())];
        bytemuck::cast_slice_mut(&mut words)[..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&value));
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

/// Launches the kernel of this name and waits for it.
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
    let stopped = |reason: &str| SimError::Stopped { kernel: kernel.to_owned(), reason: reason.to_owned() };
    let name = CString::new(kernel).map_err(|_| stopped("a name holds no zero byte"))?;
    let mut parameters: Vec<*mut c_void> =
        arguments.iter().map(|argument| argument.0.as_ptr().cast_mut().cast()).collect();
    let mut message = [0_u8; 512];
    // SAFETY: `name` ends in a zero, the two shapes hold three numbers each, and `message` is as long
    // as stated and outlives the call. Each parameter points at an `Argument` that outlives the call;
    // kernels take parameters by value, so the simulator only reads there. What the kernel itself
    // touches is in bounds and unshared, as this function's caller has promised.
    let code = unsafe {
        cusim_launch(
            name.as_ptr(),
            [launch.blocks, 1, 1].as_ptr(),
            [launch.threads, 1, 1].as_ptr(),
            launch.shared_bytes,
            parameters.as_mut_ptr(),
            launch.seed,
            message.as_mut_ptr().cast(),
            message.len(),
        )
    };
    if code == 0 {
        return Ok(());
    }
    let end = message.iter().position(|&byte| byte == 0).unwrap_or(message.len());
    Err(stopped(&String::from_utf8_lossy(&message[..end])))
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
    if shape.blocks == 0 || shape.threads == 0 || !shape.threads.is_multiple_of(super::pool::WARP_LANES) {
        return Err(SimError::Shape { blocks: shape.blocks, threads: shape.threads });
    }
    let scan = pool.scan();
    let rows: Vec<u64> =
        pool.rows.iter().map(|row| if row.is_empty() { 0 } else { row.as_ptr() as u64 }).collect();
    let args = PoolArgs {
        lookups: pool.lookups.as_ptr() as u64,
        scan: scan.as_ptr() as u64,
        offsets: pool.offsets.as_ptr() as u64,
        occurrences: pool.occurrences.as_ptr() as u64,
        rows: rows.as_ptr() as u64,
        dense: pool.dense.as_ptr() as u64,
        out: out.as_mut_ptr() as u64,
        lookup_count: pool.lookups.len() as u32,
        samples: pool.samples as u32,
        dense_width: pool.dense_width as u32,
        stride: pool.stride as u32,
    };
    let shape = Launch { shared_bytes: size_of_val(scan.as_slice()), ..shape };
    // SAFETY: `gather_pool` takes one `PoolArgs`, whose layout is the kernel's. `Pool::check` has shown
    // that every offset, occurrence, row and column it reaches is in range; the shared memory holds the
    // scan; `out` is `samples x stride` and borrowed mutably; every slice outlives the call.
    unsafe { launch("gather_pool", shape, &[Argument::value(args)]) }
}
