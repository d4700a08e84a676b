//! Opening a CUDA device on machines with a stub driver (`stub_driver`): where its kernels come from, and
//! every error.

use crate::device::cuda::context::Compute;
use crate::device::cuda::sources::KERNELS;
use crate::device::cuda::{CudaError, ahead, open};

use crate::skip::skip;
use crate::stub_driver::{ChildOutput, LIBCUDA, Machine};

/// Asserts that the driver was dropped and everything was released.
fn assert_nothing_left(output: &ChildOutput) {
    let end = output.log.lines().last().unwrap();
    assert_eq!(
        end, "released with streams 0 events 0 graphs 0 modules 0 device 0 pinned 0",
        "{}",
        output.log
    );
}

/// The error when this machine's device is opened.
fn refusal() -> CudaError {
    let error = open(0, None).map(drop).unwrap_err();
    assert_eq!(error.to_string().lines().count(), 1, "{error}");
    error
}

#[test]
fn a_driver_that_lacks_a_function_is_refused_with_its_name() {
    let old = LIBCUDA.replace("fn cuGraphLaunch(", "fn cuGraphLaunch_v0(");
    Machine::whole().with("libcuda.so", &old).runs(|_| {
        assert_eq!(
            refusal().to_string(),
            "CUDA driver lacks cuGraphLaunch; reinstall the driver, 580 or newer"
        );
    });
}

#[test]
fn an_old_driver_is_refused_with_the_required_version() {
    Machine::whole().with_setting("DRIVER", "12040").runs(|_| {
        assert_eq!(
            refusal().to_string(),
            "CUDA driver too old: expected at least 13.0, got 12.4; install NVIDIA's driver 580 or newer"
        );
    });
}

#[test]
fn an_old_device_is_refused_with_the_required_capability() {
    Machine::whole().with_setting("COMPUTE", "61").runs(|_| {
        let text = refusal().to_string();
        assert!(text.contains("Pretend GPU, compute 6.1, 1.0 GiB: expected compute 7.0 or newer"), "{text}");
    });
}

#[test]
fn a_device_that_does_not_exist_is_refused_with_the_number_of_devices() {
    Machine::whole().with_setting("DEVICES", "2").runs(|_| {
        assert_eq!(open(1, None).unwrap().info().ordinal, 1);
        let text = open(2, None).unwrap_err().to_string();
        assert_eq!(text, "CUDA device 2: expected a number below 2, the count of devices");
    });
}

#[test]
fn a_device_without_memory_for_a_context_is_refused() {
    Machine::whole().with_setting("RETAIN", "2").runs(|_| {
        let text = refusal().to_string();
        assert!(text.contains("no memory is left for a context") && text.contains("nvidia-smi"), "{text}");
    });
}

#[test]
fn the_error_of_a_refused_context_has_its_code() {
    Machine::whole().with_setting("RETAIN", "46").runs(|_| {
        let expected = "cuda cuDevicePrimaryCtxRetain: error 46 (CUDA_ERROR_DEVICE_UNAVAILABLE)";
        assert_eq!(refusal().to_string(), expected);
    });
}

#[test]
fn kernels_without_exactly_one_parameter_are_refused() {
    let (none, several) =
        ("expected one parameter by value, got none", "expected one parameter by value, got several");
    for (count, expected) in [("0", none), ("2", several)] {
        // The test runs itself as two children with different settings.
        let output = Machine::whole().with_setting("PARAMETERS", count).runs(|_| println!("{}", refusal()));
        let Some(output) = output else { return };
        assert!(output.out.contains(expected), "{}", output.out);
    }
}

#[test]
fn a_kernel_that_its_image_lacks_is_refused() {
    let output = Machine::whole().with_setting("FUNCTION", "500").runs(|_| {
        assert_eq!(refusal().to_string(), "cuda cuModuleGetFunction: error 500 (CUDA_ERROR_NOT_FOUND)");
    });
    // Modules that were loaded before the error are unloaded.
    output.inspect(assert_nothing_left);
}

