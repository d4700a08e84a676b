//! NVIDIA devices. The driver is opened at run time, so the same program runs where there is none.
//!
//! Only this folder may use `cudarc`, and of it only the opened libraries (`api` says why). [`usable`]
//! finds a device; [`open`] takes it: the primary context, the kernels (compiled by `compile`, or carried
//! by the program, `ahead`), and [`Nvidia`], which is the machine's [`Driver`].
//!
//! What is done with a device is written against [`Driver`], and so for the simulator too:
//!
//! - [`args`]: what kernels are given; [`kernels`]: their launches;
//! - [`memory`]: device and pinned memory; [`pinned`]: the latter for the store's rows;
//! - [`tier`]: the cache's index and pool on the device, and how rows come in; [`sweeper`]: how they go;
//! - [`lister`]: what is there; [`overlay`]: where the changed rows of a new version are meanwhile;
//! - [`lane`]: one batch at a time through probe, copy and gather.
//!
//! And for the trainer: [`scratchpad`] and `stepper`, of the contract `device::scratch`.

pub mod ahead;
pub mod args;
mod block;
pub mod compile;
pub mod context;
pub mod driver;
pub mod errors;
pub mod kernel_cache;
pub mod kernels;
pub mod lane;
pub mod lister;
pub mod memory;
pub mod nvidia;
pub mod overlay;
pub mod pinned;
pub mod scratchpad;
mod shape;
pub mod sources;
mod stepper;
pub mod sweeper;
pub mod tier;
pub mod train_args;

mod api;
mod modules;
mod primary;
mod stream;

pub use context::{DeviceInfo, Probe, probe, usable};
pub use driver::{Address, Driver, DriverError, LaunchShape, Pinned, Work};
pub use errors::CudaError;
pub use nvidia::{Nvidia, open, open_with};
