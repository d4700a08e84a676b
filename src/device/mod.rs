//! The driver seam: CUDA by dynamic loading, the simulator, and the choice of the machine's device.

pub(crate) mod choice;
pub mod cuda;
#[cfg(feature = "cusim")]
pub mod cusim;

pub(crate) use choice::{Choice, DeviceError, Why, choose};
