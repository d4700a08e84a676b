//! The contracts of a scratchpad (`contract`) and of the pipeline (`pipeline/tests/contract.rs`) on devices.

mod contract;
#[cfg(target_os = "linux")]
mod cuda;
#[cfg(feature = "cusim")]
mod cusim;
