use super::super::cuda::context::{Compute, DeviceInfo, Probe};
use super::*;

fn h200() -> DeviceInfo {
    DeviceInfo { ordinal: 0, name: "H200".into(), compute: Compute::from_number(90), memory_bytes: 141 << 30 }
}

fn refusals() -> [CudaError; 3] {
    let old = DeviceInfo { name: "GTX 1080".into(), compute: Compute::from_number(61), ..h200() };
    [
        CudaError::NoDevice { found: Probe::NoDriver },
        CudaError::NoDevice { found: Probe::DriverTooOld { driver: 12_040, needed: 13_000 } },
        CudaError::DeviceTooOld { device: old },
    ]
}

#[test]
fn host_is_chosen_without_looking_for_a_gpu() {
    let choice: Choice<DeviceInfo> =
        choose(DeviceKind::Host, || panic!("`open` is not called for host")).unwrap();
    assert!(!choice.is_fallback());
    assert_eq!(choice.to_string(), "device host");
}

#[test]
fn auto_and_cuda_choose_a_usable_gpu() {
    for wanted in [DeviceKind::Auto, DeviceKind::Cuda] {
        let choice = choose(wanted, || Ok(h200())).unwrap();
        assert!(matches!(choice, Choice::Cuda(_)) && !choice.is_fallback());
        assert!(choice.to_string().contains("H200"), "{choice}");
    }
}

#[test]
fn auto_falls_back_to_the_host_and_gives_the_reason() {
    for error in refusals() {
        let choice: Choice<DeviceInfo> = choose(DeviceKind::Auto, || Err(error.clone())).unwrap();
        let line = choice.to_string();
        // A machine without a driver has no GPU that anybody expects to be used.
        let expected = error != CudaError::NoDevice { found: Probe::NoDriver };
        assert_eq!(choice.is_fallback(), expected, "{line}");
        match expected {
            true => assert!(line.contains(&error.to_string()), "{line}"),
            false => assert!(line.contains("no GPU") && !line.contains("install"), "{line}"),
        }
    }
}

#[test]
fn cuda_without_a_usable_gpu_is_refused_with_the_reason() {
    for error in refusals() {
        let refused = choose::<DeviceInfo>(DeviceKind::Cuda, || Err(error.clone())).unwrap_err();
        let line = refused.to_string();
        assert!(line.starts_with("device.kind") && line.contains(&error.to_string()), "{line}");
    }
}
