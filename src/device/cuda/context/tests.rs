use super::*;

#[test]
fn a_probe_displays_as_one_line_whatever_is_installed() {
    let line = probe().to_string();
    eprintln!("{line}");
    assert!(line.contains("CUDA") && !line.contains('\n'));
}

#[test]
fn the_line_names_devices_versions_and_codes() {
    let device = DeviceInfo {
        ordinal: 0,
        name: "H200".into(),
        compute: Compute::from_number(90),
        memory_bytes: 141 << 30,
    };
    assert_eq!(Probe::Found(vec![device]).to_string(), "CUDA device 0: H200, compute 9.0, 141.0 GiB");
    let old = Probe::DriverTooOld { driver: 12_040, needed: OLDEST_DRIVER };
    assert_eq!(old.to_string(), "CUDA driver too old: expected at least 13.0, got 12.4");
    assert!(Probe::Failed { code: 803 }.to_string().contains("803"));
}
