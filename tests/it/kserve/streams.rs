//! Streams of inference: their answers are in order, and how errors, limits, a drain and silence end them.

use std::time::Duration;

use flechette::server::inference::infer_parameter::ParameterChoice;
use flechette::server::inference::*;
use tonic::{Code, Status};

use super::messages::{Client, connect, raw, right, scores, typed};
use crate::fake::{LIMIT, until};
use crate::serving::{Running, request};

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
    let full = "calls in flight: limit 2 (twice server.max_requests), got 2, 2 of them of this connection";
    assert!(status.message().starts_with(full), "{status}");
    let status = answers.message().await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(status.message(), "stream: no request for 6 s (server.stream_idle_seconds)");
    until(async || connect(&running).await.model_infer(right()).await.is_ok()).await;
}
