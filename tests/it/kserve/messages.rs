//! The requests of a generated KServe client, typed and raw, and the tensors of the answers.

use flechette::server::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use flechette::server::inference::model_infer_request::InferInputTensor;
use flechette::server::inference::model_infer_response::InferOutputTensor;
use flechette::server::inference::*;
use flechette::server::proto::{FeatureColumn, PredictRequest};
use tonic::transport::Channel;

use crate::serving::{Running, channel, request};

pub(super) type Client = GrpcInferenceServiceClient<Channel>;

pub(super) async fn connect(running: &Running) -> Client {
    Client::new(channel(running.grpc).await)
}

fn tensor(name: &str, datatype: &str, shape: &[usize], contents: InferTensorContents) -> InferInputTensor {
    InferInputTensor {
        name: name.to_owned(),
        datatype: datatype.to_owned(),
        shape: shape.iter().map(|&size| size as i64).collect(),
        contents: Some(contents),
        ..InferInputTensor::default()
    }
}

fn values_of(column: &FeatureColumn, shape: &[usize]) -> InferInputTensor {
    if column.strings.is_empty() {
        let int64_contents = column.ids.iter().map(|&id| id as i64).collect();
        let contents = InferTensorContents { int64_contents, ..InferTensorContents::default() };
        return tensor(&column.name, "INT64", shape, contents);
    }
    let contents =
        InferTensorContents { bytes_contents: column.strings.clone(), ..InferTensorContents::default() };
    tensor(&column.name, "BYTES", shape, contents)
}

/// A native request, with typed contents.
pub fn typed(request: &PredictRequest) -> ModelInferRequest {
    let samples = request.samples as usize;
    let fp32_contents = request.dense.clone();
    let contents = InferTensorContents { fp32_contents, ..InferTensorContents::default() };
    let width = request.dense.len() / samples.max(1);
    let mut inputs = vec![tensor("dense", "FP32", &[samples, width], contents)];
    for column in &request.features {
        let values = column.ids.len() + column.strings.len();
        if column.lengths.is_empty() {
            inputs.push(values_of(column, &[values, 1]));
        } else {
            inputs.push(values_of(column, &[values]));
            let int_contents = column.lengths.iter().map(|&length| length as i32).collect();
            let contents = InferTensorContents { int_contents, ..InferTensorContents::default() };
            inputs.push(tensor(&format!("{}:lengths", column.name), "INT32", &[samples], contents));
        }
    }
    ModelInferRequest { model_name: request.model.clone(), inputs, ..ModelInferRequest::default() }
}

/// The same request with raw contents.
pub fn raw(mut request: ModelInferRequest) -> ModelInferRequest {
    for input in &mut request.inputs {
        let contents = input.contents.take().unwrap();
        let mut bytes = Vec::new();
        bytes.extend(contents.fp32_contents.iter().flat_map(|value| value.to_le_bytes()));
        bytes.extend(contents.int64_contents.iter().flat_map(|value| value.to_le_bytes()));
        bytes.extend(contents.int_contents.iter().flat_map(|value| value.to_le_bytes()));
        for string in &contents.bytes_contents {
            bytes.extend((string.len() as u32).to_le_bytes());
            bytes.extend_from_slice(string);
        }
        request.raw_input_contents.push(bytes.into());
    }
    request
}

/// The values of the outputs of a response, raw or typed.
pub(super) fn outputs(response: &ModelInferResponse) -> Vec<Vec<f32>> {
    let values = |(i, output): (usize, &InferOutputTensor)| match (
        &output.contents,
        response.raw_output_contents.get(i),
    ) {
        (Some(contents), None) => contents.fp32_contents.clone(),
        (None, Some(raw)) => {
            raw.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
        }
        other => panic!("contents: {other:?}"),
    };
    response.outputs.iter().enumerate().map(values).collect()
}

/// The scores of a response, raw or typed.
pub fn scores(response: &ModelInferResponse) -> Vec<f32> {
    let output = &response.outputs[0];
    assert_eq!(
        (response.outputs.len(), output.name.as_str(), output.datatype.as_str()),
        (1, "score", "FP32")
    );
    let scores = outputs(response).remove(0);
    assert_eq!(output.shape, [scores.len() as i64, 1]);
    scores
}

pub(super) fn named(name: &str) -> ModelReadyRequest {
    ModelReadyRequest { name: name.to_owned(), version: String::new() }
}

/// A request with the inputs that `wrong_requests::WRONG` describes.
pub(super) fn right() -> ModelInferRequest {
    let (mut native, _) = request(3, 1);
    native.features[1].lengths = vec![3, 0, 2];
    native.features[1].ids = vec![1, 2, 3, 4, 5];
    typed(&native)
}
