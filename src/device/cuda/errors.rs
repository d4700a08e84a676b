//! CUDA's result codes, with their names and which of them are final; and [`CudaError`], which says why a GPU
//! could not be opened.
//!
//! cudarc's functions for codes are not used. Its conversion of a code to an enum is undefined behaviour for
//! codes of newer drivers, and its lookup of a name panics without libcuda. So codes are plain numbers here,
//! with a table of the names in cuda.h.

use std::ffi::c_int;

use super::compile::NvrtcRelease;
use super::context::{Compute, DeviceInfo, OLDEST_COMPUTE, Probe};
use super::driver::DriverError;

/// The call succeeded.
pub(crate) const SUCCESS: c_int = 0;
/// Device or pinned memory is full.
pub(crate) const OUT_OF_MEMORY: c_int = 2;
/// The driver has no device.
pub(crate) const NO_DEVICE: c_int = 100;
/// The event has not fired yet. This is an answer, not an error.
pub(crate) const NOT_READY: c_int = 600;

/// Codes for an image that another device or a newer driver would accept.
const UNFIT_IMAGES: &[c_int] = &[200, 209, 218, 221, 222, 223];

/// Whether the driver refused this image but may accept another one.
pub(crate) fn is_unfit_image(code: c_int) -> bool {
    UNFIT_IMAGES.contains(&code)
}

/// Whether the code ends the context. According to cuda.h, after each of these codes the process must be
/// restarted to use the device, or the context is destroyed.
#[must_use]
pub(crate) fn is_final(code: c_int) -> bool {
    matches!(code, 4 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810)
}

/// The error of a failed call; [`DriverError::Sticky`] for a final code.
pub(crate) fn failed(call: &'static str, code: c_int) -> DriverError {
    let name = name(code);
    if is_final(code) {
        DriverError::Sticky { call, code, name }
    } else {
        DriverError::Failed { call, code, name }
    }
}

/// Why no GPU could be opened: what was expected, what was found, and what to do. Each message is one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages document variants and fields")]
pub enum CudaError {
    /// `found` is never [`Probe::Found`].
    #[error("{found}; {}", advice(found))]
    NoDevice { found: Probe },
    #[error("CUDA device {ordinal}: expected a number below {count}, the count of devices")]
    NoSuchDevice { ordinal: usize, count: usize },
    #[error(
        "CUDA {device}: expected compute {OLDEST_COMPUTE} or newer (Volta); use another GPU, or set \
         device.kind = \"host\""
    )]
    DeviceTooOld { device: DeviceInfo },
    #[error("CUDA {device}: no memory is left for a context; nvidia-smi lists the processes that use it")]
    NoRoom { device: DeviceInfo },
    /// `found` is the reason why NVRTC is not used, `ahead` the reason why the program's own images are not.
    #[error(
        "CUDA kernels cannot be compiled: {found}, and {ahead}; install NVRTC of CUDA 13.0 (pip package \
         nvidia-cuda-nvrtc) with its folder in LD_LIBRARY_PATH, or build flechette with nvcc on PATH"
    )]
    NoCompiler { found: String, ahead: String },
    /// `least` is the oldest compute capability that NVRTC knows.
    #[error(
        "CUDA kernels cannot be compiled: NVRTC {nvrtc} knows compute {least} and newer, the device has \
         {compute}; install NVRTC 12.9 (pip package nvidia-cuda-nvrtc-cu12) with its folder in \
         LD_LIBRARY_PATH"
    )]
    CompilerTooNew { nvrtc: NvrtcRelease, least: Compute, compute: Compute },
    #[error("CUDA kernel {kernel}: NVRTC {nvrtc} refuses it: {log}")]
    Compile { kernel: &'static str, nvrtc: NvrtcRelease, log: String },
    /// `driver` is the driver's CUDA version. `log` is the output of the driver's compiler, and may be empty.
    #[error(
        "CUDA kernel {kernel} ({origin}): the driver (CUDA {driver}) refuses it with error {code} ({}){}",
        name(*code), after(log)
    )]
    Image { kernel: &'static str, origin: String, driver: String, code: i32, log: String },
    #[error("CUDA kernel {kernel}: expected one parameter by value, got {got}")]
    Parameter { kernel: &'static str, got: String },
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// What the user can do when no device was found. 580 is the first driver branch for CUDA 13.0.
fn advice(found: &Probe) -> &'static str {
    match found {
        Probe::NoDriver | Probe::DriverTooOld { .. } => "install NVIDIA's driver 580 or newer",
        Probe::DriverIncomplete { .. } => "reinstall the driver, 580 or newer",
        Probe::NoDevice | Probe::Found(_) => "check nvidia-smi and CUDA_VISIBLE_DEVICES",
        Probe::Failed { .. } => "check nvidia-smi and dmesg",
    }
}

fn after(log: &str) -> String {
    if log.is_empty() { String::new() } else { format!(": {log}") }
}

/// The lines of a log, joined to one line.
pub(crate) fn one_line(log: &str) -> String {
    let lines = log.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" | ")
}

