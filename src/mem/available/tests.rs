use std::fs;

use super::*;

#[test]
fn a_process_has_the_limits_of_its_group_and_of_all_groups_above_it() {
    let own = "4:memory,hugetlb:/outer/inner\n3:cpu:/other\n0::/user.slice\n";
    let of = |layout: &Layout| layout.folders(own);
    let paths = |paths: &[&str]| paths.iter().map(PathBuf::from).collect::<Vec<_>>();
    assert_eq!(of(&LAYOUTS[0]), paths(&["/sys/fs/cgroup/user.slice", "/sys/fs/cgroup"]));
    let memory =
        ["/sys/fs/cgroup/memory/outer/inner", "/sys/fs/cgroup/memory/outer", "/sys/fs/cgroup/memory"];
    assert_eq!(of(&LAYOUTS[1]), paths(&memory));
    assert_eq!(LAYOUTS[1].folders(""), paths(&memory[2..]));
}

#[test]
fn pages_of_files_do_not_count_as_used_memory_of_a_group() {
    let folder = tempfile::tempdir().unwrap();
    let write = |file: &str, text: &str| fs::write(folder.path().join(file), text).unwrap();
    write("memory.max", "1000\n");
    write("memory.current", "700\n");
    write("memory.stat", "anon 100\nfile 600\ninactive_file 400\nactive_file 150\n");
    assert_eq!(LAYOUTS[0].group(folder.path()), Some(Group { limit: 1000, used: 150 }));
    write("memory.max", "max\n");
    assert_eq!(LAYOUTS[0].group(folder.path()), None);
    write("memory.limit_in_bytes", "1000\n");
    write("memory.usage_in_bytes", "700\n");
    write("memory.stat", "inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 200\n");
    assert_eq!(LAYOUTS[1].group(folder.path()), Some(Group { limit: 1000, used: 200 }));
}

#[cfg(target_os = "linux")]
#[test]
fn available_memory_is_a_part_of_the_memory() {
    let (memory, available) = (memory_bytes().unwrap(), available_bytes().unwrap());
    assert!(0 < available && available <= memory, "{available} of {memory}");
}
