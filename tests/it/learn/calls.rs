//! Learn calls of a server: what they store, count and refuse.

use flechette::config::LearnConfig;
use flechette::server::proto::{LearnRequest, LearnResponse};
use tonic::{Code, Status};

use super::served::{CONFIG, labelled, labels, learning, log_of};
use crate::serving::{Running, request};

async fn learn(running: &Running, request: LearnRequest) -> Result<LearnResponse, Status> {
    running.client.clone().learn(request).await.map(|answer| answer.into_inner())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn samples_are_stored_in_order_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let running = learning(dir.path(), CONFIG, &[]).await;
    let mut last = (String::new(), 0);
    for n in 0..20u64 {
        let answer = learn(&running, labelled(request(7, n).0, n as f32 / 64.0)).await.unwrap();
        assert_eq!(answer.samples, 7);
        let expected = if answer.segment == last.0 { last.1 + 7 } else { 7 };
        assert_eq!(answer.position, expected);
        assert!(answer.segment >= last.0);
        last = (answer.segment, answer.position);
    }
    assert!(last.0.as_str() > "0000000001.fllearn");
    running.until_metric("flechette_learn_samples_total{model=\"ads\"} 140").await;
    running.until_metric("flechette_requests_total{model=\"ads\",code=\"OK\"} 20").await;
    let expected: Vec<f32> = (0..140).map(|n| (n / 7) as f32 / 64.0).collect();
    assert_eq!(labels(&log_of(dir.path(), "ads")), expected);
    assert!(running.stop().await.unwrap().unwrap().unfinished == 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_samples_are_refused_with_the_field_and_nothing_is_stored() {
    type Change = fn(&mut LearnRequest);
    let cases: [(Change, Code, &str); 12] = [
        (|r| r.labels.clear(), Code::InvalidArgument, "labels: expected 3 labels, one per sample, got 0"),
        (|r| r.labels.push(0.0), Code::InvalidArgument, "labels: expected 3 labels, one per sample, got 4"),
        (
            |r| r.labels[1] = f32::NAN,
            Code::InvalidArgument,
            "labels: sample 1: expected a number from 0 to 1, got NaN",
        ),
        (
            |r| r.labels[2] = 1.5,
            Code::InvalidArgument,
            "labels: sample 2: expected a number from 0 to 1, got 1.5",
        ),
        (
            |r| r.labels[0] = -1.0,
            Code::InvalidArgument,
            "labels: sample 0: expected a number from 0 to 1, got -1",
        ),
        (|r| r.model = "none".into(), Code::NotFound, "model: no model \"none\" is served here"),
        (|r| r.features[0].name = "x".into(), Code::InvalidArgument, "features: unknown feature \"x\""),
        (|r| drop(r.features.pop()), Code::InvalidArgument, "features: \"strict\" is missing"),
        (|r| r.dense[0] = f32::INFINITY, Code::InvalidArgument, "expected a finite number, got inf"),
        // It can be scored, but it would end the training.
        (
            |r| r.dense[2] = 3e38,
            Code::InvalidArgument,
            "sample 1: 300000000000000000000000000000000000000 is too large to train on",
        ),
        (|r| r.samples = 65, Code::ResourceExhausted, "samples: limit 64 (server.max_samples), got 65"),
        (|r| r.samples = 0, Code::InvalidArgument, "expected"),
    ];
    let dir = tempfile::tempdir().unwrap();
    let running = learning(dir.path(), CONFIG, &[]).await;
    for (change, code, text) in cases {
        let mut message = labelled(request(3, 1).0, 1.0);
        change(&mut message);
        let status = learn(&running, message).await.unwrap_err();
        assert_eq!(status.code(), code, "{status}");
        assert!(status.message().contains(text), "{status}");
    }
    assert!(labels(&log_of(dir.path(), "ads")).is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_takes_samples_only_if_it_is_told_to_and_a_full_log_names_its_limit() {
    let off = LearnConfig { enabled: false, ..CONFIG };
    let dir = tempfile::tempdir().unwrap();
    let running = learning(dir.path(), off, &["other"]).await;
    let status = learn(&running, labelled(request(1, 1).0, 1.0)).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert_eq!(status.message(), "learn.enabled: model \"ads\" takes no samples here");
    assert!(!dir.path().join("ads").exists());

    let running = learning(dir.path(), LearnConfig { max_bytes: 10_000, ..off }, &["ads"]).await;
    let mut stored = 0;
    let status = loop {
        match learn(&running, labelled(request(10, 1).0, 1.0)).await {
            Ok(answer) => stored += answer.samples as usize,
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains("limit 10000 bytes (learn.max_bytes)"), "{status}");
    assert!(stored > 100);
    running.until_metric("flechette_learn_refused_total{model=\"ads\"} 10").await;
    assert_eq!(labels(&log_of(dir.path(), "ads")).len(), stored);
}
