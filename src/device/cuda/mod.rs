//! NVIDIA devices. libcuda is opened at run time, so the same program also runs on machines without it.
//!
//! [`usable`] finds a device. [`open`] opens it: it retains the primary context, loads the kernels (compiled
//! by `compile`, or ahead of time, `ahead`), and returns [`Nvidia`], the [`Driver`] of the machine. Only this
//! folder uses `cudarc`, and only to open libraries (`api` explains why).

pub mod ahead;
pub mod compile;
pub(crate) mod context;
pub(crate) mod driver;
pub(crate) mod errors;
pub mod kernel_cache;
pub(crate) mod launch;
pub mod memory;
pub(crate) mod nvidia;
pub(crate) mod pinned;
pub mod pool_args;
pub mod sources;

mod api;
mod modules;
mod primary;
mod stream;

pub use context::{DeviceInfo, Probe, probe, usable};
pub use driver::{Address, Driver, DriverError, LaunchShape, Pinned, Work};
pub use errors::CudaError;
pub use nvidia::{Nvidia, open, open_with};

#[cfg(test)]
#[cfg(not(flechette_loom))]
#[cfg(target_os = "linux")]
pub(crate) mod tests;
