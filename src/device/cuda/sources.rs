//! The list of kernels, with their sources embedded in the program.
//!
//! A new kernel needs its `.cu` file and one line here. NVRTC and the disk cache use this list. `build.rs`
//! compiles every `.cu` file in `kernels/`. A test checks that the list and the folder agree.

/// A `.cu` file of `kernels/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelFile {
    /// Its name without `.cu`.
    pub name: &'static str,
    /// Its source.
    pub text: &'static str,
    /// Names of the kernels that it defines.
    pub entries: &'static [&'static str],
}

/// A file that kernels include.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// The name in `#include "name"`.
    pub name: &'static str,
    /// Its source.
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

/// All kernel files.
pub(crate) const KERNELS: &[KernelFile] = &[
    kernel!("copy_rows": "copy_rows"),
    kernel!("gather_pool": "gather_pool"),
    kernel!("list": "list_entries"),
    kernel!("probe": "probe"),
    kernel!("replace": "copy_in", "link_keys"),
    kernel!("scratch": "take_records", "put_records"),
    kernel!("sweep": "sample_ages", "sweep"),
    kernel!("update": "update_rows"),
];

/// All files that kernels include.
pub(crate) const HEADERS: &[Header] = &[header!("common.cuh")];

#[cfg(test)]
mod tests;
