//! The gRPC and HTTP ports, tested by clients.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::{FeatureColumn, GetModelRequest, PredictRequest};
use flechette::server::{Server, ServerError};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::time::sleep;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::fake::{FAIL, Fake, LIMIT, PANIC, until};
use crate::serving::{self, Running, channel, http_get, request};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_gets_its_scores_version_and_absent_counts() {
    let mut running = Running::start().await;
    let (mut message, _) = request(3, 5);
    message.features[0].ids = vec![1, 5000, 6000];
    message.features[1] = FeatureColumn {
        name: "tag".to_owned(),
        lengths: vec![0, 2, 1],
        ids: vec![49, 50, 3],
        ..FeatureColumn::default()
    };
    let answer = running.client.predict(message).await.unwrap().into_inner();
    assert_eq!(answer.scores.len(), 3);
    assert_eq!(answer.version, 7);
    let absent: Vec<_> = answer.absent.iter().map(|a| (a.feature.as_str(), a.count)).collect();
    assert_eq!(absent, [("user", 2), ("tag", 1)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strings_are_hashed_and_columns_may_be_in_any_order() {
    let mut running = Running::start().await;
    let (mut message, _) = request(2, 9);
    let by_id = ["abc", ""].map(|s| xxh3_64_with_seed(s.as_bytes(), 3) % 1000).to_vec();
    message.features[0].ids = by_id;
    let expected = running.client.predict(message.clone()).await.unwrap().into_inner().scores;
    message.features[0].ids.clear();
    message.features[0].strings = vec!["abc".into(), "".into()];
    message.features.reverse();
    let got = running.client.predict(message).await.unwrap().into_inner().scores;
    assert_eq!(got, expected);
}

struct Bad {
    what: &'static str,
    change: fn(&mut PredictRequest),
    code: Code,
    expected: &'static [&'static str],
}

const fn bad(
    what: &'static str,
    change: fn(&mut PredictRequest),
    code: Code,
    expected: &'static [&'static str],
) -> Bad {
    Bad { what, change, code, expected }
}

const BAD_REQUESTS: &[Bad] = &[
    bad("model", |r| r.model = "nobody".into(), Code::NotFound, &["model", "nobody"]),
    bad("no model", |r| r.model.clear(), Code::NotFound, &["model"]),
    bad("huge name", |r| r.model = "é".repeat(9000), Code::NotFound, &["model", "..."]),
    bad("version", |r| r.version = 8, Code::NotFound, &["version", "serves version 7", "got 8"]),
    bad("no samples", |r| r.samples = 0, Code::InvalidArgument, &["samples", "at least 1", "got 0"]),
    bad(
        "too many samples",
        |r| r.samples = 65,
        Code::ResourceExhausted,
        &["samples", "limit 64", "server.max_samples", "got 65"],
    ),
    bad("all samples", |r| r.samples = u32::MAX, Code::ResourceExhausted, &["limit 64", "4294967295"]),
    bad("dense width", |r| r.dense.push(1.0), Code::InvalidArgument, &["dense", "2 samples x 2", "got 5"]),
    bad("nan", |r| r.dense[3] = f32::NAN, Code::InvalidArgument, &["age", "sample 1", "finite", "NaN"]),
    bad(
        "infinity",
        |r| r.dense[0] = f32::INFINITY,
        Code::InvalidArgument,
        &["price", "sample 0", "finite", "inf"],
    ),
    bad(
        "unknown feature",
        |r| r.features[1].name = "tagg".into(),
        Code::InvalidArgument,
        &["unknown feature", "tagg"],
    ),
    bad(
        "huge feature",
        |r| r.features[1].name = "x".repeat(20_000),
        Code::InvalidArgument,
        &["unknown feature", "..."],
    ),
    bad("missing feature", |r| drop(r.features.pop()), Code::InvalidArgument, &["strict", "missing"]),
    bad(
        "duplicate feature",
        |r| r.features.push(r.features[0].clone()),
        Code::InvalidArgument,
        &["user", "more than once"],
    ),
    bad(
        "ids and strings",
        |r| r.features[0].strings = vec!["a".into()],
        Code::InvalidArgument,
        &["user", "2 ids", "1 strings"],
    ),
    bad(
        "strings without a hash",
        |r| {
            r.features[1].ids.clear();
            r.features[1].lengths = vec![1, 0];
            r.features[1].strings = vec!["a".into()];
        },
        Code::InvalidArgument,
        &["tag", "no hash"],
    ),
    bad(
        "count of lengths",
        |r| r.features[1].lengths.push(0),
        Code::InvalidArgument,
        &["tag", "lengths", "expected 2", "got 3"],
    ),
    bad(
        "sum of lengths",
        |r| r.features[1].lengths = vec![u32::MAX, u32::MAX],
        Code::InvalidArgument,
        &["tag", "lengths", "sum", "8589934590"],
    ),
    bad(
        "values without lengths",
        |r| r.features[0].ids.push(1),
        Code::InvalidArgument,
        &["user", "expected 2", "got 3"],
    ),
    bad(
        "two ids of a one-hot feature",
        |r| r.features[0].lengths = vec![2, 0],
        Code::InvalidArgument,
        &["user", "sample 0", "1 id", "got 2"],
    ),
    bad(
        "too many ids of a multi-hot feature",
        |r| {
            r.features[1].lengths = vec![0, 4];
            r.features[1].ids = vec![1, 2, 3, 4];
        },
        Code::InvalidArgument,
        &["tag", "sample 1", "at most 3", "got 4"],
    ),
    bad(
        "an id past a table whose default is error",
        |r| r.features[2].ids[1] = 10,
        Code::InvalidArgument,
        &["strict", "id 10", "10 rows"],
    ),
    bad(
        "too many bytes",
        |r| r.features[0].strings = vec![vec![b'x'; 70_000].into()],
        Code::ResourceExhausted,
        &["limit 65536 bytes", "server.max_bytes", "got 70"],
    ),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_wrong_input_gets_its_code_and_names_field_and_limit() {
    let mut running = Running::start().await;
    for case in BAD_REQUESTS {
        let (mut message, _) = request(2, 1);
        (case.change)(&mut message);
        let status = running.client.predict(message).await.expect_err(case.what);
        assert_eq!(status.code(), case.code, "{}: {status}", case.what);
        for needle in case.expected {
            assert!(status.message().contains(needle), "{}: {needle:?} in {status}", case.what);
        }
    }
    assert_eq!(running.model.computed(), 0, "no bad request reaches the model");
    let (message, scores) = request(2, 1);
    assert_eq!(running.client.predict(message).await.unwrap().into_inner().scores, scores);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_or_panicking_sample_fails_only_its_request() {
    let running = Running::start().await;
    running.model.hold();
    let (first, first_scores) = request(1, 0);
    let first = running.send(first);
    until(async || running.model.begun() == 1).await;
    // These four are queued together and become one batch.
    let (good, good_scores) = request(2, 3);
    let (other, other_scores) = request(3, 4);
    let (mut panicking, _) = request(1, 5);
    let (mut failing, _) = request(1, 6);
    panicking.dense[0] = PANIC;
    failing.dense[0] = FAIL;
    let sent = [good, panicking, failing, other].map(|message| running.send(message));
    running.until_metric("flechette_queue_samples{model=\"ads\"} 7").await;
    running.model.release();
    let [good, panicking, failing, other] = sent;
    assert_eq!(first.await.unwrap().unwrap(), first_scores);
    assert_eq!(good.await.unwrap().unwrap(), good_scores);
    assert_eq!(other.await.unwrap().unwrap(), other_scores);
    let status = panicking.await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Internal);
    assert!(status.message().contains("panic"), "{status}");
    let status = failing.await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("disk gone"), "{status}");
    let (message, scores) = request(1, 8);
    assert_eq!(running.send(message).await.unwrap().unwrap(), scores);
}

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
            (1, Duration::from_secs(2));
    })
    .await;
    running.take_a_fifth_of_a_second().await;
    running.model.hold();
    // One request, because the model is overloaded 100 ms after the first sample of several.
    let (message, scores) = request(3, 1);
    let waiting = running.send(message);
    running.until_metric("flechette_queue_samples{model=\"ads\"} 2").await;
    sleep(Duration::from_millis(150)).await;
    let status = running.send(request(1, 4).0).await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().starts_with("batcher: overloaded: the requests before this one"), "{status}");
    let retry = status.get_error_details().retry_info().unwrap().retry_delay.unwrap();
    assert!(retry >= Duration::from_millis(400), "two samples take {retry:?}");
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
    assert!(status.message().contains("limit 1 (server.max_requests)"), "{status}");
    running.model.release();
    assert_eq!(first.await.unwrap().unwrap(), scores);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_of_a_disconnected_client_is_not_computed() {
    let running = Running::start().await;
    running.model.hold();
    let (message, scores) = request(1, 0);
    let first = running.send(message);
    until(async || running.model.begun() == 1).await;
    let gone = running.send(request(5, 1).0);
    running.until_metric("flechette_queue_samples{model=\"ads\"} 5").await;
    gone.abort();
    running.until_metric("flechette_requests_total{model=\"ads\",code=\"CANCELLED\"} 1").await;
    running.model.release();
    assert_eq!(first.await.unwrap().unwrap(), scores);
    let (message, scores) = request(1, 2);
    assert_eq!(running.send(message).await.unwrap().unwrap(), scores);
    assert_eq!(running.model.computed(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_concurrent_clients_each_get_their_own_scores() {
    let running = Running::start_with(|parts| parts.batchers.common.workers = 3).await;
    let mut clients = Vec::new();
    for client in 0..48u64 {
        let mut stub = CtrClient::new(channel(running.grpc).await);
        clients.push(tokio::spawn(async move {
            for round in 0..40 {
                let (message, scores) = request(1 + (client + round) as usize % 9, client * 1000 + round);
                let answer = stub.predict(message).await.unwrap().into_inner();
                assert_eq!(answer.scores, scores);
            }
        }));
    }
    for client in clients {
        client.await.unwrap();
    }
    running.until_metric("flechette_requests_total{model=\"ads\",code=\"OK\"} 1920").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_for_a_version_fails_if_the_version_changes_while_it_is_queued() {
    let running = Running::start().await;
    running.model.hold();
    let (mut message, _) = request(1, 0);
    message.version = 7;
    let sent = running.send(message);
    until(async || running.model.begun() == 1).await;
    running.model.version.store(8, Ordering::SeqCst);
    running.model.release();
    let status = sent.await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn get_model_describes_inputs_limits_and_version() {
    let mut running = Running::start().await;
    let model = running.client.get_model(GetModelRequest { model: "ads".to_owned() }).await.unwrap();
    let model = model.into_inner();
    assert_eq!((model.version, model.architecture.as_str()), (7, "dlrm"));
    assert_eq!(model.dense.iter().map(|d| d.transform.as_str()).collect::<Vec<_>>(), ["none", "log1p"]);
    let tag = &model.features[1];
    assert_eq!((tag.name.as_str(), tag.table.as_str(), tag.rows, tag.dim), ("tag", "tags", 50, 4));
    assert_eq!((tag.max_ids, tag.one_hot, tag.takes_strings), (3, false, false));
    assert!(model.features[0].one_hot && model.features[0].takes_strings);
    let limits = model.limits.unwrap();
    assert_eq!((limits.max_samples, limits.max_bytes), (64, 65_536));
    let status = running.client.get_model(GetModelRequest { model: "x".to_owned() }).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
}

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reflection_lists_the_services_and_describes_the_messages() {
    use tonic_reflection::pb::v1::ServerReflectionRequest;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

    let running = Running::start().await;
    let mut client = ServerReflectionClient::new(channel(running.grpc).await);
    let mut ask = async |question| {
        let request = ServerReflectionRequest { host: String::new(), message_request: Some(question) };
        let stream = tokio_stream::once(request);
        let mut answers = client.server_reflection_info(stream).await.unwrap().into_inner();
        answers.message().await.unwrap().unwrap().message_response.unwrap()
    };
    let MessageResponse::ListServicesResponse(list) = ask(MessageRequest::ListServices(String::new())).await
    else {
        panic!("not a list")
    };
    let names: Vec<_> = list.service.iter().map(|s| s.name.as_str()).collect();
    for name in ["flechette.v1.Ctr", "inference.GRPCInferenceService", "grpc.health.v1.Health"] {
        assert!(names.contains(&name), "{names:?}");
    }
    let symbol = MessageRequest::FileContainingSymbol("flechette.v1.PredictRequest".to_owned());
    let MessageResponse::FileDescriptorResponse(files) = ask(symbol).await else { panic!("not a file") };
    let text = String::from_utf8_lossy(&files.file_descriptor_proto[0]).into_owned();
    assert!(text.contains("FeatureColumn") && text.contains("dense"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_older_reflection_service_is_available() {
    use tonic_reflection::pb::v1alpha::ServerReflectionRequest;
    use tonic_reflection::pb::v1alpha::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1alpha::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1alpha::server_reflection_response::MessageResponse;

    let running = Running::start().await;
    let mut client = ServerReflectionClient::new(channel(running.grpc).await);
    let list = MessageRequest::ListServices(String::new());
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(list) };
    let answers = client.server_reflection_info(tokio_stream::once(request)).await.unwrap();
    let answer = answers.into_inner().message().await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(list) = answer else { panic!("not a list") };
    assert!(list.service.iter().any(|s| s.name == "flechette.v1.Ctr"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_count_requests_samples_and_errors() {
    let mut running = Running::start().await;
    for seed in 0..3 {
        running.client.predict(request(2, seed).0).await.unwrap();
    }
    running.client.predict(PredictRequest::default()).await.unwrap_err();
    let (mut wrong, _) = request(1, 1);
    wrong.samples = 0;
    running.client.predict(wrong).await.unwrap_err();
    let (mut large, _) = request(1, 1);
    large.features[0].strings = vec![vec![0; 70_000].into()];
    running.client.predict(large).await.unwrap_err();
    for line in [
        "flechette_requests_total{model=\"ads\",code=\"OK\"} 3",
        "flechette_requests_total{model=\"ads\",code=\"INVALID_ARGUMENT\"} 1",
        "flechette_requests_total{model=\"(none)\",code=\"NOT_FOUND\"} 1",
        "flechette_requests_total{model=\"(none)\",code=\"RESOURCE_EXHAUSTED\"} 1",
        "flechette_request_seconds_count{model=\"ads\"} 4",
        "flechette_queue_seconds_count{model=\"ads\"} 3",
        "flechette_batch_samples_sum{model=\"ads\"} 6",
        "flechette_queue_samples{model=\"ads\"} 0",
        "flechette_serving_version{model=\"ads\"} 7",
        "flechette_absent_ids_total{model=\"ads\",table=\"users\"} 0",
    ] {
        running.until_metric(line).await;
    }
    let (code, page) = running.get("/").await;
    assert_eq!(code, 200);
    assert!(page.starts_with("<!doctype html>"), "{page}");
    let status: serde_json::Value = serde_json::from_str(&running.get("/status.json").await.1).unwrap();
    assert_eq!(status["models"][0]["name"], "ads");
    assert_eq!(status["grpc"], running.grpc.to_string());
    assert_eq!(running.get("/nowhere").await.0, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_finishes_calls_in_flight_and_reports_it() {
    let running = Running::start().await;
    running.model.hold();
    let send = |seed| {
        let (message, scores) = request(2, seed);
        (running.send(message), scores)
    };
    let mut sent = vec![send(0)];
    until(async || running.model.begun() == 1).await;
    sent.extend((1..10).map(send));
    running.until_metric("flechette_queue_samples{model=\"ads\"} 18").await;
    let mut health = HealthClient::new(channel(running.grpc).await);
    let mut watch = health.watch(HealthCheckRequest { service: String::new() }).await.unwrap().into_inner();
    assert_eq!(watch.message().await.unwrap().unwrap().status, 1);

    let (model, grpc, http) = (running.model.clone(), running.grpc, running.http);
    let ended = running.stop();
    assert_eq!(watch.message().await.unwrap().unwrap().status, 2);
    assert_eq!(http_get(http, "/readyz").await, (503, "draining\n".to_owned()));
    assert_eq!(http_get(http, "/healthz").await.0, 200);
    until(async || tokio::net::TcpStream::connect(grpc).await.is_err()).await;
    model.release();
    for (answer, scores) in sent {
        assert_eq!(answer.await.unwrap().unwrap(), scores);
    }
    assert_eq!(ended.await.unwrap().unwrap().unfinished, 0);
    assert_eq!(model.computed(), 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_ends_when_its_time_is_over() {
    let running =
        Running::start_with(|parts| parts.server.drain = std::time::Duration::from_millis(50)).await;
    running.model.hold();
    let stuck = running.send(request(1, 0).0);
    until(async || running.model.begun() == 1).await;
    let queued = running.send(request(1, 1).0);
    running.until_metric("flechette_queue_samples{model=\"ads\"} 1").await;
    let model = running.model.clone();
    let ended = running.stop().await.unwrap().unwrap();
    assert_eq!(ended.unfinished, 2);
    let status = queued.await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    model.release();
    assert!(stuck.await.unwrap().is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_in_use_is_one_clear_error() {
    let running = Running::start().await;
    for key in ["server.grpc", "server.http"] {
        let mut parts = serving::parts(&Fake::new());
        match key {
            "server.grpc" => parts.server.grpc = running.grpc,
            _ => parts.server.http = running.grpc,
        }
        let error = Server::bind(parts).await.err().unwrap().to_string();
        let expected = format!("{key}: cannot listen on {}", running.grpc);
        assert!(error.starts_with(&expected) && error.contains("in use") && !error.contains('\n'), "{error}");
    }
    let mut parts = serving::parts(&Fake::new());
    parts.models.push(Fake::new());
    let error = Server::bind(parts).await.err().unwrap();
    assert!(matches!(error, ServerError::DuplicateModel(name) if name == "ads"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigterm_starts_the_shutdown() {
    let terminated = flechette::server::terminated().unwrap();
    let pid = std::process::id().to_string();
    let killed = std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap();
    assert!(killed.success());
    terminated.await;
}
