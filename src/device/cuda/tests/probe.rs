//! The probe for CUDA devices, with stub drivers: a complete one, an old one, one without a device, one
//! that fails, one that lacks a function, and a file that is not a library.

use std::path::Path;

use crate::device::cuda::context::probe;

use crate::skip::skip;
use crate::stub_driver::{ChildOutput, LIBCUDA, Machine};

const MARK: &str = "probe result: ";

/// The tests below run this one in a child process.
#[test]
fn the_result_is_one_line() {
    let line = probe().to_string();
    println!("{MARK}{line}");
    assert!(line.contains("CUDA") && line.lines().count() == 1, "{line}");
}

/// Asserts the line that the probe gives on a machine.
fn assert_found_on(machine: &Machine, expected: &str) {
    let Some(ChildOutput { out, .. }) =
        machine.runs_test("device::cuda::tests::probe::the_result_is_one_line")
    else {
        return;
    };
    let (_, found) = out.split_once(MARK).unwrap_or_else(|| panic!("no result in {out}"));
    assert_eq!(found.lines().next(), Some(expected));
}

fn driver() -> Machine {
    Machine::bare().with("libcuda.so", LIBCUDA)
}

#[test]
fn devices_are_named_with_their_compute_capability_and_memory() {
    assert_found_on(
        &driver().with_setting("DEVICES", "2").with_setting("MEMORY", "151397597184"),
        "CUDA device 0: Pretend GPU, compute 9.0, 141.0 GiB; device 1: Other GPU, compute 8.6, 141.0 GiB",
    );
}

#[test]
fn old_failing_and_incomplete_drivers_and_missing_devices_are_distinguished() {
    let cases = [
        ("DRIVER", "12040", "CUDA driver too old: expected at least 13.0, got 12.4"),
        ("DEVICES", "0", "CUDA driver found, no device"),
        ("INIT", "100", "CUDA driver found, no device"),
        ("INIT", "99999", "CUDA driver failed with code 99999"),
    ];
    for (name, value, expected) in cases {
        assert_found_on(&driver().with_setting(name, value), expected);
    }
    let incomplete = LIBCUDA.replace("fn cuDeviceTotalMem_v2(", "fn cuDeviceTotalMem_v9(");
    let machine = Machine::bare().with("libcuda.so", &incomplete);
    assert_found_on(&machine, "CUDA driver lacks cuDeviceTotalMem_v2");
}

#[test]
fn a_file_that_is_not_a_library_is_no_driver() {
    if Path::new("/proc/driver/nvidia").exists() {
        return skip("the loader finds the real driver after the broken file");
    }
    let machine = Machine::bare().with_file("libcuda.so", "not a library");
    assert_found_on(&machine, "no CUDA driver (libcuda is not installed)");
}
