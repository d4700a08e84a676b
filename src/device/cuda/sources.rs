//! The kernels' sources, in the binary: the one list of what is compiled for a GPU.
//!
//! A new kernel is one more line here, and nothing else: NVRTC, the disk cache, nvcc (`build.rs` takes
//! every `.cu` of the folder) and the tests go by this list and by the folder, and a test holds the two
//! together.

/// A file of `kernels/` that is compiled by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelFile {
    /// Its name without `.cu`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// The kernels that it defines, by the names they are launched by.
    pub entries: &'static [&'static str],
}

/// A file that kernels include, by the name they include it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// As in `#include "name"`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

macro_rules! kernel {
    ($name:literal: $($entry:literal),+) => {
        KernelFile {
            name: $name,
            text: include_str!(concat!("../../../kernels/", $name, ".cu")),
            entries: &[$($entry),+],
        }
    };
}

macro_rules! header {
    ($name:literal) => {
        Header { name: $name, text: include_str!(concat!("../../../kernels/", $name)) }
    };
}

/// Every file that is compiled.
pub const KERNELS: &[KernelFile] = &[
    kernel!("copy_rows": "copy_rows"),
    kernel!("gather_pool": "gather_pool"),
    kernel!("list": "list_entries"),
    kernel!("probe": "probe"),
    kernel!("replace": "copy_in", "link_keys"),
    kernel!("scratch": "take_records", "put_records"),
    kernel!("sweep": "sample_ages", "sweep"),
    kernel!("update": "update_rows"),
];

/// Every file that they include.
pub(crate) const HEADERS: &[Header] = &[header!("common.cuh")];

#[cfg(test)]
mod tests;
