//! Finds CUDA devices. Nothing is assumed: the driver may be missing, too old or broken, and there may be no
//! device.
//!
//! The seven functions that a probe calls are looked up one by one, so that the message names the missing one
//! if the driver is old or broken (`api.rs` explains why cudarc's wrappers are not used). No context is
//! created, so a probe uses no device memory.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fmt;

use super::api::{driver_is_present, driver_symbol};
use super::errors::{CudaError, NO_DEVICE, SUCCESS, version_text};

/// CUDA version of the oldest usable driver: it must run the PTX of NVRTC 13.0.
pub(crate) const OLDEST_DRIVER: i32 = 13_000;

/// The oldest compute capability that the kernels support: Volta, the first with independent thread
/// scheduling.
pub(crate) const OLDEST_COMPUTE: Compute = Compute::from_number(70);

const NAME_BYTES: usize = 256;
const COMPUTE_MAJOR: c_int = 75;
const COMPUTE_MINOR: c_int = 76;

/// The result of looking for CUDA devices. Displays as one line for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe {
    /// libcuda is not installed.
    NoDriver,
    /// libcuda is installed but lacks a function that every driver has.
    DriverIncomplete {
        /// The name of the function.
        symbol: &'static str,
    },
    /// The driver cannot run the compiled kernels.
    DriverTooOld {
        /// The CUDA version of the driver: 1000 x major + 10 x minor.
        driver: i32,
        /// The oldest usable CUDA version.
        needed: i32,
    },
    /// The driver works and has no device.
    NoDevice,
    /// The devices, by ordinal; at least one.
    Found(Vec<DeviceInfo>),
    /// The driver refused a call.
    Failed {
        /// The CUresult.
        code: i32,
    },
}

/// The compute capability of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub struct Compute {
    pub major: i32,
    pub minor: i32,
}

impl Compute {
    /// The capability with this number, 10 x major + minor.
    pub(crate) const fn from_number(number: i32) -> Self {
        Self { major: number / 10, minor: number % 10 }
    }

    pub(crate) fn number(self) -> i32 {
        10 * self.major + self.minor
    }
}

impl fmt::Display for Compute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A device's properties that are known before it is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The driver's number for the device, from 0.
    pub ordinal: usize,
    /// The product name.
    pub name: String,
    pub compute: Compute,
    /// Total memory.
    pub memory_bytes: usize,
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ordinal, name, compute, memory_bytes } = self;
        let gib = *memory_bytes as f64 / (1_u64 << 30) as f64;
        write!(f, "device {ordinal}: {name}, compute {compute}, {gib:.1} GiB")
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDriver => write!(f, "no CUDA driver (libcuda is not installed)"),
            Self::DriverIncomplete { symbol } => write!(f, "CUDA driver lacks {symbol}"),
            Self::DriverTooOld { driver, needed } => {
                write!(
                    f,
                    "CUDA driver too old: expected at least {}, got {}",
                    version_text(*needed),
                    version_text(*driver)
                )
            }
            Self::NoDevice => write!(f, "CUDA driver found, no device"),
            Self::Found(devices) => {
                let devices: Vec<String> = devices.iter().map(ToString::to_string).collect();
                write!(f, "CUDA {}", devices.join("; "))
            }
            Self::Failed { code } => write!(f, "CUDA driver failed with code {code}"),
        }
    }
}

/// Looks for CUDA devices. Never panics, whatever is installed.
#[must_use]
pub(crate) fn probe() -> Probe {
    match ProbeFunctions::load().and_then(|driver| driver.devices()) {
        Ok(devices) if devices.is_empty() => Probe::NoDevice,
        Ok(devices) => Probe::Found(devices),
        Err(found) => found,
    }
}

/// The device of this number, if the kernels can run on it.
///
/// # Errors
/// [`CudaError`] naming what is missing or too old.
pub(crate) fn usable(ordinal: usize) -> Result<DeviceInfo, CudaError> {
    match probe() {
        Probe::Found(mut devices) => {
            if ordinal >= devices.len() {
                return Err(CudaError::NoSuchDevice { ordinal, count: devices.len() });
            }
            let device = devices.swap_remove(ordinal);
            if device.compute < OLDEST_COMPUTE {
                return Err(CudaError::DeviceTooOld { device });
            }
            Ok(device)
        }
        found => Err(CudaError::NoDevice { found }),
    }
}