#[test]
fn kernels_are_compiled_for_the_device_and_cached_on_disk() {
    let output = Machine::whole().runs(|folder| {
        let cache = folder.join("kernels");
        for _ in 0..2 {
            let driver = open(0, Some(&cache)).unwrap();
            assert!(driver.to_string().ends_with("kernels by NVRTC 13.0 for sm_90"), "{driver}");
        }
        assert!(std::fs::read_dir(cache).unwrap().count() > 0);
    });
    if let Some(output) = output {
        let log = output.log;
        for kernel in KERNELS {
            let name = format!("{}.cu", kernel.name);
            assert_eq!(log.matches(&format!("compiled {name}")).count(), 1, "{log}");
            assert_eq!(
                log.matches(&format!("module text binary {name} with common.cuh")).count(),
                2,
                "{log}"
            );
        }
        assert!(log.contains("--fmad=false") && log.contains("--gpu-architecture=sm_90"));
    }
}

#[test]
fn a_device_newer_than_the_compiler_gets_ptx_and_one_that_is_older_is_refused() {
    let newer = Machine::whole().with_setting("COMPUTE", "120").runs(|_| {
        if std::env::var("PRETEND_COMPUTE").unwrap() == "120" {
            assert!(open(0, None).unwrap().to_string().ends_with("for compute_90"));
        } else {
            println!("{}", refusal());
        }
    });
    let Some(newer) = newer else { return };
    assert!(newer.log.contains("module text ptx "), "{}", newer.log);
    let name = "a_device_newer_than_the_compiler_gets_ptx_and_one_that_is_older_is_refused";
    let name = format!("device::cuda::tests::open::{name}");
    let Some(older) = Machine::whole().with_setting("COMPUTE", "70").runs_test(&name) else {
        return;
    };
    let expected = "NVRTC 13.0 knows compute 7.5 and newer, the device has 7.0; install NVRTC 12.9";
    assert!(older.out.contains(expected), "{}", older.out);
}

#[test]
fn the_error_of_a_kernel_that_does_not_compile_has_the_compilers_log() {
    let output = Machine::whole().with_setting("COMPILE", "6").runs(|_| {
        let text = refusal().to_string();
        let expected = "NVRTC 13.0 refuses it: code 6: it.cu(1): error: | expected a kernel";
        assert_eq!(text, format!("CUDA kernel {}: {expected}", KERNELS[0].name));
    });
    output.inspect(assert_nothing_left);
}

#[test]
fn the_error_of_an_image_that_the_driver_refuses_has_versions_and_log() {
    let output = Machine::whole().with_setting("IMAGE", "222").runs(|_| {
        let expected = "(NVRTC 13.0 for sm_90): the driver (CUDA 13.0) refuses it with error 222 \
                        (CUDA_ERROR_UNSUPPORTED_PTX_VERSION): ptxas fatal: | unsupported version";
        assert_eq!(refusal().to_string(), format!("CUDA kernel {} {expected}", KERNELS[0].name));
    });
    output.inspect(assert_nothing_left);
}

#[test]
fn without_a_compiler_the_error_says_what_to_install() {
    let output = Machine::bare().with("libcuda.so", LIBCUDA).runs(|_| match open(0, None) {
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("libnvrtc is not on the library path, and "), "{text}");
            assert!(text.contains("install NVRTC of CUDA 13.0"), "{text}");
        }
        Ok(driver) => skip(&format!("NVRTC is installed for all programs: {driver}")),
    });
    output.inspect(|output| eprintln!("{}", output.log));
}

#[test]
fn kernels_compiled_ahead_of_time_need_no_compiler() {
    if let Err(reason) = ahead::images(KERNELS, Compute::from_number(90)) {
        return skip(&reason);
    }
    let output = Machine::bare().with("libcuda.so", LIBCUDA).with_setting("BUNDLE", "0").runs(|_| {
        let driver = open(0, None).unwrap();
        assert!(driver.to_string().contains("kernels by nvcc"), "{driver}");
    });
    if let Some(output) = output {
        assert!(output.log.contains("module bundle"), "{}", output.log);
        assert_nothing_left(&output);
    }
}
