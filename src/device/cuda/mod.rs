//! NVIDIA devices. The driver is opened at run time, so the same program runs where there is none.
//!
//! Only this folder may use `cudarc`, and of it only the opened libraries (`api` says why). [`usable`]
//! finds a device; [`open`] takes it: the primary context, the kernels (compiled by `compile`, or carried
//! by the program, `ahead`), and [`Nvidia`], which is the machine's [`Driver`].
//!
//! What is done with a device is written against [`Driver`], and so runs on the simulator too: the cache in
//! `cache/gpu/` and the trainer's scratchpad in `trainer/pipeline/gpu/`.

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
