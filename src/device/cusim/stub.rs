//! Makes the stub libcuda execute kernels in the simulator, so that the real driver code runs as on a
//! GPU.

#![allow(unsafe_code)]
// Only tests execute kernels.
#![allow(clippy::print_stderr)]

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::launch::argument_bytes as bytes_of;
use super::{Argument, Launch, launch};
use crate::sync::EvenPoisoned;

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

const RTLD_NOW: c_int = 2;
/// `CUDA_ERROR_LAUNCH_FAILED`.
const LAUNCH_FAILED: i32 = 719;

/// How many more launches succeed. Those after them fail.
pub static LAUNCHES_LEFT: AtomicI64 = AtomicI64::new(i64::MAX);
/// The name of the kernel that [`execute_kernels_but`] leaves out.
static SKIPPED: Mutex<&str> = Mutex::new("");

fn skipped() -> MutexGuard<'static, &'static str> {
    SKIPPED.lock().even_poisoned()
}

/// As [`execute_kernels`], but launches of this kernel do nothing.
pub fn execute_kernels_but(kernel: &'static str) {
    *skipped() = kernel;
    execute_kernels();
}

/// Makes the simulator execute the kernels of this process from now on.
pub fn execute_kernels() {
    type Executes = unsafe extern "C" fn(
        unsafe extern "C" fn(*const u8, usize, *const u32, *const u8, usize) -> i32,
        unsafe extern "C" fn(*const u8, usize) -> usize,
    );
    // SAFETY: the library is the stub, which the driver finds by the same name, and its function has
    // this type.
    unsafe {
        let library = dlopen(c"libcuda.so".as_ptr(), RTLD_NOW);
        assert!(!library.is_null());
        let executes = dlsym(library, c"stub_executes".as_ptr());
        assert!(!executes.is_null());
        std::mem::transmute::<*mut c_void, Executes>(executes)(execute, argument_bytes);
    }
}

/// # Safety
/// `name` is the address of `length` bytes, which live as long as the result.
unsafe fn text<'t>(name: *const u8, length: usize) -> &'t str {
    // SAFETY: the caller guarantees it.
    std::str::from_utf8(unsafe { std::slice::from_raw_parts(name, length) }).unwrap_or_default()
}

/// # Safety
/// The stub driver calls it, with the address and the length of a kernel's name, three numbers for its shape,
/// and the argument with which the program has launched it.
unsafe extern "C" fn execute(
    name: *const u8,
    length: usize,
    shape: *const u32,
    argument: *const u8,
    bytes: usize,
) -> i32 {
    // SAFETY: the caller guarantees it. The argument has the length that `argument_bytes` returned.
    let (name, [blocks, threads, shared], argument) = unsafe {
        (text(name, length), *shape.cast::<[u32; 3]>(), std::slice::from_raw_parts(argument, bytes))
    };
    if name == *skipped() {
        return 0;
    }
    if LAUNCHES_LEFT.fetch_sub(1, Ordering::SeqCst) <= 0 {
        return LAUNCH_FAILED;
    }
    let shape = Launch { blocks, threads, shared_bytes: shared as usize, seed: 0 };
    // SAFETY: the program passed this argument to the driver for this kernel, with the promises of
    // `Driver::launch`. They hold, since the stub driver executes it before a wait for it succeeds.
    match unsafe { launch(name, shape, &[Argument::bytes(argument)]) } {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("{error}");
            LAUNCH_FAILED
        }
    }
}

/// # Safety
/// As for [`text`].
unsafe extern "C" fn argument_bytes(name: *const u8, length: usize) -> usize {
    // SAFETY: the caller guarantees it.
    let name = unsafe { text(name, length) };
    bytes_of(name).unwrap_or_else(|| panic!("there is no kernel {name}"))
}
