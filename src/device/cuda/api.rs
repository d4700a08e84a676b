//! The functions of libcuda and libnvrtc, looked up by name, with the plain types of their C interfaces.
//!
//! cudarc opens the libraries. Its wrappers are not used, for two reasons: they panic when the library lacks
//! a function, and they convert each result code to an enum, which is undefined behaviour for a code that
//! cudarc does not know. Here a missing function is an error that names it, and a code is a number.
//!
//! Handles (contexts, modules, streams, ...) are pointers that only the library dereferences. They are
//! `usize` here, which has the same C calling convention.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_uint, c_void};

use cudarc::{driver, nvrtc};

/// An opaque pointer of the library; 0 means none.
pub(crate) type Handle = usize;

/// Declares a struct of function pointers, and its `load`, which returns the name of a missing function as
/// the error.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident by $symbol:path: $($field:ident = $name:literal $arguments:tt;)*) => {
        $(#[$doc])*
        pub(crate) struct $table {
            $(pub(crate) $field: unsafe extern "C" fn $arguments -> c_int,)*
        }

        impl $table {
            /// # Safety
            /// The library is present.
            pub(crate) unsafe fn load() -> Result<Self, &'static str> {
                // SAFETY: the library is present, and each type is that of the library's header.
                Ok(Self { $($field: unsafe { $symbol($name)? },)* })
            }
        }
    };
}

functions! {
    /// libcuda, as cuda.h 13.0 declares it: CUresult and CUdevice are ints, CUdeviceptr is a u64.
    Api by driver_symbol:
    version = "cuDriverGetVersion" (*mut c_int);
    device = "cuDeviceGet" (*mut c_int, c_int);
    attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    retain = "cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    release = "cuDevicePrimaryCtxRelease_v2" (c_int);
    set_current = "cuCtxSetCurrent" (Handle);
    memory_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    allocate = "cuMemAlloc_v2" (*mut u64, usize);
    free = "cuMemFree_v2" (u64);
    allocate_host = "cuMemHostAlloc" (*mut usize, usize, c_uint);
    free_host = "cuMemFreeHost" (usize);
    seen_by_device = "cuMemHostGetDevicePointer_v2" (*mut u64, usize, c_uint);
    copy = "cuMemcpyAsync" (u64, u64, usize, Handle);
    set_bytes = "cuMemsetD8Async" (u64, u8, usize, Handle);
    create_stream = "cuStreamCreate" (*mut Handle, c_uint);
    destroy_stream = "cuStreamDestroy_v2" (Handle);
    finish = "cuStreamSynchronize" (Handle);
    follow = "cuStreamWaitEvent" (Handle, Handle, c_uint);
    create_event = "cuEventCreate" (*mut Handle, c_uint);
    destroy_event = "cuEventDestroy_v2" (Handle);
    record = "cuEventRecord" (Handle, Handle);
    query = "cuEventQuery" (Handle);
    wait = "cuEventSynchronize" (Handle);
    begin_capture = "cuStreamBeginCapture_v2" (Handle, c_int);
    end_capture = "cuStreamEndCapture" (Handle, *mut Handle);
    is_capturing = "cuStreamIsCapturing" (Handle, *mut c_int);
    graph_nodes = "cuGraphGetNodes" (Handle, *mut Handle, *mut usize);
    instantiate = "cuGraphInstantiateWithFlags" (*mut Handle, Handle, u64);
    destroy_graph = "cuGraphDestroy" (Handle);
    launch_graph = "cuGraphLaunch" (Handle, Handle);
    destroy_executable = "cuGraphExecDestroy" (Handle);
    load_module = "cuModuleLoadDataEx" (*mut Handle, *const c_void, c_uint, *mut c_int, *mut *mut c_void);
    unload_module = "cuModuleUnload" (Handle);
    function = "cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
    load_function = "cuFuncLoad" (Handle);
    parameter = "cuFuncGetParamInfo" (Handle, usize, *mut usize, *mut usize);
    launch = "cuLaunchKernel" (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void,
        *mut *mut c_void
    );
}

functions! {
    /// libnvrtc, as nvrtc.h 13.0 declares it. Version 12.9 declares these functions alike.
    Nvrtc by compiler_symbol:
    version = "nvrtcVersion" (*mut c_int, *mut c_int);
    architecture_count = "nvrtcGetNumSupportedArchs" (*mut c_int);
    architectures = "nvrtcGetSupportedArchs" (*mut c_int);
    create = "nvrtcCreateProgram" (
        *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
    );
    destroy = "nvrtcDestroyProgram" (*mut Handle);
    compile = "nvrtcCompileProgram" (Handle, c_int, *const *const c_char);
    log_bytes = "nvrtcGetProgramLogSize" (Handle, *mut usize);
    log = "nvrtcGetProgramLog" (Handle, *mut c_char);
    cubin_bytes = "nvrtcGetCUBINSize" (Handle, *mut usize);
    cubin = "nvrtcGetCUBIN" (Handle, *mut c_char);
    ptx_bytes = "nvrtcGetPTXSize" (Handle, *mut usize);
    ptx = "nvrtcGetPTX" (Handle, *mut c_char);
}

/// Whether libcuda can be opened.
pub(crate) fn driver_is_present() -> bool {
    // SAFETY: this opens libcuda and closes it again. Opening runs the library's constructors, which are
    // safe in any process. That no other file of this name is on the library path is up to the machine's
    // administrator.
    unsafe { driver::sys::is_culib_present() }
}

/// Whether libnvrtc can be opened.
pub(crate) fn compiler_is_present() -> bool {
    // SAFETY: as in `driver_is_present`.
    unsafe { nvrtc::sys::is_culib_present() }
}

/// A function of libcuda, or its name when the library lacks it.
///
/// # Safety
/// The library is present, and `F` is the function's C type.
pub(crate) unsafe fn driver_symbol<F: Copy>(name: &'static str) -> Result<F, &'static str> {
    // SAFETY: `culib` opens the library once and keeps it for the life of the process, so a copy of the
    // address stays valid. The caller guarantees that `F` is the function's type.
    unsafe { driver::sys::culib().get::<F>(name.as_bytes()) }.map(|found| *found).map_err(|_| name)
}

/// A function of libnvrtc, or its name when the library lacks it.
///
/// # Safety
/// As for [`driver_symbol`].
unsafe fn compiler_symbol<F: Copy>(name: &'static str) -> Result<F, &'static str> {
    // SAFETY: as in `driver_symbol`.
    unsafe { nvrtc::sys::culib().get::<F>(name.as_bytes()) }.map(|found| *found).map_err(|_| name)
}
