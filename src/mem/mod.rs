//! Memory and hashing: the allocator's arenas, huge pages, mappings, prefetch, host memory that a device can
//! share, hash tables with number keys, the bits of words, pseudo-random numbers, and amounts of memory in
//! words.

mod arenas;
pub(crate) mod available;
mod bits;
mod host;
mod huge;
mod mix64;
mod number_map;
mod pages;
mod parted_map;
pub(crate) mod prefetch;
pub(crate) mod probe_table;
mod shown;

pub(crate) use arenas::limit_arenas;
pub(crate) use bits::set_bits;
pub(crate) use host::{HostBlock, HostMemory, OutOfHostMemory};
pub(crate) use huge::{Huge, huge_pages};
pub use mix64::SplitMix64;
pub(crate) use mix64::{finalize64, fold, mix64, unit};
pub(crate) use number_map::NumberMap;
pub(crate) use pages::Pages;
pub(crate) use parted_map::{PartedEntries, PartedMap};
pub(crate) use shown::bytes;

/// Bytes of a word. Rows and records consist of words, and kernels address them by words.
pub(crate) const WORD_BYTES: usize = size_of::<u32>();
