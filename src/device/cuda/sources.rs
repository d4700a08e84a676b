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
pub struct Header {
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
pub const HEADERS: &[Header] = &[header!("common.cuh")];

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of files in `kernels/` with this ending.
    fn in_folder(ending: &str) -> Vec<String> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
        let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().file_name());
        let mut names: Vec<String> =
            files.filter_map(|name| Some(name.to_str()?.strip_suffix(ending)?.to_owned())).collect();
        names.sort();
        names
    }

    #[test]
    fn the_lists_are_the_folders_files() {
        let mut kernels: Vec<&str> = KERNELS.iter().map(|kernel| kernel.name).collect();
        kernels.sort_unstable();
        assert_eq!(kernels, in_folder(".cu"));
        let mut headers: Vec<&str> = HEADERS.iter().map(|header| header.name).collect();
        headers.sort_unstable();
        let found: Vec<String> = in_folder(".cuh").into_iter().map(|name| name + ".cuh").collect();
        assert_eq!(headers, found);
    }

    #[test]
    fn each_file_names_the_kernels_that_it_defines() {
        for kernel in KERNELS {
            let defined = kernel.text.split("__global__").skip(1).map(|rest| {
                // The word before the first parenthesis that is not a launch bound's.
                let rest = rest.split_once("__launch_bounds__").map_or(rest, |(before, bound)| {
                    if before.contains('(') { rest } else { bound.split_once(')').unwrap().1 }
                });
                rest.split_once('(').unwrap().0.split_whitespace().last().unwrap()
            });
            assert_eq!(defined.collect::<Vec<_>>(), kernel.entries, "{}.cu", kernel.name);
        }
    }

    #[test]
    fn a_kernels_name_is_defined_once() {
        let mut names: Vec<&str> = KERNELS.iter().flat_map(|kernel| kernel.entries).copied().collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
