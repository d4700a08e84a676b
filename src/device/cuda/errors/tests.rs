use super::*;

#[test]
fn final_codes_are_sticky_and_others_are_not() {
    for code in [4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810] {
        assert!(matches!(failed("cuEventQuery", code), DriverError::Sticky { .. }), "{code}");
    }
    for code in [1, 2, 100, 200, 209, 400, 500, 600, 701, 720, 900, 901, 999, 31_337] {
        assert!(matches!(failed("cuEventQuery", code), DriverError::Failed { .. }), "{code}");
    }
}

#[test]
fn a_code_has_its_name_and_an_unknown_one_is_called_unknown() {
    assert_eq!(name(700), "CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_eq!(failed("cuMemcpyAsync", 31_337).to_string(), "cuda cuMemcpyAsync: error 31337 (unknown)");
    assert!(failed("cuEventQuery", 719).to_string().starts_with("cuda cuEventQuery: error 719 (CUDA_ERROR_"));
}

#[test]
fn the_codes_ascend_so_that_each_name_is_found() {
    assert!(NAMES.is_sorted_by(|(code, _), (next, _)| code < next));
    assert!(NAMES.iter().all(|&(code, text)| name(code) == text));
}

#[test]
fn every_error_is_one_line_with_advice() {
    let device = DeviceInfo {
        ordinal: 0,
        name: "GTX 1080".into(),
        compute: Compute::from_number(61),
        memory_bytes: 8 << 30,
    };
    let cases = [
        (CudaError::NoDevice { found: Probe::NoDriver }, "install NVIDIA\'s driver 580 or newer"),
        (CudaError::NoDevice { found: Probe::NoDevice }, "CUDA_VISIBLE_DEVICES"),
        (CudaError::DeviceTooOld { device: device.clone() }, "expected compute 7.0 or newer"),
        (CudaError::NoRoom { device }, "nvidia-smi"),
        (
            CudaError::NoCompiler { found: "no libnvrtc".into(), ahead: "no nvcc at build".into() },
            "no libnvrtc, and no nvcc at build; install NVRTC",
        ),
        (
            CudaError::CompilerTooNew {
                nvrtc: NvrtcRelease { major: 13, minor: 0 },
                least: Compute::from_number(75),
                compute: Compute::from_number(70),
            },
            "NVRTC 13.0 knows compute 7.5 and newer, the device has 7.0; install NVRTC 12.9",
        ),
        (
            CudaError::Image {
                kernel: "probe",
                origin: "PTX".into(),
                driver: version_text(13_000),
                code: 222,
                log: one_line("a\n\n b\n"),
            },
            "(CUDA 13.0) refuses it with error 222 (CUDA_ERROR_UNSUPPORTED_PTX_VERSION): a | b",
        ),
    ];
    for (error, expected) in cases {
        let line = error.to_string();
        assert!(line.contains(expected) && line.lines().count() == 1, "{line}");
    }
}