/// A CUDA version as `major.minor`.
pub(crate) fn version_text(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// A code's name in cuda.h, or `unknown`.
#[must_use]
pub(crate) fn name(code: c_int) -> &'static str {
    NAMES.binary_search_by_key(&code, |&(code, _)| code).map_or("unknown", |at| NAMES[at].1)
}

/// The codes of errors and their names, by ascending code.
const NAMES: &[(c_int, &str)] = &[
    (1, "CUDA_ERROR_INVALID_VALUE"),
    (2, "CUDA_ERROR_OUT_OF_MEMORY"),
    (3, "CUDA_ERROR_NOT_INITIALIZED"),
    (4, "CUDA_ERROR_DEINITIALIZED"),
    (5, "CUDA_ERROR_PROFILER_DISABLED"),
    (6, "CUDA_ERROR_PROFILER_NOT_INITIALIZED"),
    (7, "CUDA_ERROR_PROFILER_ALREADY_STARTED"),
    (8, "CUDA_ERROR_PROFILER_ALREADY_STOPPED"),
    (34, "CUDA_ERROR_STUB_LIBRARY"),
    (36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER"),
    (46, "CUDA_ERROR_DEVICE_UNAVAILABLE"),
    (47, "CUDA_ERROR_MULTICAST_RESOURCE_FULL"),
    (100, "CUDA_ERROR_NO_DEVICE"),
    (101, "CUDA_ERROR_INVALID_DEVICE"),
    (102, "CUDA_ERROR_DEVICE_NOT_LICENSED"),
    (200, "CUDA_ERROR_INVALID_IMAGE"),
    (201, "CUDA_ERROR_INVALID_CONTEXT"),
    (202, "CUDA_ERROR_CONTEXT_ALREADY_CURRENT"),
    (205, "CUDA_ERROR_MAP_FAILED"),
    (206, "CUDA_ERROR_UNMAP_FAILED"),
    (207, "CUDA_ERROR_ARRAY_IS_MAPPED"),
    (208, "CUDA_ERROR_ALREADY_MAPPED"),
    (209, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
    (210, "CUDA_ERROR_ALREADY_ACQUIRED"),
    (211, "CUDA_ERROR_NOT_MAPPED"),
    (212, "CUDA_ERROR_NOT_MAPPED_AS_ARRAY"),
    (213, "CUDA_ERROR_NOT_MAPPED_AS_POINTER"),
    (214, "CUDA_ERROR_ECC_UNCORRECTABLE"),
    (215, "CUDA_ERROR_UNSUPPORTED_LIMIT"),
    (216, "CUDA_ERROR_CONTEXT_ALREADY_IN_USE"),
    (217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"),
    (218, "CUDA_ERROR_INVALID_PTX"),
    (219, "CUDA_ERROR_INVALID_GRAPHICS_CONTEXT"),
    (220, "CUDA_ERROR_NVLINK_UNCORRECTABLE"),
    (221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND"),
    (222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
    (223, "CUDA_ERROR_JIT_COMPILATION_DISABLED"),
    (224, "CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY"),
    (225, "CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC"),
    (226, "CUDA_ERROR_CONTAINED"),
    (227, "CUDA_ERROR_INSUFFICIENT_LOADER_VERSION"),
    (300, "CUDA_ERROR_INVALID_SOURCE"),
    (301, "CUDA_ERROR_FILE_NOT_FOUND"),
    (302, "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND"),
    (303, "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED"),
    (304, "CUDA_ERROR_OPERATING_SYSTEM"),
    (400, "CUDA_ERROR_INVALID_HANDLE"),
    (401, "CUDA_ERROR_ILLEGAL_STATE"),
    (402, "CUDA_ERROR_LOSSY_QUERY"),
    (500, "CUDA_ERROR_NOT_FOUND"),
    (600, "CUDA_ERROR_NOT_READY"),
    (700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
    (701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
    (702, "CUDA_ERROR_LAUNCH_TIMEOUT"),
    (703, "CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING"),
    (704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"),
    (705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED"),
    (708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE"),
    (709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"),
    (710, "CUDA_ERROR_ASSERT"),
    (711, "CUDA_ERROR_TOO_MANY_PEERS"),
    (712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),
    (713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"),
    (714, "CUDA_ERROR_HARDWARE_STACK_ERROR"),
    (715, "CUDA_ERROR_ILLEGAL_INSTRUCTION"),
    (716, "CUDA_ERROR_MISALIGNED_ADDRESS"),
    (717, "CUDA_ERROR_INVALID_ADDRESS_SPACE"),
    (718, "CUDA_ERROR_INVALID_PC"),
    (719, "CUDA_ERROR_LAUNCH_FAILED"),
    (720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"),
    (721, "CUDA_ERROR_TENSOR_MEMORY_LEAK"),
    (800, "CUDA_ERROR_NOT_PERMITTED"),
    (801, "CUDA_ERROR_NOT_SUPPORTED"),
    (802, "CUDA_ERROR_SYSTEM_NOT_READY"),
    (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    (804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"),
    (805, "CUDA_ERROR_MPS_CONNECTION_FAILED"),
    (806, "CUDA_ERROR_MPS_RPC_FAILURE"),
    (807, "CUDA_ERROR_MPS_SERVER_NOT_READY"),
    (808, "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED"),
    (809, "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED"),
    (810, "CUDA_ERROR_MPS_CLIENT_TERMINATED"),
    (811, "CUDA_ERROR_CDP_NOT_SUPPORTED"),
    (812, "CUDA_ERROR_CDP_VERSION_MISMATCH"),
    (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
    (901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
    (902, "CUDA_ERROR_STREAM_CAPTURE_MERGE"),
    (903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"),
    (904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"),
    (905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"),
    (906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"),
    (907, "CUDA_ERROR_CAPTURED_EVENT"),
    (908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"),
    (909, "CUDA_ERROR_TIMEOUT"),
    (910, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE"),
    (911, "CUDA_ERROR_EXTERNAL_DEVICE"),
    (912, "CUDA_ERROR_INVALID_CLUSTER_SIZE"),
    (913, "CUDA_ERROR_FUNCTION_NOT_LOADED"),
    (914, "CUDA_ERROR_INVALID_RESOURCE_TYPE"),
    (915, "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"),
    (916, "CUDA_ERROR_KEY_ROTATION"),
    (917, "CUDA_ERROR_STREAM_DETACHED"),
    (918, "CUDA_ERROR_GRAPH_RECAPTURE_FAILURE"),
    (919, "CUDA_ERROR_FABRIC_NOT_READY"),
    (999, "CUDA_ERROR_UNKNOWN"),
];

#[cfg(test)]
mod tests;
