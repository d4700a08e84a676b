//! The KServe v2 service, by a generated Rust client: its scores are those of the native service, errors name
//! the tensor, and the limits of native calls apply.

use std::sync::atomic::Ordering;
use std::time::Duration;

use flechette::server::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use flechette::server::inference::infer_parameter::ParameterChoice;
use flechette::server::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use flechette::server::inference::model_infer_response::InferOutputTensor;
use flechette::server::inference::*;
use flechette::server::proto::{FeatureColumn, PredictRequest};
use prost::Message;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::fake::{LIMIT, logit, until};
use crate::serving::{Running, channel, request};
use crate::wire::{Raw, frame};

type Client = GrpcInferenceServiceClient<Channel>;

async fn connect(running: &Running) -> Client {
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
fn outputs(response: &ModelInferResponse) -> Vec<Vec<f32>> {
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

fn named(name: &str) -> ModelReadyRequest {
    ModelReadyRequest { name: name.to_owned(), version: String::new() }
}

/// A request whose feature `user` has strings.
fn with_strings(samples: usize, seed: u64) -> PredictRequest {
    let (mut request, _) = request(samples, seed);
    let user = &mut request.features[0];
    user.strings = user.ids.drain(..).map(|id| format!("user {id}").into_bytes().into()).collect();
    user.strings[0] = Default::default();
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn typed_and_raw_tensors_get_the_native_scores() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    for seed in 0..20 {
        let samples = 1 + seed as usize % 5;
        for native in [request(samples, seed).0, with_strings(samples, seed)] {
            let expected = running.send(native.clone()).await.unwrap().unwrap();
            let mut typed = typed(&native);
            typed.id = format!("request {seed}");
            for (message, is_raw) in [(typed.clone(), false), (raw(typed), true)] {
                let response = client.model_infer(message).await.unwrap().into_inner();
                assert_eq!(scores(&response), expected);
                assert_eq!(response.raw_output_contents.len(), usize::from(is_raw));
                assert_eq!(response.id, format!("request {seed}"));
                assert_eq!((response.model_name.as_str(), response.model_version.as_str()), ("ads", "7"));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensors_may_have_any_order_and_a_multi_hot_feature_as_many_values_for_each_sample() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    let (mut native, _) = request(3, 5);
    native.features[1].lengths = vec![2; 3];
    native.features[1].ids = vec![1, 2, 3, 4, 5, 6];
    let expected = running.send(native.clone()).await.unwrap().unwrap();
    let mut message = typed(&native);
    message.inputs.reverse();
    message.outputs = vec![InferRequestedOutputTensor {
        name: "score".to_owned(),
        ..InferRequestedOutputTensor::default()
    }];
    message.model_version = "7".to_owned();
    let response = client.model_infer(raw(message.clone())).await.unwrap().into_inner();
    assert_eq!(scores(&response), expected);
    message.inputs.retain(|input| input.name != "tag:lengths");
    message.inputs.iter_mut().find(|input| input.name == "tag").unwrap().shape = vec![3, 2];
    for message in [message.clone(), raw(message.clone())] {
        let response = client.model_infer(message).await.unwrap().into_inner();
        assert_eq!(scores(&response), expected);
    }
    message.inputs.iter_mut().find(|input| input.name == "tag").unwrap().shape = vec![3, 0];
    let tag = message.inputs.iter_mut().find(|input| input.name == "tag").unwrap();
    tag.contents = None;
    let none = client.model_infer(message).await.unwrap().into_inner();
    native.features[1].lengths = vec![0; 3];
    native.features[1].ids.clear();
    assert_eq!(scores(&none), running.send(native).await.unwrap().unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn absent_ids_are_counted_in_the_response() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    let (mut native, _) = request(2, 1);
    native.features[0].ids = vec![1000, 5000];
    let response = client.model_infer(typed(&native)).await.unwrap().into_inner();
    let count = |name: &str| response.parameters.get(name).and_then(|p| p.parameter_choice.clone());
    assert_eq!(count("absent_ids:user"), Some(ParameterChoice::Int64Param(2)));
    assert_eq!(count("absent_ids:tag"), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_outputs_that_a_request_names_are_returned() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    let (native, expected) = request(3, 5);
    let logits: Vec<f32> = expected.iter().map(|score| logit(*score)).collect();
    for (named, values) in [
        (&["score"][..], vec![&expected]),
        (&["logit"], vec![&logits]),
        (&["logit", "score", "logit"], vec![&expected, &logits]),
    ] {
        let output = |name: &&str| InferRequestedOutputTensor {
            name: (*name).to_owned(),
            ..InferRequestedOutputTensor::default()
        };
        let message = ModelInferRequest { outputs: named.iter().map(output).collect(), ..typed(&native) };
        for message in [message.clone(), raw(message)] {
            let response = client.model_infer(message).await.unwrap().into_inner();
            assert!(response.outputs.iter().all(|output| output.shape == [3, 1]));
            assert_eq!(outputs(&response).iter().collect::<Vec<_>>(), values, "{named:?}");
        }
    }
}

type Change = fn(&mut ModelInferRequest);

/// The inputs of the typed request: dense, user, tag, tag:lengths, strict. It has 3 samples and 5 tags.
const WRONG: [(Change, Code, &str); 37] = [
    (|r| r.model_name = "x".into(), Code::NotFound, "model: no model \"x\" is served here"),
    (|r| r.model_version = "8".into(), Code::NotFound, "version: model \"ads\" serves version 7, got 8"),
    (|r| r.model_version = "0".into(), Code::NotFound, "version: model \"ads\" serves version 7, got 0"),
    (
        |r| r.model_version = "new".into(),
        Code::InvalidArgument,
        "model_version: expected a number, or nothing for the version that serves, got \"new\"",
    ),
    (|r| drop(r.inputs.remove(0)), Code::InvalidArgument, "input \"dense\": missing"),
    (|r| drop(r.inputs.remove(1)), Code::InvalidArgument, "input \"user\": missing"),
    (|r| drop(r.inputs.remove(3)), Code::InvalidArgument, "input \"tag:lengths\": missing"),
    (|r| r.inputs.clear(), Code::InvalidArgument, "input \"dense\": missing"),
    (
        |r| r.inputs[4].name = "tags".into(),
        Code::InvalidArgument,
        "input \"tags\": the model has no such input",
    ),
    (
        |r| r.inputs[3].name = "user:lengths".into(),
        Code::InvalidArgument,
        "input \"user:lengths\": the model has no such input",
    ),
    (|r| r.inputs[4].name = "user".into(), Code::InvalidArgument, "input \"user\": given more than once"),
    (
        |r| r.inputs[0].datatype = "FP64".into(),
        Code::InvalidArgument,
        "input \"dense\": datatype: expected FP32, got \"FP64\"",
    ),
    (
        |r| r.inputs[1].datatype = "INT32".into(),
        Code::InvalidArgument,
        "input \"user\": datatype: expected INT64 or BYTES, got \"INT32\"",
    ),
    (
        |r| r.inputs[3].datatype = "INT64".into(),
        Code::InvalidArgument,
        "input \"tag:lengths\": datatype: expected INT32, got \"INT64\"",
    ),
    (
        |r| r.inputs[0].shape = vec![3],
        Code::InvalidArgument,
        "input \"dense\": shape: expected [3, 2], got [3]",
    ),
    (
        |r| r.inputs[0].shape = vec![],
        Code::InvalidArgument,
        "input \"dense\": shape: expected [-1, 2], got []",
    ),
    (
        |r| r.inputs[0].shape = vec![-3, 2],
        Code::InvalidArgument,
        "input \"dense\": shape: expected [-1, 2], got [-3, 2]",
    ),
    (
        |r| r.inputs[1].shape = vec![1; 20],
        Code::InvalidArgument,
        "input \"user\": shape: expected [3, 1], got [1, 1, 1, 1, 1, 1, 1, 1, ...]",
    ),
    (
        |r| r.inputs[1].shape = vec![3],
        Code::InvalidArgument,
        "input \"user\": shape: expected [3, 1], got [3]",
    ),
    (
        |r| r.inputs[2].shape = vec![5, 1],
        Code::InvalidArgument,
        "input \"tag\": shape: expected [-1], got [5, 1]",
    ),
    (
        |r| r.inputs[3].shape = vec![2],
        Code::InvalidArgument,
        "input \"tag:lengths\": shape: expected [3], got [2]",
    ),
    (
        |r| r.inputs[0].shape = vec![0, 2],
        Code::InvalidArgument,
        "input \"dense\": shape: expected at least 1 sample, got 0",
    ),
    (
        |r| r.inputs[0].shape = vec![65, 2],
        Code::ResourceExhausted,
        "input \"dense\": shape: limit 64 samples (server.max_samples), got 65",
    ),
    (
        |r| r.inputs[0].shape = vec![i64::MAX, 2],
        Code::ResourceExhausted,
        "input \"dense\": shape: limit 64 samples (server.max_samples), got 9223372036854775807",
    ),
    (
        |r| contents(r, 0).fp32_contents.truncate(5),
        Code::InvalidArgument,
        "input \"dense\": contents: expected 6 elements for its shape, got 5",
    ),
    (
        |r| contents(r, 1).int64_contents.push(1),
        Code::InvalidArgument,
        "input \"user\": contents: expected 3 elements for its shape, got 4",
    ),
    (
        |r| r.inputs[2].shape = vec![i64::MAX],
        Code::InvalidArgument,
        "input \"tag\": contents: expected 9223372036854775807 elements for its shape, got 5",
    ),
    (
        |r| contents(r, 1).int_contents.push(1),
        Code::InvalidArgument,
        "input \"user\": contents: expected only int64_contents, the field of its datatype",
    ),
    (
        |r| contents(r, 1).int64_contents[2] = -4,
        Code::InvalidArgument,
        "input \"user\": element 2: expected an id of at least 0, got -4",
    ),
    (
        |r| contents(r, 3).int_contents[1] = -1,
        Code::InvalidArgument,
        "input \"tag:lengths\": element 1: expected a length of at least 0, got -1",
    ),
    (
        |r| contents(r, 3).int_contents = vec![1, 2, 1],
        Code::InvalidArgument,
        "input \"tag:lengths\": expected a sum of 5, the number of values of \"tag\", got 4",
    ),
    (
        |r| contents(r, 3).int_contents = vec![i32::MAX; 3],
        Code::InvalidArgument,
        "input \"tag:lengths\": expected a sum of 5, the number of values of \"tag\", got 6442450941",
    ),
    (
        |r| contents(r, 3).int_contents = vec![5, 0, 0],
        Code::InvalidArgument,
        "feature \"tag\", sample 0: expected at most 3 ids, got 5",
    ),
    (
        |r| contents(r, 0).fp32_contents[2] = f32::NAN,
        Code::InvalidArgument,
        "dense feature \"price\", sample 1: expected a finite number, got NaN",
    ),
    (
        |r| r.raw_input_contents = vec![Default::default(); 4],
        Code::InvalidArgument,
        "raw_input_contents: expected 5 entries, one per input, got 4",
    ),
    (
        |r| r.raw_input_contents = vec![Default::default(); 5],
        Code::InvalidArgument,
        "input \"dense\": contents: expected none, because raw_input_contents is given",
    ),
    (
        |r| {
            r.outputs = vec![InferRequestedOutputTensor {
                name: "logits".into(),
                ..InferRequestedOutputTensor::default()
            }]
        },
        Code::InvalidArgument,
        "output \"logits\": the outputs are \"score\" and \"logit\"",
    ),
];

fn contents(request: &mut ModelInferRequest, input: usize) -> &mut InferTensorContents {
    request.inputs[input].contents.as_mut().unwrap()
}

/// The wrong raw contents of an input, of 3 samples.
const WRONG_RAW: [(usize, &[u8], &str); 5] = [
    (0, &[0; 23], "input \"dense\": raw contents: expected 24 bytes for its shape, got 23"),
    (1, &[0xff; 16], "input \"user\": raw contents: expected 24 bytes for its shape, got 16"),
    (1, &[0xff; 24], "input \"user\": element 0: expected an id of at least 0, got -1"),
    (3, &[], "input \"tag:lengths\": raw contents: expected 12 bytes for its shape, got 0"),
    (3, &[0xff; 12], "input \"tag:lengths\": element 0: expected a length of at least 0, got -1"),
];

/// Wrong raw strings of `user`, of 3 samples.
const WRONG_STRINGS: [(&[u8], &str); 4] = [
    (&[], "input \"user\": contents: expected 3 elements for its shape, got 0"),
    (&[1, 0, 0, 0, b'a', 0, 0], "input \"user\": raw contents: element 1 needs 4 bytes, 2 are left"),
    (&[0xff; 4], "input \"user\": raw contents: element 0 needs 4294967295 bytes, 0 are left"),
    (&[0; 16], "input \"user\": contents: expected 3 elements for its shape, got 4"),
];

/// A request with the inputs that [`WRONG`] describes.
fn right() -> ModelInferRequest {
    let (mut native, _) = request(3, 1);
    native.features[1].lengths = vec![3, 0, 2];
    native.features[1].ids = vec![1, 2, 3, 4, 5];
    typed(&native)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_wrong_request_gets_an_error_that_names_the_tensor() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    let mut refused = async |message: ModelInferRequest| client.model_infer(message).await.unwrap_err();
    let mut invalid = 0;
    for (change, code, text) in WRONG {
        let mut message = right();
        change(&mut message);
        let status = refused(message).await;
        assert_eq!((status.code(), status.message()), (code, text));
        invalid += usize::from(code == Code::InvalidArgument);
    }
    for (input, bytes, text) in WRONG_RAW {
        let mut message = raw(right());
        message.raw_input_contents[input] = bytes.into();
        let status = refused(message).await;
        assert_eq!((status.code(), status.message()), (Code::InvalidArgument, text));
    }
    for (bytes, text) in WRONG_STRINGS {
        let mut message = raw(right());
        message.inputs[1].datatype = "BYTES".to_owned();
        message.raw_input_contents[1] = bytes.into();
        let status = refused(message).await;
        assert_eq!((status.code(), status.message()), (Code::InvalidArgument, text));
    }
    invalid += WRONG_RAW.len() + WRONG_STRINGS.len();
    let counted = format!("flechette_requests_total{{model=\"ads\",code=\"INVALID_ARGUMENT\"}} {invalid}");
    running.until_metric(&counted).await;
    connect(&running).await.model_infer(right()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parameters_that_would_change_the_answer_are_refused() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    let parameter = || InferParameter { parameter_choice: Some(ParameterChoice::Int64Param(1)) };
    let mut shared = right();
    shared.inputs[1].parameters.insert("shared_memory_region".to_owned(), parameter());
    let status = client.model_infer(shared).await.unwrap_err();
    assert_eq!(status.message(), "input \"user\": shared memory is not supported");
    // Clients send raw contents of the other tensors only.
    let mut shared = raw(right());
    shared.raw_input_contents.remove(1);
    shared.inputs[1].parameters.insert("shared_memory_region".to_owned(), parameter());
    let status = client.model_infer(shared).await.unwrap_err();
    assert_eq!(status.message(), "input \"user\": shared memory is not supported");
    for name in ["classification", "shared_memory_region"] {
        let mut message = right();
        let parameters = [(name.to_owned(), parameter())].into();
        message.outputs = vec![InferRequestedOutputTensor { name: "score".to_owned(), parameters }];
        let status = client.model_infer(message).await.unwrap_err();
        assert_eq!(status.message(), format!("output \"score\": parameter {name:?} is not supported"));
    }
    for (wrong, shown) in [
        (ParameterChoice::Int64Param(-1), "-1"),
        (ParameterChoice::StringParam("5".to_owned()), "\"5\""),
        (ParameterChoice::DoubleParam(1.5), "1.5"),
    ] {
        let mut message = right();
        let wrong = InferParameter { parameter_choice: Some(wrong) };
        message.parameters.insert("timeout".to_owned(), wrong);
        let status = client.model_infer(message).await.unwrap_err();
        let text = format!("parameters: timeout: expected microseconds, a whole number from 0, got {shown}");
        assert_eq!((status.code(), status.message()), (Code::InvalidArgument, text.as_str()));
    }
    let mut unknown = right();
    unknown.parameters.insert("sequence_id".to_owned(), parameter());
    client.model_infer(unknown).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_and_deadlines_are_those_of_native_calls() {
    // No call is refused because the model is held.
    let patient = Duration::from_secs(600);
    let running = Running::start_with(|parts| parts.batchers.common.default_deadline = patient).await;
    let mut client = connect(&running).await;
    let mut large = right();
    large.id = "x".repeat(70_000);
    let status = client.model_infer(large).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().starts_with("message: limit 65536 bytes (server.max_bytes), got "), "{status}");
    let status = client.model_infer(ModelInferRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    running.until_metric("flechette_requests_total{model=\"(none)\",code=\"NOT_FOUND\"} 1").await;

    running.model.hold();
    let first = running.send(request(1, 1).0);
    until(async || running.model.begun() == 1).await;
    // Without tonic, whose client has a timer too, which may cancel the call first.
    let raw = Raw::connect(running.grpc).await;
    let path = "inference.GRPCInferenceService/ModelInfer";
    let answer = raw.call_path(path, frame(&right().encode_to_vec()), &[("grpc-timeout", "6S")]).await;
    assert_eq!(answer.code, Code::DeadlineExceeded, "{}", answer.message);
    running.until_metric("flechette_requests_total{model=\"ads\",code=\"DEADLINE_EXCEEDED\"} 1").await;
    // A limit of the request's own, in microseconds.
    let mut late = right();
    let micros = InferParameter { parameter_choice: Some(ParameterChoice::Int64Param(2000)) };
    late.parameters.insert("timeout".to_owned(), micros);
    let status = client.model_infer(late).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    assert_eq!(status.message(), "deadline passed before the answer");
    running.until_metric("flechette_queue_samples{model=\"ads\"} 0").await;
    running.model.release();
    first.await.unwrap().unwrap();
    assert_eq!(running.model.computed(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_parameter_priority_decides_what_is_computed_first() {
    let running = Running::start_with(|parts| parts.batchers.common.max_samples = 6).await;
    let mut client = connect(&running).await;
    let of = |samples, choice| {
        let mut message = typed(&request(samples, 1).0);
        let priority = InferParameter { parameter_choice: Some(choice) };
        message.parameters.insert("priority".to_owned(), priority);
        message
    };
    let text = ParameterChoice::StringParam("high".into());
    for (wrong, got) in [(ParameterChoice::Int64Param(-1), "-1"), (text, "\"high\"")] {
        let status = client.model_infer(of(1, wrong)).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        let text =
            "parameters: priority: expected a number, 1 (high), 0 or 2 (normal), 3 or more (low), got ";
        assert_eq!(status.message(), format!("{text}{got}"));
    }
    running.model.hold();
    let first = running.send(request(1, 1).0);
    until(async || running.model.begun() == 1).await;
    let (mut calls, mut queued) = (Vec::new(), 0);
    for (samples, priority) in [(4, 3), (5, 0), (6, 1)] {
        let (mut client, message) = (client.clone(), of(samples, ParameterChoice::Int64Param(priority)));
        calls.push(tokio::spawn(async move { client.model_infer(message).await.map(drop) }));
        queued += samples;
        running.until_metric(&format!("flechette_queue_samples{{model=\"ads\"}} {queued}")).await;
    }
    running.model.release();
    for call in calls {
        call.await.unwrap().unwrap();
    }
    first.await.unwrap().unwrap();
    // The larger a request, the later it was queued. No two of them fit in a batch.
    assert_eq!(*running.model.calls.lock().unwrap(), [1, 6, 5, 4]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_and_its_model_describe_themselves() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    assert!(client.server_live(ServerLiveRequest {}).await.unwrap().into_inner().live);
    assert!(client.server_ready(ServerReadyRequest {}).await.unwrap().into_inner().ready);
    let mut ready = async |request: ModelReadyRequest| {
        client.model_ready(request).await.map(|answer| answer.into_inner().ready).map_err(|s| s.code())
    };
    assert_eq!(ready(named("ads")).await, Ok(true));
    assert_eq!(ready(named("nobody")).await, Ok(false));
    assert_eq!(ready(ModelReadyRequest { version: "7".into(), ..named("ads") }).await, Ok(true));
    assert_eq!(ready(ModelReadyRequest { version: "8".into(), ..named("ads") }).await, Ok(false));
    let text = ModelReadyRequest { version: "x".into(), ..named("ads") };
    assert_eq!(ready(text).await, Err(Code::InvalidArgument));
    running.model.ready.store(false, Ordering::SeqCst);
    assert_eq!(ready(named("ads")).await, Ok(false));
    assert!(!client.server_ready(ServerReadyRequest {}).await.unwrap().into_inner().ready);

    let server = client.server_metadata(ServerMetadataRequest {}).await.unwrap().into_inner();
    assert_eq!((server.name.as_str(), server.version.as_str()), ("flechette", env!("CARGO_PKG_VERSION")));
    assert_eq!(server.extensions, ["model_repository", "statistics"]);
    let metadata = ModelMetadataRequest { name: "ads".into(), version: String::new() };
    let model = client.model_metadata(metadata).await.unwrap().into_inner();
    assert_eq!((model.platform.as_str(), &model.versions[..]), ("flechette_dlrm", &["7".to_owned()][..]));
    let tensors = |tensors: &[model_metadata_response::TensorMetadata]| -> Vec<String> {
        tensors.iter().map(|t| format!("{} {} {:?}", t.name, t.datatype, t.shape)).collect()
    };
    let inputs = [
        "dense FP32 [-1, 2]",
        "user BYTES [-1, 1]",
        "tag INT64 [-1]",
        "tag:lengths INT32 [-1]",
        "strict BYTES [-1, 1]",
    ];
    assert_eq!(tensors(&model.inputs), inputs);
    assert_eq!(tensors(&model.outputs), ["score FP32 [-1, 1]", "logit FP32 [-1, 1]"]);
    let other = ModelMetadataRequest { name: "ads".into(), version: "8".into() };
    assert_eq!(client.model_metadata(other).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_that_is_stuck_is_unavailable_in_the_index() {
    let running = Running::start_with(|parts| {
        parts.batchers.common.default_deadline = Duration::from_millis(20);
    })
    .await;
    let row = async |ready| {
        let request = RepositoryIndexRequest { ready, ..Default::default() };
        let index = connect(&running).await.repository_index(request).await.unwrap().into_inner();
        index.models.into_iter().map(|row| (row.version, row.state, row.reason)).collect::<Vec<_>>()
    };
    let words = |state: &str, reason: &str| [("7".to_owned(), state.to_owned(), reason.to_owned())];
    assert_eq!(row(true).await, words("READY", ""));
    running.model.hold();
    let stuck = running.send(request(1, 1).0);
    let unavailable = words("UNAVAILABLE", "stuck: a call of the version does not end");
    until(async || row(false).await == unavailable).await;
    assert_eq!(row(true).await, []);
    running.model.release();
    until(async || row(true).await == words("READY", "")).await;
    drop(stuck.await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statistics_count_requests_samples_and_batches_of_both_protocols() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    for _ in 0..3 {
        client.model_infer(right()).await.unwrap();
    }
    running.send(request(5, 1).0).await.unwrap().unwrap();
    let mut wrong = right();
    wrong.inputs.clear();
    client.model_infer(wrong).await.unwrap_err();
    for name in ["", "ads"] {
        let asked = ModelStatisticsRequest { name: name.to_owned(), version: String::new() };
        let answer = client.model_statistics(asked).await.unwrap().into_inner();
        let [ads] = &answer.model_stats[..] else { panic!("{answer:?}") };
        assert_eq!((ads.name.as_str(), ads.version.as_str()), ("ads", "7"));
        assert_eq!((ads.inference_count, ads.execution_count), (3 * 3 + 5, 4));
        assert!(ads.last_inference > 1_600_000_000_000, "{ads:?}");
        let stats = ads.inference_stats.unwrap();
        let counts = [stats.success, stats.fail, stats.queue, stats.compute_input, stats.compute_infer];
        assert_eq!(counts.map(|total| total.unwrap().count), [4, 1, 4, 4, 4]);
        let [success, parts @ ..] =
            [stats.success, stats.queue, stats.compute_input, stats.compute_infer].map(|t| t.unwrap().ns);
        assert!(parts.iter().all(|part| *part > 0) && parts.iter().sum::<u64>() <= success, "{stats:?}");
    }
    let unknown = ModelStatisticsRequest { name: "x".to_owned(), version: String::new() };
    assert_eq!(client.model_statistics(unknown).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_a_repository_lists_its_models_and_changes_none() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    let index = client.repository_index(RepositoryIndexRequest::default()).await.unwrap().into_inner();
    let [ads] = &index.models[..] else { panic!("{index:?}") };
    assert_eq!((ads.name.as_str(), ads.version.as_str(), ads.state.as_str()), ("ads", "7", "READY"));
    let named = RepositoryIndexRequest { repository_name: "other".to_owned(), ready: false };
    let status = client.repository_index(named).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("got \"other\""), "{status}");
    let load = RepositoryModelLoadRequest { model_name: "ads".to_owned(), ..Default::default() };
    assert_eq!(client.repository_model_load(load).await.unwrap_err().code(), Code::Unimplemented);
}

/// The answers to some messages of one stream, as far as they come.
async fn stream(
    client: &mut Client,
    messages: Vec<ModelInferRequest>,
) -> (Vec<ModelStreamInferResponse>, Result<(), Status>) {
    let mut stream = match client.model_stream_infer(tokio_stream::iter(messages)).await {
        Ok(response) => response.into_inner(),
        Err(status) => return (Vec::new(), Err(status)),
    };
    let mut answers = Vec::new();
    loop {
        match stream.message().await {
            Ok(Some(answer)) => answers.push(answer),
            Ok(None) => return (answers, Ok(())),
            Err(status) => return (answers, Err(status)),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_is_answered_in_order_and_goes_on_after_an_error() {
    // All messages together take more memory than the limit, but not those without an answer.
    let running = Running::start_with(|parts| parts.server.max_inflight_bytes = 256 << 10).await;
    let mut client = connect(&running).await;
    let (mut messages, mut expected) = (Vec::new(), Vec::new());
    for number in 0..500_u64 {
        let (native, scores) = request(1 + number as usize % 3, number);
        let mut message = typed(&native);
        message.id = number.to_string();
        if number % 10 == 7 {
            message.inputs.clear();
        }
        messages.push(if number % 2 == 0 { raw(message) } else { message });
        expected.push((number % 10 != 7).then_some(scores));
    }
    let (answers, end) = stream(&mut client, messages).await;
    end.unwrap();
    assert_eq!(answers.len(), expected.len());
    for (number, (answer, expected)) in answers.iter().zip(&expected).enumerate() {
        let response = answer.infer_response.as_ref().unwrap();
        assert_eq!(response.id, number.to_string());
        match expected {
            None => assert_eq!(answer.error_message, "input \"dense\": missing"),
            Some(expected) => {
                assert_eq!((scores(response), answer.error_message.as_str()), (expected.clone(), ""));
                let last = response.parameters["triton_final_response"].parameter_choice.clone();
                assert_eq!(last, Some(ParameterChoice::BoolParam(true)));
            }
        }
    }
    running.until_metric("flechette_requests_total{model=\"ads\",code=\"OK\"} 450").await;
    running.until_metric("flechette_requests_total{model=\"ads\",code=\"INVALID_ARGUMENT\"} 50").await;
    running.until_metric("flechette_requests_total{model=\"(none)\",code=\"OK\"} 0").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_ends_with_a_status_at_a_message_that_is_too_large_and_at_its_deadline() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    let mut large = right();
    large.id = "x".repeat(70_000);
    let mut unknown = right();
    unknown.model_name = "nobody".to_owned();
    let (answers, end) = stream(&mut client, vec![right(), unknown, large, right()]).await;
    assert_eq!(answers.len(), 2);
    assert_eq!(answers[1].error_message, "model: no model \"nobody\" is served here");
    let status = end.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().starts_with("message: limit 65536 bytes (server.max_bytes), got "), "{status}");

    for code in ["NOT_FOUND", "RESOURCE_EXHAUSTED"] {
        let counted = format!("flechette_requests_total{{model=\"(none)\",code=\"{code}\"}} 1");
        running.until_metric(&counted).await;
    }

    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    let mut call = tonic::Request::new(tokio_stream::wrappers::ReceiverStream::new(receiver));
    // The first answer must come before.
    call.metadata_mut().insert("grpc-timeout", "6S".parse().unwrap());
    let mut answers = client.model_stream_infer(call).await.unwrap().into_inner();
    sender.send(right()).await.unwrap();
    assert_eq!(answers.message().await.unwrap().unwrap().error_message, "");
    assert_eq!(answers.message().await.unwrap_err().code(), Code::DeadlineExceeded);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_stream_ends_when_the_server_drains() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    let requests = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let mut answers = client.model_stream_infer(requests).await.unwrap().into_inner();
    sender.send(right()).await.unwrap();
    assert!(answers.message().await.unwrap().unwrap().infer_response.is_some());
    let begun = std::time::Instant::now();
    let drained = running.stop();
    assert_eq!(answers.message().await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(drained.await.unwrap().unwrap().unfinished, 0);
    assert!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_stream_ends_and_gives_up_its_place() {
    let limits = |parts: &mut flechette::server::ServerParts| {
        parts.server.stream_idle = Duration::from_secs(6);
        parts.server.max_requests = 1;
    };
    let running = Running::start_with(limits).await;
    let mut client = connect(&running).await;
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    let requests = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let mut answers = client.model_stream_infer(requests).await.unwrap().into_inner();
    for _ in 0..7 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        sender.send(right()).await.unwrap();
        assert_eq!(answers.message().await.unwrap().unwrap().error_message, "");
    }
    let status = client.model_infer(right()).await.unwrap_err();
    let full = "calls in flight: limit 1 (server.max_requests), got 2";
    assert!(status.message().starts_with(full), "{status}");
    let status = answers.message().await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(status.message(), "stream: no request for 6 s (server.stream_idle_seconds)");
    until(async || connect(&running).await.model_infer(right()).await.is_ok()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_is_answered_when_all_places_are_taken() {
    let running = Running::start_with(|parts| parts.server.max_requests = 1).await;
    let mut client = connect(&running).await;
    let (_sender, receiver) = tokio::sync::mpsc::channel(1);
    let requests = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let _answers = client.model_stream_infer(requests).await.unwrap();
    let metadata = ModelMetadataRequest { name: "ads".into(), version: String::new() };
    let status = client.model_metadata(metadata).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert!(client.server_live(ServerLiveRequest {}).await.unwrap().into_inner().live);
    assert!(client.server_ready(ServerReadyRequest {}).await.unwrap().into_inner().ready);
    assert!(client.model_ready(named("ads")).await.unwrap().into_inner().ready);
    // Whoever asks sends only names.
    let status = client.model_ready(named(&"x".repeat(20 << 10))).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
}
