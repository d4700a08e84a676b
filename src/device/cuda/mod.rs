//! NVIDIA devices. libcuda is opened at run time, so the same program also runs on machines without it.
//!
//! [`context::usable`] finds a device. [`open`] opens it: it retains the primary context, loads the kernels,
//! and returns [`Nvidia`], the [`Driver`] for a real device. Kernels are compiled by nvcc at build time
//! ([`ahead`]), or by NVRTC at start ([`compile`]). Only this folder uses `cudarc`, and only to open
//! libraries (`api` explains why).

pub(crate) mod ahead;
pub(crate) mod compile;
pub(crate) mod context;
pub(crate) mod driver;
pub(crate) mod errors;
pub(crate) mod kernel_cache;
pub(crate) mod launch;
pub mod memory;
pub(crate) mod nvidia;
pub(crate) mod pinned;
pub(crate) mod pool_args;
pub(crate) mod sources;

mod api;
mod modules;
mod primary;
mod stream;

pub use driver::Driver;
pub(crate) use driver::{Address, DriverError, LaunchShape, Pinned};
pub(crate) use errors::CudaError;
pub(crate) use nvidia::Nvidia;
pub use nvidia::open;

#[cfg(test)]
#[cfg(not(flechette_loom))]
#[cfg(target_os = "linux")]
pub(crate) mod tests;
