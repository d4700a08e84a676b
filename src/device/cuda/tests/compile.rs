//! Kernels compiled by the real NVRTC, which needs no GPU: every kernel for every architecture, and the disk
//! cache.
//!
//! The tests use each NVRTC in the folders of `$NVRTC_PATH` (separated as in `$PATH`) and below `target/ci`,
//! where `.ci/kernels` installs it. NVRTC loads its own libraries by name, so each test runs in a child
//! process with the folder as its library path. Without NVRTC the tests are skipped.

use std::fs;
use std::path::{Path, PathBuf};

use crate::device::cuda::compile::{Built, CompileFor, Compiler, Target, build};
use crate::device::cuda::context::Compute;
use crate::device::cuda::kernel_cache::KernelCache;
use crate::device::cuda::sources::{KERNELS, KernelFile};
use crate::device::cuda::{CudaError, open};

use crate::skip::skip;
use crate::stub_driver::{ChildOutput, LIBCUDA, Machine};

/// The folders that contain a libnvrtc.
fn folders() -> Vec<PathBuf> {
    let named = std::env::var_os("NVRTC_PATH").unwrap_or_default();
    let mut found: Vec<PathBuf> = std::env::split_paths(&named).collect();
    let installed = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/ci/cuda-13.0/lib");
    for python in fs::read_dir(installed).into_iter().flatten().flatten() {
        let packages = python.path().join("site-packages/nvidia");
        found.extend(["cu13/lib", "cuda_nvrtc/lib"].map(|folder| packages.join(folder)));
    }
    found.retain(|folder| {
        let files = fs::read_dir(folder).into_iter().flatten().flatten();
        files.into_iter().any(|file| file.file_name().to_string_lossy().starts_with("libnvrtc.so"))
    });
    if found.is_empty() {
        skip("no NVRTC in $NVRTC_PATH or below target/ci (.ci/kernels installs it)");
    }
    found
}

/// Runs `inside` in a child process for each compiler. Returns the children's outputs; in a child, nothing.
fn with_every_compiler(machine: impl Fn() -> Machine, inside: impl Fn(&Path) + Copy) -> Vec<ChildOutput> {
    folders().iter().map_while(|folder| machine().with_path(folder).runs(inside)).collect()
}

/// Compute capabilities. Every compiler supports 7.5 and later; 7.0 only NVRTC 12.9.
const COMPUTES: [Compute; 4] =
    [Compute::from_number(70), Compute::from_number(75), Compute::from_number(80), Compute::from_number(90)];

fn is_machine_code(image: &[u8]) -> bool {
    image.starts_with(b"\x7fELF")
}

