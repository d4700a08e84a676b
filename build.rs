//! Compiles the CUDA kernels: with nvcc, if it is installed, and with the feature `cusim` as C++
//! (`kernels/cusim/`). The protocol is compiled by hand (`proto/compile/`).

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    println!("cargo:rerun-if-changed=kernels");
    // A cfg of its own, because crates that this one depends on have code under `loom`.
    #[cfg(feature = "loom")]
    println!("cargo:rustc-cfg=flechette_loom");
    std::fs::write(out.join("ahead.rs"), ahead(&out))?;
    #[cfg(feature = "cusim")]
    cusim();
    Ok(())
}

/// Rust source that embeds the kernels compiled by nvcc. `src/device/cuda/ahead.rs` includes it. An error is
/// only a warning, because a program without compiled kernels compiles them with NVRTC when it starts.
fn ahead(out: &Path) -> String {
    let compiled = find_nvcc().and_then(|nvcc| {
        println!("cargo:rerun-if-changed={}", nvcc.display());
        let compiled = bundles(&nvcc, out);
        compiled
            .inspect_err(|why| println!("cargo:warning=kernels are not compiled ahead of time: {why}"))
            .ok()
    });
    let (compiler, images) = compiled.unzip();
    let images = images.unwrap_or_default();
    let embedded = images.iter().map(|(name, file)| format!("({name:?}, include_bytes!({file:?}))"));
    format!(
        "pub(crate) const COMPILER: Option<&str> = {compiler:?};\npub(crate) const IMAGES: &[(&str, \
         &[u8])] = &[{}];\n",
        embedded.collect::<Vec<_>>().join(", ")
    )
}

/// The first nvcc of `$CUDA_HOME`, `$CUDA_PATH` and `$PATH`.
fn find_nvcc() -> Option<PathBuf> {
    let homes = ["CUDA_HOME", "CUDA_PATH"].map(|name| {
        println!("cargo:rerun-if-env-changed={name}");
        env::var_os(name).map(|home| PathBuf::from(home).join("bin"))
    });
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = homes.into_iter().flatten().chain(env::split_paths(&path));
    let program = format!("nvcc{}", env::consts::EXE_SUFFIX);
    folders.map(|folder| folder.join(&program)).find(|nvcc| nvcc.is_file())
}

/// The compiler's name, and the name and bundle file of each kernel. A bundle has machine code for three
/// compute capabilities, and PTX for newer devices.
fn bundles(nvcc: &Path, out: &Path) -> Result<(String, Vec<(String, PathBuf)>), String> {
    let run = |arguments: &[&str]| {
        let done =
            Command::new(nvcc).args(arguments).output().map_err(|e| format!("{}: {e}", nvcc.display()))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if done.status.success() {
            return Ok(text(&done.stdout));
        }
        let lines = text(&done.stderr) + &text(&done.stdout);
        Err(format!("{}: {}", nvcc.display(), lines.trim().replace('\n', " | ")))
    };
    let version = run(&["--version"])?;
    let release = version.split("release ").nth(1).and_then(|rest| rest.split(',').next()).unwrap_or("?");
    let mut images = Vec::new();
    let files = std::fs::read_dir("kernels").map_err(|e| format!("kernels: {e}"))?;
    for source in
        files.flatten().map(|file| file.path()).filter(|path| path.extension().is_some_and(|e| e == "cu"))
    {
        let name = source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let bundle = out.join(format!("{name}.fatbin"));
        run(&[
            "--fatbin",
            // `OPTIONS` of src/device/cuda/compile.rs.
            "--std=c++17",
            "--fmad=false",
            "--ftz=false",
            "--prec-div=true",
            "--prec-sqrt=true",
            "--generate-code=arch=compute_75,code=sm_75",
            "--generate-code=arch=compute_80,code=sm_80",
            "--generate-code=arch=compute_90,code=[sm_90,compute_90]",
            &source.to_string_lossy(),
            "--output-file",
            &bundle.to_string_lossy(),
        ])?;
        images.push((name, bundle));
    }
    Ok((format!("nvcc {release}"), images))
}

/// Builds `kernels/cusim` into the library. Only the kernels are instrumented, so that the simulator can
/// preempt them at each memory access. The simulator implements the hooks; no sanitizer runtime is linked.
/// Contraction is off, because tests compare sums bit for bit.
#[cfg(feature = "cusim")]
fn cusim() {
    let build = || {
        let mut build = cc::Build::new();
        build
            .cpp(true)
            .std("c++20")
            .opt_level(2)
            .extra_warnings(true)
            .include("kernels")
            .define("CUSIM", None);
        build.flag("-ffp-contract=off").flag("-fno-exceptions").flag("-fno-strict-aliasing");
        build
    };
    let kernels = build().flag("-fsanitize=thread").file("kernels/cusim/kernels.cpp").compile_intermediates();
    let simulator = ["cusim", "launch", "access"].map(|name| format!("kernels/cusim/{name}.cpp"));
    build().files(simulator).objects(kernels).compile("flechette_cusim");
}
