use super::*;

/// Names, without the ending, of the files in `kernels/` with this ending.
fn in_folder(ending: &str) -> Vec<String> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().file_name());
    let mut names: Vec<String> =
        files.filter_map(|name| Some(name.to_str()?.strip_suffix(ending)?.to_owned())).collect();
    names.sort();
    names
}

#[test]
fn the_lists_name_exactly_the_files_of_the_folder() {
    let mut kernels: Vec<&str> = KERNELS.iter().map(|kernel| kernel.name).collect();
    kernels.sort_unstable();
    assert_eq!(kernels, in_folder(".cu"));
    let mut headers: Vec<&str> = HEADERS.iter().map(|header| header.name).collect();
    headers.sort_unstable();
    let found: Vec<String> = in_folder(".cuh").into_iter().map(|name| name + ".cuh").collect();
    assert_eq!(headers, found);
}

#[test]
fn entries_are_the_kernels_that_each_file_defines() {
    for kernel in KERNELS {
        let defined = kernel.text.split("__global__").skip(1).map(|rest| {
            // The name is the word before the first parenthesis after `__launch_bounds__`, if that is there.
            let rest = rest.split_once("__launch_bounds__").map_or(rest, |(before, bound)| {
                if before.contains('(') { rest } else { bound.split_once(')').unwrap().1 }
            });
            rest.split_once('(').unwrap().0.split_whitespace().last().unwrap()
        });
        assert_eq!(defined.collect::<Vec<_>>(), kernel.entries, "{}.cu", kernel.name);
    }
}

#[test]
fn no_two_kernels_have_the_same_name() {
    let mut names: Vec<&str> = KERNELS.iter().flat_map(|kernel| kernel.entries).copied().collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all);
}
