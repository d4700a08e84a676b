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
