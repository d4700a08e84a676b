//! Devices: what a model's arithmetic runs on.

pub mod choice;
pub mod cuda;
#[cfg(feature = "cusim")]
pub mod cusim;
pub mod pool;

pub use choice::{Choice, DeviceError, Wanted, choose};
