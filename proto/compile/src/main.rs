//! Writes the Rust code and the descriptors of the protocol to `proto/generated/`, with protox instead of
//! protoc.

use std::error::Error;
use std::path::Path;

use prost::Message;
use tonic_prost_build::FileDescriptorSet;

fn main() -> Result<(), Box<dyn Error>> {
    let proto = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let generated = proto.join("generated");
    let descriptors = protox::compile(["flechette/v1/ctr.proto", "inference/kserve.proto"], [&proto])?;
    let server = generated.join("server");
    std::fs::create_dir_all(&server)?;
    std::fs::write(generated.join("descriptors.bin"), descriptors.encode_to_vec())?;
    let (kserve, ctr) = descriptors.file.into_iter().partition(|file| file.package() == "inference");
    let [kserve, ctr] = [kserve, ctr].map(|file| FileDescriptorSet { file });
    // Strings and raw tensors stay slices of the received message instead of one allocation each.
    let messages = tonic_prost_build::configure()
        .out_dir(&generated)
        .bytes(".flechette.v1.FeatureColumn.strings")
        .bytes(".inference.InferTensorContents.bytes_contents")
        .bytes(".inference.ModelInferRequest.raw_input_contents")
        .bytes(".inference.ModelInferResponse.raw_output_contents");
    messages.clone().compile_fds(ctr.clone())?;
    messages.build_server(false).compile_fds(kserve.clone())?;
    // The server reads the largest requests in forms of its own.
    let server = tonic_prost_build::configure()
        .out_dir(server)
        .build_client(false)
        .codec_path("crate::server::received::ProstCodec");
    server
        .clone()
        .extern_path(".flechette.v1.PredictRequest", "crate::server::ctr::PredictMessage")
        .extern_path(".flechette.v1.LearnRequest", "crate::server::ctr::LearnMessage")
        .extern_path(".flechette.v1", "crate::server::proto")
        .compile_fds(ctr)?;
    server
        .extern_path(".inference.ModelInferRequest", "crate::server::kserve::InferRequest")
        .extern_path(".inference", "crate::server::inference")
        .compile_fds(kserve)?;
    Ok(())
}
