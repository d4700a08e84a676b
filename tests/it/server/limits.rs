//! Full and standing queues, and more calls than the limit, refuse requests. A request larger than a batch is
//! scored.

use std::time::Duration;

use flechette::server::proto::GetModelRequest;
use tokio::time::sleep;
use tonic::Code;
use tonic_types::StatusExt;

use crate::fake::until;
use crate::serving::{Running, request};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_refuses_requests_and_loses_none() {
    let running = Running::start_with(|parts| parts.batchers.common.queue_samples = 4).await;
    running.model.hold();
    let (first, first_scores) = request(1, 0);
    let first = running.send(first);
    until(async || running.model.begun() == 1).await;
    let (queued, queued_scores) = request(4, 1);
    let queued = running.send(queued);
    running.until_metric("flechette_queue_samples{model=\"ads\"} 4").await;
    let status = running.send(request(1, 2).0).await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    let expected = "batcher.queue_samples: limit 4, 4 queued, request has 1";
    assert_eq!(status.message(), expected);
    running.model.release();
    assert_eq!(first.await.unwrap().unwrap(), first_scores);
    assert_eq!(queued.await.unwrap().unwrap(), queued_scores);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standing_queue_refuses_requests_and_says_when_to_try_again() {
    let running = Running::start_with(|parts| {
        (parts.batchers.common.max_samples, parts.batchers.common.default_deadline) =
            (1, Duration::from_secs(60));
    })
    .await;
    running.take_a_fifth_of_a_second().await;
    running.model.hold();
    // One request, because the model is overloaded 100 ms after the first sample of several.
    let (message, scores) = request(40, 1);
    let waiting = running.send(message);
    running.until_metric("flechette_queue_samples{model=\"ads\"} 39").await;
    sleep(Duration::from_millis(150)).await;
    let status = running.send(request(1, 4).0).await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().starts_with("batcher: overloaded: the requests before this one"), "{status}");
    let retry = status.get_error_details().retry_info().unwrap().retry_delay.unwrap();
    assert!(retry >= Duration::from_millis(39 * 200), "39 samples take {retry:?}");
    running.model.release();
    assert_eq!(waiting.await.unwrap().unwrap(), scores);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_larger_than_a_batch_and_than_the_model_takes_at_once_is_scored() {
    let running = Running::start_with(|parts| {
        (parts.batchers.common.max_samples, parts.batchers.common.workers) = (1000, 2);
        parts.server.max_samples = 5000;
        parts.server.max_bytes = 4 << 20;
        parts.batchers.common.queue_samples = 5000;
    })
    .await;
    let (message, scores) = request(5000, 3);
    assert_eq!(running.send(message).await.unwrap().unwrap(), scores);
    assert_eq!(*running.model.calls.lock().unwrap(), [1000; 5]);
    let mut client = running.client.clone();
    let model = client.get_model(GetModelRequest { model: "ads".into() }).await.unwrap().into_inner();
    assert_eq!(model.limits.unwrap().max_samples, 5000, "the fake model takes 4096 at once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_calls_than_the_limit_are_refused() {
    let running = Running::start_with(|parts| parts.server.max_requests = 1).await;
    running.model.hold();
    let (message, scores) = request(1, 0);
    let first = running.send(message);
    until(async || running.model.begun() == 1).await;
    let status = running.send(request(1, 2).0).await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains("limit 2 (twice server.max_requests)"), "{status}");
    running.model.release();
    assert_eq!(first.await.unwrap().unwrap(), scores);
}
