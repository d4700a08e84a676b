//! Writes the Rust code and the descriptors of the protocol to `proto/generated/`, with protox instead of
//! protoc.

use std::error::Error;
use std::path::Path;

use prost::Message;

fn main() -> Result<(), Box<dyn Error>> {
    let proto = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let generated = proto.join("generated");
    let descriptors = protox::compile(["flechette/v1/ctr.proto"], [&proto])?;
    std::fs::create_dir_all(&generated)?;
    std::fs::write(generated.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .out_dir(&generated)
        // Raw strings stay slices of the received message instead of one allocation each.
        .bytes(".flechette.v1.FeatureColumn.strings")
        .compile_fds(descriptors)?;
    Ok(())
}
