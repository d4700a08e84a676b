//! Writes the Rust code and the descriptors of the protocol to `proto/generated/`, with protox instead of
//! protoc.

use std::error::Error;
use std::path::Path;

use prost::Message;

fn main() -> Result<(), Box<dyn Error>> {
    let proto = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let generated = proto.join("generated");
    let descriptors = protox::compile(["flechette/v1/ctr.proto", "inference/kserve.proto"], [&proto])?;
    std::fs::create_dir_all(&generated)?;
    std::fs::write(generated.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .out_dir(&generated)
        // Strings and raw tensors stay slices of the received message instead of one allocation each.
        .bytes(".flechette.v1.FeatureColumn.strings")
        .bytes(".inference.InferTensorContents.bytes_contents")
        .bytes(".inference.ModelInferRequest.raw_input_contents")
        .bytes(".inference.ModelInferResponse.raw_output_contents")
        .compile_fds(descriptors)?;
    Ok(())
}
