//! NVIDIA devices. The driver is opened at run time, so the same program runs where there is none.
//!
//! Only this folder may use `cudarc`. It finds and names the devices; no kernel is launched yet.

pub mod context;
pub mod driver;

pub use context::{DeviceInfo, Probe, probe};
pub use driver::{Address, Driver, DriverError, LaunchShape, Pinned, Work};
