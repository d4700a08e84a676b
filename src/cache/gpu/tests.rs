//! The contract of `cache/tests/contract` on devices, and what only a device has.

#[cfg(target_os = "linux")]
mod cuda;
#[cfg(feature = "cusim")]
mod cusim;
#[cfg(feature = "cusim")]
mod cusim_tier;
mod subject;