/// Uses the NVRTC on the library path. The next test runs this one in a child process for each NVRTC.
#[test]
fn compiles_every_kernel_for_every_device() {
    let compiler = match Compiler::find() {
        Ok(compiler) => compiler,
        Err(reason) => return skip(&reason),
    };
    println!("compiler: {compiler:?}");
    for compute in COMPUTES {
        let built = match build(&compiler, KERNELS, CompileFor { compute, driver: 13_000 }, None) {
            Ok(built) => built,
            Err(error @ CudaError::CompilerTooNew { .. }) => {
                assert_eq!(compute, Compute::from_number(70), "{error}");
                assert!(error.to_string().contains("install NVRTC 12.9"), "{error}");
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        assert_eq!(built.images.len(), KERNELS.len());
        for image in &built.images {
            assert!(is_machine_code(&image.bytes), "{} is no machine code", image.kernel.name);
            println!("{}: {}", image.kernel.name, image.origin);
        }
    }
    // PTX is for devices that are newer than the compiler. The text ends with a zero byte.
    for kernel in KERNELS {
        let ptx = compiler.compile(kernel, Target::Text(75)).unwrap();
        assert_eq!(ptx.last(), Some(&0));
        let ptx = String::from_utf8(ptx).unwrap();
        for entry in kernel.entries {
            assert!(ptx.contains(&format!(".visible .entry {entry}(")), "{ptx}");
        }
        // No fused multiply-add: a product and a sum are rounded separately, as on the host.
        assert!(!ptx.contains("fma."), "{ptx}");
    }
}

#[test]
fn every_installed_compiler_compiles_every_kernel() {
    for folder in folders() {
        let machine = Machine::bare().with_path(&folder);
        let out = machine
            .runs_test("device::cuda::tests::compile::compiles_every_kernel_for_every_device")
            .unwrap()
            .out;
        let version = out.lines().find(|line| line.starts_with("compiler: "));
        let version = version.unwrap_or_else(|| panic!("{}: skipped: {out}", folder.display()));
        let expected: &[&str] =
            if version.contains("NVRTC 12") { &["70", "75", "80", "90"] } else { &["75", "80", "90"] };
        for kernel in KERNELS {
            for sm in expected {
                let line = format!("{}: {} for sm_{sm}", kernel.name, &version["compiler: ".len()..]);
                assert!(out.contains(&line), "{line} in {out}");
            }
        }
        eprintln!("{version}: {} kernels for {expected:?}", KERNELS.len());
    }
}

#[test]
fn the_error_of_a_wrong_kernel_contains_the_compilers_message() {
    with_every_compiler(Machine::bare, |_| {
        let compiler = Compiler::find().unwrap();
        let text = "extern \"C\" __global__ void wrong(int* to) { *to = nowhere; }";
        let wrong = KernelFile { name: "wrong", text, entries: &["wrong"] };
        let error = compiler.compile(&wrong, Target::Binary(90)).unwrap_err().to_string();
        assert!(error.starts_with("CUDA kernel wrong: NVRTC 1"), "{error}");
        assert!(error.contains("wrong.cu(1)") && error.contains("nowhere"), "{error}");
        assert_eq!(error.lines().count(), 1);
    });
}

#[test]
fn a_compiler_without_its_builtins_library_is_refused_with_its_message() {
    for folder in folders() {
        let mut files = fs::read_dir(&folder).unwrap().map(|file| file.unwrap());
        let main = files.find(|file| file.file_name().to_string_lossy().starts_with("libnvrtc.so"));
        let main = main.unwrap().path();
        let child = Machine::bare().with_link(&main).runs(|_| {
            let compiled = Compiler::find().unwrap().compile(&KERNELS[0], Target::Binary(90));
            let Err(error) = compiled else {
                return skip("libnvrtc-builtins is installed for all programs");
            };
            let error = error.to_string();
            assert!(error.contains("libnvrtc-builtins") && error.lines().count() == 1, "{error}");
        });
        if child.is_none() {
            return;
        }
    }
}

/// Compiles the kernels for an H200, with a cache in this folder.
fn built_with(folder: &Path) -> Built {
    let cache = KernelCache::new(folder);
    let device = CompileFor { compute: Compute::from_number(90), driver: 13_000 };
    build(&Compiler::find().unwrap(), KERNELS, device, Some(&cache)).unwrap()
}

#[test]
fn an_image_is_compiled_once_and_again_when_its_file_is_damaged() {
    with_every_compiler(Machine::bare, |folder| {
        let cache = folder.join("kernels");
        let first = built_with(&cache);
        assert_eq!((first.from_cache, first.troubles.len()), (0, 0));
        let second = built_with(&cache);
        assert_eq!((second.from_cache, second.troubles.len()), (KERNELS.len(), 0));
        assert_eq!(second.images, first.images);

        for file in fs::read_dir(&cache).unwrap() {
            let path = file.unwrap().path();
            let mut bytes = fs::read(&path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(path, bytes).unwrap();
        }
        let third = built_with(&cache);
        assert_eq!((third.from_cache, third.troubles.len()), (0, KERNELS.len()));
        assert!(third.troubles[0].contains("the kernel is compiled again"), "{:?}", third.troubles);
        assert_eq!(third.images, first.images);
        assert_eq!(built_with(&cache).from_cache, KERNELS.len(), "the damaged files are replaced");
    });
}

#[test]
fn a_cache_that_cannot_be_written_only_gives_warnings() {
    with_every_compiler(
        || Machine::bare().with_file("in_the_way", ""),
        |folder| {
            let built = built_with(&folder.join("in_the_way/kernels"));
            assert_eq!((built.images.len(), built.from_cache), (KERNELS.len(), 0));
            assert!(!built.troubles.is_empty());
            for trouble in built.troubles {
                assert!(trouble.contains("in_the_way/kernels"), "{trouble}");
            }
        },
    );
}

#[test]
fn a_device_is_opened_with_machine_code_of_the_real_nvrtc() {
    let outputs = with_every_compiler(
        || Machine::bare().with("libcuda.so", LIBCUDA),
        |folder| {
            let driver = open(0, Some(&folder.join("kernels"))).unwrap();
            assert!(driver.to_string().contains("kernels by NVRTC 1"), "{driver}");
        },
    );
    for output in outputs {
        assert_eq!(output.log.matches("module machine code").count(), KERNELS.len(), "{}", output.log);
    }
}
