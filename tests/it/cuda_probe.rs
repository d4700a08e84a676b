//! The look for CUDA devices, against libraries that pretend to be libcuda: a whole one, an old one, one
//! with no device, one that fails, one that lacks a function, and a file that is no library.
//!
//! A process opens libcuda once, so each case runs this test program again as a child, with the library
//! on its search path.
#![cfg(target_os = "linux")]

use std::fs;
use std::path::Path;
use std::process::Command;

use flechette::device::cuda::probe;

const MARK: &str = "probe says: ";

/// Run by itself, and as the child of the test below.
#[test]
fn prints_what_it_finds() {
    let line = probe().to_string();
    println!("{MARK}{line}");
    assert!(line.contains("CUDA") && line.lines().count() == 1, "{line}");
}

/// A libcuda as small as it can be: two devices, an H200 and another.
const WHOLE: &str = r#"
use std::ffi::c_char;
#[unsafe(no_mangle)] extern "C" fn cuInit(_: u32) -> i32 { 0 }
#[unsafe(no_mangle)] unsafe extern "C" fn cuDriverGetVersion(to: *mut i32) -> i32 { unsafe { *to = 13000 }; 0 }
#[unsafe(no_mangle)] unsafe extern "C" fn cuDeviceGetCount(to: *mut i32) -> i32 { unsafe { *to = 2 }; 0 }
#[unsafe(no_mangle)] unsafe extern "C" fn cuDeviceGet(to: *mut i32, i: i32) -> i32 { unsafe { *to = i + 40 }; 0 }
#[unsafe(no_mangle)] unsafe extern "C" fn cuDeviceGetName(to: *mut c_char, bytes: i32, device: i32) -> i32 {
    let name: &[u8] = if device == 40 { b"NVIDIA H200\0" } else { b"Other\0" };
    assert!(name.len() <= bytes as usize);
    unsafe { to.copy_from(name.as_ptr().cast(), name.len()) };
    0
}
#[unsafe(no_mangle)] unsafe extern "C" fn cuDeviceGetAttribute(to: *mut i32, which: i32, device: i32) -> i32 {
    unsafe { *to = match (which, device) { (75, 40) => 9, (75, 41) => 8, (76, 41) => 6, (76, _) => 0, _ => return 1 } };
    0
}
#[unsafe(no_mangle)] unsafe extern "C" fn cuDeviceTotalMem_v2(to: *mut usize, device: i32) -> i32 {
    unsafe { *to = if device == 40 { 141 << 30 } else { 3 << 29 } };
    0
}
"#;

/// What the probe says where this source, or these bytes, are libcuda.
fn said_with(library: &dyn Fn(&Path)) -> String {
    let folder = tempfile::tempdir().unwrap();
    library(&folder.path().join("libcuda.so"));
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "cuda_probe::prints_what_it_finds", "--nocapture"])
        .env("LD_LIBRARY_PATH", folder.path())
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success(), "{out}{err}");
    let (_, said) = out.split_once(MARK).unwrap_or_else(|| panic!("no answer in {out}{err}"));
    said.lines().next().unwrap().to_owned()
}

fn said_with_source(source: &str) -> String {
    said_with(&|library| {
        let file = library.with_extension("rs");
        fs::write(&file, source).unwrap();
        let built = Command::new("rustc")
            .args(["--crate-type", "cdylib", "--edition", "2024", "-o"])
            .arg(library)
            .arg(&file)
            .output()
            .unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    })
}

#[test]
fn devices_are_named_with_their_compute_capability_and_memory() {
    assert_eq!(
        said_with_source(WHOLE),
        "CUDA device 0: NVIDIA H200, compute 9.0, 141.0 GiB; device 1: Other, compute 8.6, 1.5 GiB"
    );
}

#[test]
fn a_driver_that_is_old_empty_failing_or_incomplete_is_told_from_the_others() {
    let cases = [
        ("*to = 13000", "*to = 12040", "CUDA driver too old: expected at least 13.0, got 12.4"),
        ("*to = 2 }", "*to = 0 }", "CUDA driver found, no device"),
        ("cuInit(_: u32) -> i32 { 0 }", "cuInit(_: u32) -> i32 { 100 }", "CUDA driver found, no device"),
        (
            "cuInit(_: u32) -> i32 { 0 }",
            "cuInit(_: u32) -> i32 { 99999 }",
            "CUDA driver failed with code 99999",
        ),
        ("cuDeviceTotalMem_v2", "cuDeviceTotalMem_v9", "CUDA driver lacks cuDeviceTotalMem_v2"),
    ];
    for (from, to, expected) in cases {
        assert!(WHOLE.contains(from), "{from}");
        assert_eq!(said_with_source(&WHOLE.replace(from, to)), expected);
    }
}

#[test]
fn a_file_that_is_no_library_is_no_driver() {
    let said = said_with(&|library| fs::write(library, "not a library").unwrap());
    // Where a real driver is installed the loader goes on to it.
    if !Path::new("/proc/driver/nvidia").exists() {
        assert_eq!(said, "no CUDA driver (libcuda is not installed)");
    }
}