/// The driver's functions, with the types of cuda.h: CUresult and CUdevice are ints.
struct ProbeFunctions {
    init: unsafe extern "C" fn(c_uint) -> c_int,
    version: unsafe extern "C" fn(*mut c_int) -> c_int,
    count: unsafe extern "C" fn(*mut c_int) -> c_int,
    device: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    name: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
    attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int,
    memory: unsafe extern "C" fn(*mut usize, c_int) -> c_int,
}

/// A function of libcuda.
///
/// # Safety
/// As for [`driver_symbol`].
unsafe fn symbol<F: Copy>(name: &'static str) -> Result<F, Probe> {
    // SAFETY: this function's own conditions.
    unsafe { driver_symbol(name) }.map_err(|symbol| Probe::DriverIncomplete { symbol })
}

fn checked(code: c_int) -> Result<(), Probe> {
    match code {
        SUCCESS => Ok(()),
        NO_DEVICE => Err(Probe::NoDevice),
        code => Err(Probe::Failed { code }),
    }
}

impl ProbeFunctions {
    fn load() -> Result<Self, Probe> {
        if !driver_is_present() {
            return Err(Probe::NoDriver);
        }
        // SAFETY: the library is present, and each field has the type of its function in cuda.h.
        unsafe {
            Ok(Self {
                init: symbol("cuInit")?,
                version: symbol("cuDriverGetVersion")?,
                count: symbol("cuDeviceGetCount")?,
                device: symbol("cuDeviceGet")?,
                name: symbol("cuDeviceGetName")?,
                attribute: symbol("cuDeviceGetAttribute")?,
                memory: symbol("cuDeviceTotalMem_v2")?,
            })
        }
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, Probe> {
        // The version may be read before cuInit. If the driver is old, it explains more than cuInit's error.
        // SAFETY: writes one int through the pointer it is given.
        let driver = read(|value| unsafe { (self.version)(value) })?;
        if driver < OLDEST_DRIVER {
            return Err(Probe::DriverTooOld { driver, needed: OLDEST_DRIVER });
        }
        // SAFETY: cuInit may be called any number of times, from any thread; its flags must be 0.
        checked(unsafe { (self.init)(0) })?;
        // SAFETY: writes one int through the pointer it is given; the driver is initialised.
        let count = read(|value| unsafe { (self.count)(value) })?;
        (0..count).map(|ordinal| self.device(ordinal)).collect()
    }

    fn device(&self, ordinal: c_int) -> Result<DeviceInfo, Probe> {
        // SAFETY: the driver is initialised and the ordinal below its count; one int is written.
        let device = read(|value| unsafe { (self.device)(value, ordinal) })?;
        // SAFETY: `device` is a device of this driver; one int is written.
        let attribute = |which| read(|value| unsafe { (self.attribute)(value, which, device) });
        // SAFETY: `device` is a device of this driver; one size_t is written.
        let memory_bytes = read(|value| unsafe { (self.memory)(value, device) })?;
        Ok(DeviceInfo {
            ordinal: ordinal as usize,
            name: self.name(device)?,
            compute: Compute { major: attribute(COMPUTE_MAJOR)?, minor: attribute(COMPUTE_MINOR)? },
            memory_bytes,
        })
    }

    fn name(&self, device: c_int) -> Result<String, Probe> {
        let mut name = [0_u8; NAME_BYTES];
        // SAFETY: the driver writes at most `NAME_BYTES` bytes, including the closing zero.
        checked(unsafe { (self.name)(name.as_mut_ptr().cast(), NAME_BYTES as c_int, device) })?;
        let text = CStr::from_bytes_until_nul(&name).map(CStr::to_string_lossy);
        Ok(text.map_or_else(|_| "unnamed".to_owned(), std::borrow::Cow::into_owned))
    }
}

/// The value that a driver call writes through its pointer.
fn read<T: Default>(call: impl FnOnce(*mut T) -> c_int) -> Result<T, Probe> {
    let mut value = T::default();
    checked(call(&raw mut value)).map(|()| value)
}

#[cfg(test)]
mod tests;
