//! Memory and hashing: huge pages, prefetch, host memory that devices share, and maps from numbers.

pub mod available;
mod host;
mod huge;
mod mix64;
mod number_map;
pub mod prefetch;

pub use host::{HostBlock, HostMemory, OutOfHostMemory};
pub use huge::{Huge, huge_pages};
pub use mix64::{fold, mix64};
pub use number_map::NumberMap;
