//! Bytes and messages for the KServe service that no client sends. Everything gets a status, or the scores
//! that the rules require, and memory is charged before a message is decoded.

use flechette::server::inference::model_infer_request::InferInputTensor;
use flechette::server::inference::*;
use flechette::server::proto::PredictRequest;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use prost::Message;
use prost::bytes::Bytes;
use tonic::Code;

use crate::fake::until;
use crate::kserve::messages::{raw, scores, typed};
use crate::serving::{Running, request};
use crate::wire::{Raw, expected, frame, requests};

const INFER: &str = "inference.GRPCInferenceService/ModelInfer";
const STREAM: &str = "inference.GRPCInferenceService/ModelStreamInfer";
const LOAD: &str = "inference.GRPCInferenceService/RepositoryModelLoad";

#[test]
fn arbitrary_bytes_always_get_a_status() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let running = runtime.block_on(Running::start());
    let wire = runtime.block_on(Raw::connect(running.grpc));
    let valid = typed(&request(2, 3).0);
    let spoiled = |message: ModelInferRequest| {
        let bytes = message.encode_to_vec();
        prop::collection::vec((0..bytes.len(), any::<u8>()), 1..6).prop_map(move |changes| {
            let mut bytes = bytes.clone();
            for (place, byte) in changes {
                bytes[place] = byte;
            }
            frame(&bytes)
        })
    };
    let message = prop::collection::vec(any::<u8>(), 0..300).prop_map(|bytes| frame(&bytes));
    let frames = prop::collection::vec(any::<u8>(), 0..300).prop_map(Bytes::from);
    let body = prop_oneof![3 => spoiled(valid.clone()), 3 => spoiled(raw(valid)), 2 => message, 1 => frames];
    let strategy = (prop::sample::select(vec![INFER, INFER, STREAM, LOAD]), body);
    let mut runner = TestRunner::new(Config { cases: 3000, failure_persistence: None, ..Config::default() });
    let good = std::cell::Cell::new(0);
    runner
        .run(&strategy, |(path, bytes)| {
            let answer = runtime.block_on(wire.call_path(path, bytes, &[]));
            let known = [Code::Ok, Code::InvalidArgument, Code::NotFound, Code::Internal];
            // A changed count may exceed a limit. A changed flag byte means an unknown compression, and this
            // server loads no models.
            let rare = [Code::ResourceExhausted, Code::Unimplemented];
            prop_assert!(known.contains(&answer.code) || rare.contains(&answer.code), "{}", answer.code);
            prop_assert!(!answer.message.contains("panic"), "{}", answer.message);
            good.set(good.get() + u32::from(answer.code == Code::Ok));
            Ok(())
        })
        .unwrap();
    assert!(good.get() > 50, "{}", good.get());
}

/// Whether tensors can say what a valid native request says.
fn has_tensors(native: &PredictRequest) -> bool {
    native.features.iter().all(|column| {
        let lengths = column.lengths.is_empty() || column.name == "tag";
        lengths && column.ids.iter().all(|id| i64::try_from(*id).is_ok())
    })
}

#[test]
fn arbitrary_requests_get_the_native_scores_or_a_refusal() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let running = runtime.block_on(Running::start());
    let wire = runtime.block_on(Raw::connect(running.grpc));
    let mut runner = TestRunner::new(Config { cases: 2000, failure_persistence: None, ..Config::default() });
    let counts = std::cell::Cell::new((0, 0));
    runner
        .run(&(requests(), any::<bool>()), |(native, is_raw)| {
            let mut message = typed(&native);
            message.model_version =
                if native.version == 0 { String::new() } else { native.version.to_string() };
            let message = if is_raw { raw(message) } else { message };
            let answer = runtime.block_on(wire.call_path(INFER, frame(&message.encode_to_vec()), &[]));
            let (good, refused) = counts.get();
            match (answer.code, expected(&native)) {
                (Code::Ok, Ok(expected)) => {
                    prop_assert_eq!(scores(&ModelInferResponse::decode(answer.body).unwrap()), expected);
                    counts.set((good + 1, refused));
                }
                (Code::Ok, Err(_)) => prop_assert!(false, "{native:?}"),
                (code, expected) => {
                    let codes = [Code::InvalidArgument, Code::NotFound, Code::ResourceExhausted];
                    prop_assert!(codes.contains(&code), "{code}: {}", answer.message);
                    prop_assert!(!answer.message.is_empty());
                    prop_assert!(expected.is_err() || !has_tensors(&native), "{}", answer.message);
                    counts.set((good, refused + 1));
                }
            }
            Ok(())
        })
        .unwrap();
    let (good, refused) = counts.get();
    assert!(good > 200 && refused > 200, "{good} good, {refused} refused");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_deadline_is_answered_with_its_code() {
    let running = Running::start().await;
    running.model.hold();
    let first = running.send(request(1, 1).0);
    until(async || running.model.begun() == 1).await;
    let wire = Raw::connect(running.grpc).await;
    let message = frame(&typed(&request(2, 1).0).encode_to_vec());
    let answer = wire.call_path(INFER, message, &[("grpc-timeout", "6S")]).await;
    assert_eq!(answer.code, Code::DeadlineExceeded, "{}", answer.message);
    running.until_metric("flechette_requests_total{model=\"ads\",code=\"DEADLINE_EXCEEDED\"} 1").await;
    running.model.release();
    first.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_messages_with_much_memory_are_refused_before_they_are_decoded() {
    let limit = |parts: &mut flechette::server::ServerParts| parts.server.max_inflight_bytes = 1 << 20;
    let running = Running::start_with(limit).await;
    let wire = Raw::connect(running.grpc).await;
    // Each is less than 64 KiB long, and decodes to some MiB.
    let tensors = ModelInferRequest {
        inputs: vec![InferInputTensor::default(); 20_000],
        ..ModelInferRequest::default()
    };
    let strings =
        InferTensorContents { bytes_contents: vec![Bytes::new(); 30_000], ..InferTensorContents::default() };
    let one = InferInputTensor { contents: Some(strings), ..InferInputTensor::default() };
    let strings = ModelInferRequest { inputs: vec![one], ..ModelInferRequest::default() };
    let mut parameters = ModelInferRequest::default();
    let name = |number: u32| format!("{number:x}");
    parameters.parameters = (0..8000).map(|number| (name(number), InferParameter::default())).collect();
    for message in [tensors, strings, parameters] {
        let message = message.encode_to_vec();
        assert!(message.len() < 64 << 10, "{}", message.len());
        for path in [INFER, STREAM, LOAD] {
            let answer = wire.call_path(path, frame(&message), &[]).await;
            assert_eq!(answer.code, Code::ResourceExhausted, "{}", answer.message);
            assert!(
                answer.message.contains("limit 1048576 (server.max_inflight_bytes)"),
                "{}",
                answer.message
            );
        }
    }
    // All of it is released.
    let good = frame(&typed(&request(2, 1).0).encode_to_vec());
    assert_eq!(wire.call_path(INFER, good, &[]).await.code, Code::Ok);
}
