//! CUDA's result codes: their names, which of them are final, and why a GPU could not be had.
//!
//! cudarc turns a code into an enum, which is undefined for a code that a newer driver invents, and asks
//! libcuda for its name, which panics without libcuda. So codes stay plain numbers here, and the names of
//! cuda.h stand in a table.

use std::ffi::c_int;

use super::context::{DeviceInfo, OLDEST_COMPUTE, Probe};
use super::driver::DriverError;

/// The call did what it was asked.
pub(crate) const SUCCESS: c_int = 0;
/// No memory left.
pub(crate) const OUT_OF_MEMORY: c_int = 2;
/// The driver has no device.
pub(crate) const NO_DEVICE: c_int = 100;
/// The event has not fired yet: an answer, no error.
pub(crate) const NOT_READY: c_int = 600;

/// What the driver says of an image that another device, or a newer driver, would take.
const UNFIT_IMAGES: &[c_int] = &[200, 209, 218, 221, 222, 223];

/// Whether an image was refused for what it is, and another one might do.
pub(crate) fn is_unfit_image(code: c_int) -> bool {
    UNFIT_IMAGES.contains(&code)
}

/// Whether the code ends the context: cuda.h says of each of these that the process must end and start
/// again to use the device, or that the context is gone.
#[must_use]
pub(crate) fn is_final(code: c_int) -> bool {
    matches!(code, 4 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810)
}

/// A failed call as an error: final codes are [`DriverError::Sticky`].
pub(crate) fn failed(call: &'static str, code: c_int) -> DriverError {
    let name = name(code);
    if is_final(code) {
        DriverError::Sticky { call, code, name }
    } else {
        DriverError::Failed { call, code, name }
    }
}

/// Why no GPU could be opened: what was expected, what there is, and what to do. Each is one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// There is no device to open.
    #[error("{found}; {}", advice(found))]
    NoDevice {
        /// What the look for devices came to; never [`Probe::Found`].
        found: Probe,
    },
    /// There are devices, but not this one.
    #[error("CUDA device {ordinal}: expected one below {count}, the number of devices")]
    NoSuchDevice {
        /// The one asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The device is older than what the kernels are written for.
    #[error(
        "CUDA {device}: expected compute {}.{} or newer (Volta); use another GPU, or set device.kind = \"host\"",
        OLDEST_COMPUTE.0, OLDEST_COMPUTE.1
    )]
    DeviceTooOld {
        /// The device.
        device: DeviceInfo,
    },
    /// Other processes hold the device's memory, so that not even a context fits.
    #[error("CUDA {device}: no memory is left for a context; nvidia-smi names the processes that hold it")]
    NoRoom {
        /// The device.
        device: DeviceInfo,
    },
    /// There is no NVRTC, and no image that was compiled ahead of time fits.
    #[error(
        "CUDA kernels cannot be compiled: {found}, and {ahead}; install NVRTC of CUDA 13.0 (pip package \
         nvidia-cuda-nvrtc), its folder in LD_LIBRARY_PATH, or build flechette with nvcc on PATH"
    )]
    NoCompiler {
        /// What the look for NVRTC came to.
        found: String,
        /// Why no image of the program itself is used.
        ahead: String,
    },
    /// This NVRTC does not know so old a device.
    #[error(
        "CUDA kernels cannot be compiled: NVRTC {}.{} knows compute {}.{} and newer, the device has {}.{}; \
         install NVRTC 12.9 (pip package nvidia-cuda-nvrtc-cu12), its folder in LD_LIBRARY_PATH",
        nvrtc.0, nvrtc.1, least.0, least.1, compute.0, compute.1
    )]
    CompilerTooNew {
        /// NVRTC's version.
        nvrtc: (i32, i32),
        /// The oldest compute capability it knows.
        least: (i32, i32),
        /// The device's.
        compute: (i32, i32),
    },
    /// The compiler refused a kernel.
    #[error("CUDA kernel {kernel}: NVRTC {}.{} says: {log}", nvrtc.0, nvrtc.1)]
    Compile {
        /// The file of `kernels/`.
        kernel: &'static str,
        /// NVRTC's version.
        nvrtc: (i32, i32),
        /// What it says, on one line.
        log: String,
    },
    /// The driver refused a compiled kernel.
    #[error("CUDA kernel {kernel} ({origin}): the driver, of CUDA {driver}, refuses it with {code} ({}){}", name(*code), after(log))]
    Image {
        /// The file of `kernels/`.
        kernel: &'static str,
        /// Who compiled it, and for what.
        origin: String,
        /// The driver's CUDA version.
        driver: String,
        /// CUresult.
        code: i32,
        /// What the driver's own compiler says, on one line; may be empty.
        log: String,
    },
    /// A compiled kernel is not what this program launches.
    #[error("CUDA kernel {kernel}: expected one parameter by value, got {got}")]
    Parameter {
        /// The kernel.
        kernel: &'static str,
        /// What its image has.
        got: String,
    },
    /// The driver refused a call.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// What to do about a look that found no device. 580 is the first branch of drivers for CUDA 13.0.
