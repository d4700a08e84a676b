//! Memory and hashing: huge pages, prefetch, host memory that devices share, and maps from numbers.

pub(crate) mod available;
mod host;
mod huge;
mod mix64;
mod number_map;
pub(crate) mod prefetch;

pub(crate) use host::{HostBlock, HostMemory, OutOfHostMemory};
pub(crate) use huge::{Huge, huge_pages};
pub use mix64::{fold, mix64};
pub(crate) use number_map::NumberMap;
