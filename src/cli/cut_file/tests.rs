use std::io::Write;

use super::*;

const MAPS: &str = "\
55d0c0000000-55d0c0100000 r-xp 00000000 fe:00 1234                       /usr/bin/flechette
7f5e10000000-7f5e10021000 rw-p 00000000 00:00 0 
7f5e20000000-7f5e20100000 r--s 00000000 fe:00 77                         /models/m 1/tables/user.safetensors
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]
";

fn found(address: usize) -> Option<String> {
    let (mut search, mut line) = (Search::new(address), Line::new());
    let ended = MAPS.bytes().any(|byte| search.next(byte, &mut line));
    assert!(ended || !search.found);
    search.found.then(|| text(&line))
}

fn text(line: &Line) -> String {
    String::from_utf8(line.bytes[..line.length].to_vec()).unwrap()
}

#[test]
fn the_file_of_an_address_is_the_one_whose_mapping_contains_it() {
    let user = Some("/models/m 1/tables/user.safetensors".to_owned());
    assert_eq!(found(0x7f5e_2000_0000), user);
    assert_eq!(found(0x7f5e_200f_ffff), user);
    assert_eq!(found(0x55d0_c000_0001), Some("/usr/bin/flechette".to_owned()));
    for no_file in [0, 0x7f5e_1000_0000, 0x7f5e_2010_0000, 0x7ffd_0000_0001, usize::MAX] {
        assert_eq!(found(no_file), None, "{no_file:#x}");
    }
}

#[test]
fn the_path_of_a_file_that_this_process_maps_is_found() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&[7; 10_000]).unwrap();
    // SAFETY: nothing changes the file.
    let map = unsafe { memmap2::Mmap::map(file.as_file()).unwrap() };
    let (maps, mut line) = (File::open("/proc/self/maps").unwrap(), Line::new());
    assert!(push_path(&maps, map.as_ptr() as usize + 9_000, &mut line));
    assert_eq!(text(&line), file.path().to_str().unwrap());
    assert!(!push_path(&maps, 0, &mut line));
}

#[test]
fn a_line_that_is_too_long_is_cut() {
    let mut line = Line::new();
    line.push(&[b'x'; 5000]);
    assert_eq!(text(&line), "x".repeat(LINE_BYTES));
}