fn advice(found: &Probe) -> &'static str {
    match found {
        Probe::NoDriver | Probe::DriverTooOld { .. } => "install NVIDIA's driver 580 or newer",
        Probe::DriverIncomplete { .. } => "install a whole driver, 580 or newer",
        Probe::NoDevice | Probe::Found(_) => "check nvidia-smi and CUDA_VISIBLE_DEVICES",
        Probe::Failed { .. } => "check nvidia-smi and the kernel's log",
    }
}

fn after(log: &str) -> String {
    if log.is_empty() { String::new() } else { format!(": {log}") }
}

/// A log of several lines as one.
pub(crate) fn one_line(log: &str) -> String {
    let lines = log.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" | ")
}

/// A CUDA version as people write it.
pub(crate) fn version_text(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// A code's name in cuda.h, or `unknown`.
#[must_use]
pub(crate) fn name(code: c_int) -> &'static str {
    match code {
        1 => "CUDA_ERROR_INVALID_VALUE",
        2 => "CUDA_ERROR_OUT_OF_MEMORY",
        3 => "CUDA_ERROR_NOT_INITIALIZED",
        4 => "CUDA_ERROR_DEINITIALIZED",
        5 => "CUDA_ERROR_PROFILER_DISABLED",
        6 => "CUDA_ERROR_PROFILER_NOT_INITIALIZED",
        7 => "CUDA_ERROR_PROFILER_ALREADY_STARTED",
        8 => "CUDA_ERROR_PROFILER_ALREADY_STOPPED",
        34 => "CUDA_ERROR_STUB_LIBRARY",
        36 => "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER",
        46 => "CUDA_ERROR_DEVICE_UNAVAILABLE",
        47 => "CUDA_ERROR_MULTICAST_RESOURCE_FULL",
        100 => "CUDA_ERROR_NO_DEVICE",
        101 => "CUDA_ERROR_INVALID_DEVICE",
        102 => "CUDA_ERROR_DEVICE_NOT_LICENSED",
        200 => "CUDA_ERROR_INVALID_IMAGE",
        201 => "CUDA_ERROR_INVALID_CONTEXT",
        202 => "CUDA_ERROR_CONTEXT_ALREADY_CURRENT",
        205 => "CUDA_ERROR_MAP_FAILED",
        206 => "CUDA_ERROR_UNMAP_FAILED",
        207 => "CUDA_ERROR_ARRAY_IS_MAPPED",
        208 => "CUDA_ERROR_ALREADY_MAPPED",
        209 => "CUDA_ERROR_NO_BINARY_FOR_GPU",
        210 => "CUDA_ERROR_ALREADY_ACQUIRED",
        211 => "CUDA_ERROR_NOT_MAPPED",
        212 => "CUDA_ERROR_NOT_MAPPED_AS_ARRAY",
        213 => "CUDA_ERROR_NOT_MAPPED_AS_POINTER",
        214 => "CUDA_ERROR_ECC_UNCORRECTABLE",
        215 => "CUDA_ERROR_UNSUPPORTED_LIMIT",
        216 => "CUDA_ERROR_CONTEXT_ALREADY_IN_USE",
        217 => "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
        218 => "CUDA_ERROR_INVALID_PTX",
        219 => "CUDA_ERROR_INVALID_GRAPHICS_CONTEXT",
        220 => "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        221 => "CUDA_ERROR_JIT_COMPILER_NOT_FOUND",
        222 => "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        223 => "CUDA_ERROR_JIT_COMPILATION_DISABLED",
        224 => "CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY",
        225 => "CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC",
        226 => "CUDA_ERROR_CONTAINED",
        227 => "CUDA_ERROR_INSUFFICIENT_LOADER_VERSION",
        300 => "CUDA_ERROR_INVALID_SOURCE",
        301 => "CUDA_ERROR_FILE_NOT_FOUND",
        302 => "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND",
        303 => "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED",
        304 => "CUDA_ERROR_OPERATING_SYSTEM",
        400 => "CUDA_ERROR_INVALID_HANDLE",
        401 => "CUDA_ERROR_ILLEGAL_STATE",
        402 => "CUDA_ERROR_LOSSY_QUERY",
        500 => "CUDA_ERROR_NOT_FOUND",
        600 => "CUDA_ERROR_NOT_READY",
        700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
        701 => "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
        702 => "CUDA_ERROR_LAUNCH_TIMEOUT",
        703 => "CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING",
        704 => "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
        705 => "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED",
        708 => "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE",
        709 => "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        710 => "CUDA_ERROR_ASSERT",
        711 => "CUDA_ERROR_TOO_MANY_PEERS",
        712 => "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        713 => "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        714 => "CUDA_ERROR_HARDWARE_STACK_ERROR",
        715 => "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        716 => "CUDA_ERROR_MISALIGNED_ADDRESS",
        717 => "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        718 => "CUDA_ERROR_INVALID_PC",
        719 => "CUDA_ERROR_LAUNCH_FAILED",
        720 => "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
        721 => "CUDA_ERROR_TENSOR_MEMORY_LEAK",
        800 => "CUDA_ERROR_NOT_PERMITTED",
        801 => "CUDA_ERROR_NOT_SUPPORTED",
        802 => "CUDA_ERROR_SYSTEM_NOT_READY",
        803 => "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        804 => "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        805 => "CUDA_ERROR_MPS_CONNECTION_FAILED",
        806 => "CUDA_ERROR_MPS_RPC_FAILURE",
        807 => "CUDA_ERROR_MPS_SERVER_NOT_READY",
        808 => "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED",
        809 => "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED",
        810 => "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        811 => "CUDA_ERROR_CDP_NOT_SUPPORTED",
        812 => "CUDA_ERROR_CDP_VERSION_MISMATCH",
        900 => "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        901 => "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        902 => "CUDA_ERROR_STREAM_CAPTURE_MERGE",
        903 => "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
        904 => "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
        905 => "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
        906 => "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        907 => "CUDA_ERROR_CAPTURED_EVENT",
        908 => "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
        909 => "CUDA_ERROR_TIMEOUT",
        910 => "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE",
        911 => "CUDA_ERROR_EXTERNAL_DEVICE",
        912 => "CUDA_ERROR_INVALID_CLUSTER_SIZE",
        913 => "CUDA_ERROR_FUNCTION_NOT_LOADED",
        914 => "CUDA_ERROR_INVALID_RESOURCE_TYPE",
        915 => "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION",
        916 => "CUDA_ERROR_KEY_ROTATION",
        917 => "CUDA_ERROR_STREAM_DETACHED",
        918 => "CUDA_ERROR_GRAPH_RECAPTURE_FAILURE",
        919 => "CUDA_ERROR_FABRIC_NOT_READY",
        999 => "CUDA_ERROR_UNKNOWN",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests;
