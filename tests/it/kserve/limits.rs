//! Limits, deadlines and priorities are those of native calls. Health is answered beyond the limits.

use std::time::Duration;

use flechette::server::inference::infer_parameter::ParameterChoice;
use flechette::server::inference::*;
use prost::Message;
use tonic::Code;

use super::messages::{connect, named, right, typed};
use crate::fake::until;
use crate::serving::{Running, request};
use crate::wire::{Raw, frame};

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
    assert_eq!(answer.message, "deadline passed before the answer: 6s (grpc-timeout)");
    running.until_metric("flechette_requests_total{model=\"ads\",code=\"DEADLINE_EXCEEDED\"} 1").await;
    // A limit of the request's own, in microseconds.
    let mut late = right();
    let micros = InferParameter { parameter_choice: Some(ParameterChoice::Int64Param(2000)) };
    late.parameters.insert("timeout".to_owned(), micros);
    let status = client.model_infer(late).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    assert_eq!(status.message(), "deadline passed before the answer: 2ms (parameters: timeout)");
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
