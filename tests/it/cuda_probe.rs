//! The look for CUDA devices, against libraries that pretend to be libcuda: a whole one, an old one, one
//! with no device, one that fails, one that lacks a function, and a file that is no library.
#![cfg(target_os = "linux")]

use std::path::Path;

use flechette::device::cuda::probe;

use crate::pretend::{LIBCUDA, Machine, Said};

const MARK: &str = "probe says: ";

/// Run by itself, and as the child of the tests below.
#[test]
fn prints_what_it_finds() {
    let line = probe().to_string();
    println!("{MARK}{line}");
    assert!(line.contains("CUDA") && line.lines().count() == 1, "{line}");
}

/// The probe says this on this machine.
fn assert_said_on(machine: &Machine, expected: &str) {
    let Some(Said { out, .. }) = machine.runs_test("cuda_probe::prints_what_it_finds") else { return };
    let (_, said) = out.split_once(MARK).unwrap_or_else(|| panic!("no answer in {out}"));
    assert_eq!(said.lines().next(), Some(expected));
}

fn driver() -> Machine {
    Machine::bare().with("libcuda.so", LIBCUDA)
}

#[test]
fn devices_are_named_with_their_compute_capability_and_memory() {
    assert_said_on(
        &driver().told("DEVICES", "2").told("MEMORY", "151397597184"),
        "CUDA device 0: Pretend GPU, compute 9.0, 141.0 GiB; device 1: Other GPU, compute 8.6, 141.0 GiB",
    );
}

#[test]
fn a_driver_that_is_old_empty_failing_or_incomplete_is_told_from_the_others() {
    let cases = [
        ("DRIVER", "12040", "CUDA driver too old: expected at least 13.0, got 12.4"),
        ("DEVICES", "0", "CUDA driver found, no device"),
        ("INIT", "100", "CUDA driver found, no device"),
        ("INIT", "99999", "CUDA driver failed with code 99999"),
    ];
    for (name, value, expected) in cases {
        assert_said_on(&driver().told(name, value), expected);
    }
    let incomplete = LIBCUDA.replace("fn cuDeviceTotalMem_v2(", "fn cuDeviceTotalMem_v9(");
    let machine = Machine::bare().with("libcuda.so", &incomplete);
    assert_said_on(&machine, "CUDA driver lacks cuDeviceTotalMem_v2");
}

#[test]
fn a_file_that_is_no_library_is_no_driver() {
    // Where a real driver is installed the loader goes on to it.
    if !Path::new("/proc/driver/nvidia").exists() {
        let machine = Machine::bare().with_file("libcuda.so", "not a library");
        assert_said_on(&machine, "no CUDA driver (libcuda is not installed)");
    }
}
