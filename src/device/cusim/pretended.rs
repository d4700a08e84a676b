//! Lets the pretended libcuda execute kernels in the simulator, so that the real driver code runs on it as it
//! does on a GPU.

#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};

use flechette::cache::gpu::args;
use flechette::device::cuda::pool_args::PoolArgs;
use flechette::device::cusim::{Argument, Launch, launch};
use flechette::trainer::pipeline::gpu::args as train_args;

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

const RTLD_NOW: c_int = 2;
/// `CUDA_ERROR_LAUNCH_FAILED`.
const LAUNCH_FAILED: i32 = 719;

/// Launches that succeed; later ones fail.
pub static LAUNCHES_LEFT: AtomicI64 = AtomicI64::new(i64::MAX);
/// The name of a kernel that is not executed.
static SKIPPED: Mutex<&str> = Mutex::new("");

/// As [`execute_kernels`], but one kernel does nothing.
pub fn execute_kernels_but(kernel: &'static str) {
    *SKIPPED.lock().unwrap() = kernel;
    execute_kernels();
}

/// From now on the simulator executes this process's kernels.
pub fn execute_kernels() {
    type Executes = unsafe extern "C" fn(
        unsafe extern "C" fn(*const u8, usize, *const u32, *const u8, usize) -> i32,
        unsafe extern "C" fn(*const u8, usize) -> usize,
    );
    let name = |text: &str| CString::new(text).unwrap();
    // SAFETY: the library is the pretended one, which the driver finds by the same name, and its function has
    // this type.
    unsafe {
        let library = dlopen(name("libcuda.so").as_ptr(), RTLD_NOW);
        assert!(!library.is_null());
        let executes = dlsym(library, name("pretend_executes").as_ptr());
        assert!(!executes.is_null());
        std::mem::transmute::<*mut c_void, Executes>(executes)(execute, argument_bytes);
    }
}

unsafe fn text<'t>(name: *const u8, length: usize) -> &'t str {
    // SAFETY: the pretended driver passes a string's address and length.
    std::str::from_utf8(unsafe { std::slice::from_raw_parts(name, length) }).unwrap()
}

unsafe extern "C" fn execute(
    name: *const u8,
    length: usize,
    shape: *const u32,
    argument: *const u8,
    bytes: usize,
) -> i32 {
    // SAFETY: the pretended driver passes three numbers, and an argument of the length that `argument_bytes`
    // returned.
    let (name, [blocks, threads, shared], argument) = unsafe {
        (text(name, length), *shape.cast::<[u32; 3]>(), std::slice::from_raw_parts(argument, bytes))
    };
    if name == *SKIPPED.lock().unwrap() {
        return 0;
    }
    if LAUNCHES_LEFT.fetch_sub(1, Ordering::SeqCst) <= 0 {
        return LAUNCH_FAILED;
    }
    let shape = Launch { blocks, threads, shared_bytes: shared as usize, seed: 0 };
    // SAFETY: the program passed this argument to the driver for this kernel.
    match unsafe { launch(name, shape, &[Argument::bytes(argument)]) } {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("{error}");
            LAUNCH_FAILED
        }
    }
}

unsafe extern "C" fn argument_bytes(name: *const u8, length: usize) -> usize {
    // SAFETY: as in `text`.
    match unsafe { text(name, length) } {
        "probe" => size_of::<args::ProbeArgs>(),
        "copy_rows" => size_of::<args::CopyArgs>(),
        "gather_pool" => size_of::<PoolArgs>(),
        "copy_in" | "link_keys" => size_of::<args::ReplaceArgs>(),
        "sample_ages" => size_of::<args::SampleArgs>(),
        "sweep" => size_of::<args::SweepArgs>(),
        "list_entries" => size_of::<args::ListArgs>(),
        "take_records" | "put_records" => size_of::<train_args::RecordArgs>(),
        "update_rows" => size_of::<train_args::UpdateArgs>(),
        other => panic!("the argument size of {other} is not known"),
    }
}
