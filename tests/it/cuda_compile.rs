//! Kernels compiled by NVIDIA's real NVRTC, which needs no GPU: every kernel for every architecture, and
//! the disk cache around it.
//!
//! NVRTC is looked for in the folders of `$NVRTC_PATH`, as a path is written, and in what `.ci/kernels`
//! installs below `target/ci`. It opens its own parts by name, so each folder is the library path of a
//! child. Where none is found the tests skip aloud.
#![cfg(target_os = "linux")]

use std::fs;
use std::path::{Path, PathBuf};

use flechette::device::cuda::compile::{Built, Compiler, Target, build};
use flechette::device::cuda::kernel_cache::KernelCache;
use flechette::device::cuda::sources::{KERNELS, KernelFile};
use flechette::device::cuda::{CudaError, open};

use crate::pretend::{LIBCUDA, Machine, Said};

/// Folders that hold a libnvrtc.
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
        eprintln!("skipped: no NVRTC in $NVRTC_PATH, nor below target/ci (.ci/kernels installs it)");
    }
    found
}

/// Runs a test with each compiler; gives what each child said, and nothing in the child.
fn with_every_compiler(machine: impl Fn() -> Machine, inside: impl Fn(&Path) + Copy) -> Vec<Said> {
    folders().iter().map_while(|folder| machine().with_path(folder).runs(inside)).collect()
}

/// Compute 7.0 for a compiler that knows it, and 7.5, 8.0 and 9.0 for all.
const COMPUTES: [(i32, i32); 4] = [(7, 0), (7, 5), (8, 0), (9, 0)];

fn is_machine_code(image: &[u8]) -> bool {
    image.starts_with(b"\x7fELF")
}

/// Run by itself where NVRTC is on the library path, and as the child of the test below.
#[test]
fn compiles_every_kernel_for_every_device() {
    let compiler = match Compiler::find() {
        Ok(compiler) => compiler,
        Err(reason) => return eprintln!("skipped: {reason}"),
    };
    println!("compiler: {compiler:?}");
    for compute in COMPUTES {
        let built = match build(&compiler, KERNELS, compute, 13_000, None) {
            Ok(built) => built,
            Err(error @ CudaError::CompilerTooNew { .. }) => {
                assert_eq!(compute, (7, 0), "{error}");
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
    // PTX, for devices that no compiler knows yet; its closing zero is part of it.
    for kernel in KERNELS {
        let ptx = compiler.compile(kernel, Target::Text(75)).unwrap();
        assert_eq!(ptx.last(), Some(&0));
        let ptx = String::from_utf8(ptx).unwrap();
        for entry in kernel.entries {
            assert!(ptx.contains(&format!(".visible .entry {entry}(")), "{ptx}");
        }
        // A product and a sum are rounded one by one, as the host's.
        assert!(!ptx.contains("fma."), "{ptx}");
    }
}

#[test]
fn every_installed_compiler_takes_every_kernel() {
    for folder in folders() {
        let machine = Machine::bare().with_path(&folder);
        let out = machine.runs_test("cuda_compile::compiles_every_kernel_for_every_device").unwrap().out;
        assert!(!out.contains("skipped"), "{}: {out}", folder.display());
        let version = out.lines().find(|line| line.starts_with("compiler: ")).unwrap();
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
fn a_kernel_that_is_wrong_is_refused_with_the_compilers_words() {
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
fn a_compiler_that_lacks_its_other_half_is_refused_with_its_words() {
    for folder in folders() {
        let mut files = fs::read_dir(&folder).unwrap().map(|file| file.unwrap());
        let main = files.find(|file| file.file_name().to_string_lossy().starts_with("libnvrtc.so"));
        let main = main.unwrap().path();
        let said = Machine::bare().with_link(&main).runs(|_| {
            let compiled = Compiler::find().unwrap().compile(&KERNELS[0], Target::Binary(90));
            let Err(error) = compiled else {
                return eprintln!("skipped: the other half is installed for all programs");
            };
            let error = error.to_string();
            assert!(error.contains("libnvrtc-builtins") && error.lines().count() == 1, "{error}");
        });
        if said.is_none() {
            return;
        }
    }
}

/// Builds for an H200 with a cache in this folder.
fn built_with(folder: &Path) -> Built {
    let cache = KernelCache::new(folder);
    build(&Compiler::find().unwrap(), KERNELS, (9, 0), 13_000, Some(&cache)).unwrap()
}

#[test]
fn an_image_is_compiled_once_and_again_when_its_file_is_damaged() {
    with_every_compiler(Machine::bare, |own| {
        let kept = own.join("kernels");
        let first = built_with(&kept);
        assert_eq!((first.from_cache, first.troubles.len()), (0, 0));
        let second = built_with(&kept);
        assert_eq!((second.from_cache, second.troubles.len()), (KERNELS.len(), 0));
        assert_eq!(second.images, first.images);

        for file in fs::read_dir(&kept).unwrap() {
            let path = file.unwrap().path();
            let mut bytes = fs::read(&path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(path, bytes).unwrap();
        }
        let third = built_with(&kept);
        assert_eq!((third.from_cache, third.troubles.len()), (0, KERNELS.len()));
        assert!(third.troubles[0].contains("the kernel is compiled again"), "{:?}", third.troubles);
        assert_eq!(third.images, first.images);
        assert_eq!(built_with(&kept).from_cache, KERNELS.len(), "the damage is mended");
    });
}

#[test]
fn a_cache_that_cannot_be_written_costs_a_warning_alone() {
    with_every_compiler(
        || Machine::bare().with_file("in_the_way", ""),
        |own| {
            let built = built_with(&own.join("in_the_way/kernels"));
            assert_eq!((built.images.len(), built.from_cache), (KERNELS.len(), 0));
            assert!(!built.troubles.is_empty());
            for trouble in built.troubles {
                assert!(trouble.contains("in_the_way/kernels"), "{trouble}");
            }
        },
    );
}

#[test]
fn a_device_is_opened_with_machine_code_that_nvrtc_really_made() {
    let said = with_every_compiler(
        || Machine::bare().with("libcuda.so", LIBCUDA),
        |own| {
            let driver = open(0, Some(&own.join("kernels"))).unwrap();
            assert!(driver.to_string().contains("kernels by NVRTC 1"), "{driver}");
        },
    );
    for said in said {
        assert_eq!(said.log.matches("module machine code").count(), KERNELS.len(), "{}", said.log);
    }
}
