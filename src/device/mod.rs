//! The driver seam: everything that talks to a CUDA driver, and nothing that knows caches or training.
//!
//! [`cuda::Driver`] is the interface: memory, streams, events, launches, graphs. `cuda` implements it for
//! NVIDIA devices by loading libcuda at run time; `cusim` (feature `cusim`) implements it on the CPU for
//! tests. `choice` decides which device a process uses. The cache's device half is in `cache/gpu/`, the
//! trainer's in `trainer/pipeline/gpu/`; both are written against [`cuda::Driver`].

pub(crate) mod choice;
pub mod cuda;
#[cfg(feature = "cusim")]
pub mod cusim;

pub(crate) use choice::{Choice, choose};
