//! NVIDIA devices. The driver is opened at run time, so the same program runs where there is none.
//!
//! Only this folder may use `cudarc`. `context` finds and names the devices; everything else is written
//! against [`Driver`]:
//!
//! - [`args`]: what kernels are given; [`kernels`]: their launches;
//! - [`memory`]: device and pinned memory;
//! - [`tier`]: the cache's index and pool on the device, and how rows come in; [`sweeper`]: how they go;
//! - [`lane`]: one batch at a time through probe, copy and gather.

pub mod args;
mod block;
pub mod context;
pub mod driver;
pub mod kernels;
pub mod lane;
pub mod memory;
mod shape;
pub mod sweeper;
pub mod tier;

pub use context::{DeviceInfo, Probe, probe};
pub use driver::{Address, Driver, DriverError, LaunchShape, Pinned, Work};
