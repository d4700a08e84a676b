//! Compiles the protocol with protox, so that no protoc is needed, and, under the feature
//! `cusim`, the CUDA kernels as C++ (see `kernels/cusim/`).

use std::env;
use std::path::PathBuf;

use prost::Message;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(["flechette/v1/ctr.proto"], ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    // Raw strings stay slices of the received message instead of one allocation each.
    tonic_prost_build::configure().bytes(".flechette.v1.FeatureColumn.strings").compile_fds(descriptors)?;
    #[cfg(feature = "cusim")]
    cusim();
    Ok(())
}

/// Builds `kernels/cusim` into the library. The kernels alone are instrumented, so that the
/// simulator may preempt them at each access; it supplies the hooks itself, and no sanitizer
/// runtime is linked. Contraction is off, because the tests compare sums bit for bit.
#[cfg(feature = "cusim")]
fn cusim() {
    println!("cargo:rerun-if-changed=kernels");
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
