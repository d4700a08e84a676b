//! Calls whose messages never come or never end. They are ended, and take no place from other connections.
//! Limits that could not hold the largest message are refused.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use flechette::dataset::synthetic::write_criteo_tsv;
use prost::Message;
use prost::bytes::Bytes;
use tonic::Code;

use super::http2::{connect, frame, has_retry, head, head_of, status, whole_and_cut};
use super::served::{is_served, models, serve};
use crate::fake::until;
use crate::kserve::messages::typed;
use crate::program::{Served, metrics_page, run_failing, run_json};
use crate::serving::{Running, request};
use crate::switching::wait;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_without_a_body_are_ended_and_leave_room_to_other_connections() {
    let running = Running::start_with(|parts| {
        parts.server.max_requests = 8;
        parts.server.body = Duration::from_millis(2500);
    })
    .await;
    let mut raw = connect(running.grpc, 65_535).await;
    // Twice as many calls as there are places may be in flight, but half of them are for other connections.
    let mut held: Vec<_> = (0..16).map(|_| raw.send_request(head(), false).unwrap()).collect();
    // The body of one of them does not end.
    held[0].1.send_data(frame(&request(1, 3).0.encode_to_vec()), false).unwrap();
    for (answer, _body) in held.split_off(8) {
        let headers = answer.await.unwrap();
        let status = tonic::Status::from_header_map(headers.headers()).unwrap();
        assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
        assert!(status.message().contains("of them of this connection; the rest is for others"), "{status}");
        assert!(has_retry(&status), "{status:?}");
    }
    assert!(is_served(&running).await);
    for (answer, _body) in held {
        let (code, message) = status(answer).await;
        assert_eq!(code, Code::DeadlineExceeded, "{message}");
        assert!(message.contains("2.5 s (server.body_seconds)"), "{message}");
    }
    assert!(is_served(&running).await);
    for (model, calls) in [("(none)", 7), ("ads", 1)] {
        let line =
            format!("flechette_requests_total{{model=\"{model}\",code=\"DEADLINE_EXCEEDED\"}} {calls}");
        running.until_metric(&line).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_reopen_calls_without_a_body_keep_others_and_the_drain_waiting_for_nothing() {
    let running = Running::start_with(|parts| {
        parts.server.max_requests = 100;
        parts.server.body = Duration::from_millis(300);
    })
    .await;
    let mut attack = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let raw = connect(running.grpc, 65_535).await;
        for _ in 0..200 {
            let raw = raw.clone();
            attack.spawn(async move {
                // Until the connection ends.
                while let Ok(mut raw) = raw.clone().ready().await {
                    let Ok((answer, _body)) = raw.send_request(head(), false) else { return };
                    let _ = answer.await;
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            });
        }
    }
    let ended = "flechette_requests_total{model=\"(none)\",code=\"DEADLINE_EXCEEDED\"}";
    until(async || running.value(ended).await > 0.0).await;
    let mut served = 0;
    for _ in 0..100 {
        served += usize::from(is_served(&running).await);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(served, 100);
    assert_eq!(running.stop().await.unwrap().unwrap().unfinished, 0);
}

#[test]
fn with_the_default_limits_8_connections_full_of_calls_without_a_body_refuse_no_others_and_hold_no_drain() {
    let models = models();
    let data = models.path().join("rows.tsv");
    write_criteo_tsv(100, 1, std::fs::File::create(&data).unwrap()).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let fill = async |served: &Served| {
        let mut held = Vec::new();
        for _ in 0..8 {
            let mut raw = connect(served.grpc, 65_535).await;
            for _ in 0..1024 {
                raw = raw.ready().await.unwrap();
                held.push(raw.send_request(head(), false).unwrap());
            }
        }
        held
    };
    // No call ends before the last one has begun, however slow the machine is.
    let served = serve("export FLECHETTE_SERVER_BODY_SECONDS=600", models.path(), "");
    let mut held = runtime.block_on(fill(&served));
    let mut context = Context::from_waker(Waker::noop());
    let polled = held.iter_mut().map(|(answer, _)| Pin::new(answer).poll(&mut context));
    let waiting = polled.filter(Poll::is_pending).count();
    assert!(waiting > 8000, "{waiting} calls are held");
    let load = run_json(&format!(
        "load --addr {} --model ads --format criteo-tsv {} --concurrency 4 --seconds 1 --json",
        served.url(),
        data.display()
    ));
    assert!(load["failed"] == 0 && load["unsent"] == 0 && load["ok"].as_u64() > Some(0), "{load}");
    drop((held, served));
    let served = serve("true", models.path(), "");
    // Some of these may end before. The drain has the others.
    let _held = runtime.block_on(fill(&served));
    wait("most calls have arrived", || {
        let page = metrics_page(served.http);
        let line = page.lines().find_map(|line| line.strip_prefix("flechette_calls_in_flight "));
        line.unwrap().parse::<f64>().unwrap() > 4000.0
    });
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success() && !log.contains("server.drain_seconds have passed"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_streams_of_a_connection_leave_places_to_other_connections() {
    let running = Running::start_with(|parts| parts.server.max_requests = 8).await;
    let mut raw = connect(running.grpc, 65_535).await;
    let mut open = || raw.send_request(head_of("flechette.v1.Ctr/PredictStream"), false).unwrap();
    let mut held: Vec<_> = (0..8).map(|_| open()).collect();
    let (code, message) = status(held.pop().unwrap().0).await;
    assert_eq!(code, Code::ResourceExhausted, "{message}");
    assert!(is_served(&running).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_may_be_silent_between_its_messages_but_not_within_one() {
    let running = Running::start_with(|parts| parts.server.body = Duration::from_secs(5)).await;
    let mut raw = connect(running.grpc, 65_535).await;
    let message = frame(&typed(&request(1, 3).0).encode_to_vec());
    let path = "inference.GRPCInferenceService/ModelStreamInfer";
    let (answer, mut body) = raw.send_request(head_of(path), false).unwrap();
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_millis(5200)).await;
        // The last byte of a message begins the time of the next one.
        body.send_data(message.slice(..20), false).unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        body.send_data(message.slice(20..), false).unwrap();
    }
    let mut answers = answer.await.unwrap().into_body();
    running.until_metric("flechette_requests_total{model=\"ads\",code=\"OK\"} 2").await;
    body.send_data(message.slice(..20), false).unwrap();
    while answers.data().await.is_some() {}
    let trailers = answers.trailers().await.unwrap().unwrap();
    let status = tonic::Status::from_header_map(&trailers).unwrap();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    assert!(status.message().contains("5 s (server.body_seconds) after its first byte"), "{status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_few_connections_with_messages_that_do_not_end_take_no_place_from_others() {
    let running = Running::start_with(|parts| parts.server.max_requests = 40).await;
    let (whole, cut) = whole_and_cut();
    for sent in [Bytes::new(), cut, whole, frame(&[])] {
        let mut held = Vec::new();
        for _ in 0..12 {
            let mut raw = connect(running.grpc, 65_535).await;
            let mut calls: Vec<_> = (0..10).map(|_| raw.send_request(head(), false).unwrap()).collect();
            for (_, body) in &mut calls {
                body.send_data(sent.clone(), false).unwrap();
            }
            held.push((raw, calls));
            // Those that get no part are refused.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(is_served(&running).await, "with {} bytes of each call", sent.len());
    }
}

#[test]
fn limits_that_cannot_hold_the_largest_message_are_refused_at_start() {
    let models = models();
    let config = models.path().join("serve.toml");
    for (keys, needed) in [
        ("[server]\nmax_bytes = \"64MiB\"\n[batcher]\nqueue_bytes = \"256MiB\"", 12 * (64u64 << 20)),
        ("[server]\nmax_bytes = \"64MiB\"\nmax_inflight_bytes = \"1GiB\"", 33 * (64 << 20) + 25_311_088),
    ] {
        std::fs::write(&config, keys).unwrap();
        let (models, config) = (models.path().display(), config.display());
        let error = run_failing(2, &format!("serve --models {models} --config {config}"));
        let key = if keys.contains("queue") { "batcher.queue_bytes" } else { "server.max_inflight_bytes" };
        for words in [key, "server.max_bytes = 67108864", &format!("at least {needed}")] {
            assert!(error.contains(words), "{words}: {error}");
        }
    }
}
