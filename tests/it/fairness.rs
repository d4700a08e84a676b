//! Two models in one process: the calls of one are answered as ever while clients flood the other one.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use flechette::config::BatcherConfig;
use flechette::predict::{Description, Predict, PredictError};
use flechette::server::ServerParts;
use flechette::server::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use flechette::server::inference::infer_parameter::ParameterChoice;
use flechette::server::inference::{InferParameter, ModelInferRequest};
use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::{PredictRequest, SetLabelRequest};
use flechette::types::{Batch, Scores};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tonic::Code;

use crate::fake::{Fake, until};
use crate::serving::{Running, channel, request};

/// A model with another name.
struct Other(Arc<Fake>);

impl Predict for Other {
    fn predict(&self, batch: &Batch) -> Result<Scores, PredictError> {
        self.0.predict(batch)
    }

    fn describe(&self) -> Description {
        Description { model: "other".to_owned(), ..self.0.describe() }
    }

    fn ready(&self) -> bool {
        true
    }
}

/// A model that works long for each sample.
struct Expensive(Arc<Fake>);

impl Predict for Expensive {
    fn predict(&self, batch: &Batch) -> Result<Scores, PredictError> {
        let rounds = 200_000 * batch.samples as u64;
        black_box((0..rounds).fold(1, |sum, round| black_box(sum ^ round)));
        self.0.predict(batch)
    }

    fn describe(&self) -> Description {
        self.0.describe()
    }

    fn ready(&self) -> bool {
        true
    }
}

/// A server with the model `ads`, which can be held, and the model `other`.
async fn start(change: impl FnOnce(&mut ServerParts)) -> Running {
    Running::start_with(|parts| {
        parts.models.push(Arc::new(Other(Fake::new())));
        change(parts);
    })
    .await
}

/// Calls the other model some times, one call after the other. Each must be answered in time.
async fn ask_other(running: &Running) {
    for seed in 0..10 {
        let (mut message, scores) = request(3, seed);
        message.model = "other".to_owned();
        let asked = Instant::now();
        assert_eq!(running.send(message).await.unwrap().unwrap(), scores);
        assert!(asked.elapsed() < Duration::from_secs(60), "{:?}", asked.elapsed());
    }
}

