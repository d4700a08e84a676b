//! Health and readiness follow the models, also while a model is stuck or no thread is free.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use flechette::server::proto::PredictRequest;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::fake::{LIMIT, until};
use crate::serving::{Running, channel, request};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_and_readiness_follow_the_models() {
    let running = Running::start().await;
    let mut health = HealthClient::new(channel(running.grpc).await);
    let mut check = async |service: &str| {
        let request = HealthCheckRequest { service: service.to_owned() };
        health.check(request).await.map(|answer| answer.into_inner().status).map_err(|s| s.code())
    };
    assert_eq!(check("").await, Ok(1));
    assert_eq!(check("flechette.v1.Ctr").await, Ok(1));
    assert_eq!(check("inference.GRPCInferenceService").await, Ok(1));
    assert_eq!(check("nobody").await, Err(Code::NotFound));
    assert_eq!(running.get("/readyz").await, (200, "ready\n".to_owned()));
    running.model.ready.store(false, Ordering::SeqCst);
    assert_eq!(running.get("/readyz").await, (503, "not ready: ads\n".to_owned()));
    assert_eq!(running.get("/healthz").await.0, 200);
    for service in ["", "flechette.v1.Ctr", "inference.GRPCInferenceService"] {
        let begun = Instant::now();
        while check(service).await != Ok(2) {
            assert!(begun.elapsed() < LIMIT, "health of {service:?} never follows");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_is_stuck_is_not_ready_and_holds_no_call_without_a_deadline() {
    let running = Running::start_with(|parts| {
        parts.batchers.common.default_deadline = Duration::from_millis(50);
    })
    .await;
    running.model.hold();
    let status = running.send(request(1, 1).0).await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(status.message(), "no scores after 0.3 s, the most for a request without a deadline");
    let stuck = (503, "stuck: a call of model ads does not end\n".to_owned());
    until(async || running.get("/readyz").await == stuck).await;
    running.model.release();
    until(async || running.get("/readyz").await.0 == 200).await;
    let (message, scores) = request(1, 2);
    let patient = PredictRequest { timeout_ms: 60_000, ..message };
    assert_eq!(running.send(patient).await.unwrap().unwrap(), scores);
}

#[test]
fn health_follows_the_models_while_every_blocking_thread_waits_for_a_disk() {
    let (answer, disk) = std::sync::mpsc::channel::<()>();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(1)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        tokio::task::spawn_blocking(move || disk.recv());
        let running = Running::start().await;
        running.model.ready.store(false, Ordering::SeqCst);
        let mut health = HealthClient::new(channel(running.grpc).await);
        let begun = Instant::now();
        while health.check(HealthCheckRequest::default()).await.unwrap().into_inner().status != 2 {
            assert!(begun.elapsed() < LIMIT, "health never follows");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        drop(answer);
    });
}