/// Clients of the model `ads` on one connection that try again and again until they are answered.
async fn flood(running: &Running, samples: usize) -> Vec<JoinHandle<()>> {
    let connection = CtrClient::new(channel(running.grpc).await);
    let client = |seed| {
        let (mut client, (message, scores)) = (connection.clone(), request(samples, seed));
        tokio::spawn(async move {
            loop {
                match client.predict(message.clone()).await {
                    Ok(answer) => return assert_eq!(answer.into_inner().scores, scores),
                    Err(status) => assert_eq!(status.code(), Code::ResourceExhausted, "{status}"),
                }
                sleep(Duration::from_millis(100)).await;
            }
        })
    };
    (0..250).map(client).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flooded_model_does_not_take_all_places() {
    let running = start(|parts| parts.server.max_requests = 200).await;
    running.model.hold();
    let flood = flood(&running, 1).await;
    // It gets three quarters of the places, less some for calls that are being refused.
    let held = async || {
        let [waiting, computed] = ["samples", "seconds_count"]
            .map(async |what| running.value(&format!("flechette_queue_{what}{{model=\"ads\"}}")).await);
        waiting.await + computed.await
    };
    until(async || held().await >= 120.0).await;
    ask_other(&running).await;
    running.model.release();
    for call in flood {
        call.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flooded_model_does_not_take_all_memory_of_messages() {
    let running = start(|parts| parts.server.max_inflight_bytes = 256 << 10).await;
    running.model.hold();
    let flood = flood(&running, 64).await;
    let refused = "flechette_requests_total{model=\"ads\",code=\"RESOURCE_EXHAUSTED\"}";
    until(async || running.value(refused).await >= 1000.0).await;
    ask_other(&running).await;
    running.model.release();
    for call in flood {
        call.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flooded_model_that_works_long_for_a_sample_leaves_processor_time_to_a_cheap_one() {
    const CALLS: usize = 20;
    let workers = std::thread::available_parallelism().unwrap().get();
    let expensive = Fake::new();
    let model = Arc::new(Expensive(expensive.clone()));
    let running = start(|parts| {
        parts.models[0] = model;
        (parts.batchers.common.workers, parts.batchers.common.max_samples) = (workers, 16);
    })
    .await;
    let flood = flood(&running, 16).await;
    until(async || expensive.begun() > workers).await;
    let before = expensive.begun();
    for seed in 0..CALLS as u64 {
        let (mut message, scores) = request(3, seed);
        message.model = "other".to_owned();
        assert_eq!(running.send(message).await.unwrap().unwrap(), scores);
    }
    // A call waits for few batches of each worker of the other model, on a busy machine too. In one queue
    // with the flood, it would wait for all of them.
    let batches = expensive.begun() - before;
    assert!(flood.iter().any(|call| !call.is_finished()), "the flood ends before the calls");
    assert!(batches <= 4 * CALLS * workers, "{batches} batches of {workers} workers");
    for call in flood {
        call.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_overload_of_a_model_refuses_no_calls_of_another_one() {
    let running = start(|parts| {
        (parts.batchers.common.max_samples, parts.batchers.common.default_deadline) =
            (1, Duration::from_secs(60));
    })
    .await;
    running.take_a_fifth_of_a_second().await;
    running.model.hold();
    // Their own time is so long that none of them is refused, however slowly they come.
    let patient = |seed| PredictRequest { timeout_ms: 3_600_000, ..request(1, seed).0 };
    let waiting: Vec<_> = (0..40).map(|seed| running.send(patient(seed))).collect();
    running.until_metric("flechette_queue_samples{model=\"ads\"} 39").await;
    sleep(Duration::from_millis(150)).await;
    let refused = async || {
        let status = running.send(request(1, 4).0).await.unwrap().unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
        status
    };
    let status = refused().await;
    assert!(status.message().starts_with("batcher: overloaded: "), "{status}");
    // Calls are refused before they are decoded when the rate of answers is known: there are none.
    until(async || refused().await.message().starts_with("overloaded: a call takes about ")).await;
    ask_other(&running).await;
    // The overload is one of normal priorities.
    let mut urgent = ModelInferRequest { model_name: "ads".into(), ..ModelInferRequest::default() };
    let high = InferParameter { parameter_choice: Some(ParameterChoice::Int64Param(1)) };
    urgent.parameters.insert("priority".to_owned(), high);
    let mut kserve = GrpcInferenceServiceClient::new(channel(running.grpc).await);
    let status = kserve.model_infer(urgent.clone()).await.unwrap_err();
    assert!(status.message().contains("missing"), "it was let in, and has no tensors: {status}");
    urgent.parameters.clear();
    let status = kserve.model_infer(urgent).await.unwrap_err();
    assert!(status.message().starts_with("overloaded: a call takes about "), "{status}");
    // An overloaded model can be changed.
    let back = SetLabelRequest { model: "ads".into(), label: "stable".into(), version: 1, remove: false };
    let status = running.client.clone().set_label(back).await.unwrap_err();
    assert_eq!(status.message(), "this server cannot load or unload models", "it was let in");
    running.model.release();
    for call in waiting {
        call.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_has_its_own_settings_of_the_batcher() {
    let running = start(|parts| {
        let own = BatcherConfig { queue_samples: 5, ..parts.batchers.common.clone() };
        parts.batchers.models.insert("ads".to_owned(), own);
    })
    .await;
    let status = running.send(request(6, 1).0).await.unwrap().unwrap_err();
    assert_eq!(status.message(), "batcher.queue_samples: limit 5, 0 queued, request has 6");
    let (mut message, scores) = request(6, 1);
    message.model = "other".to_owned();
    assert_eq!(running.send(message).await.unwrap().unwrap(), scores);
}
