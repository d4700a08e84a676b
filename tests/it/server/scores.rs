//! Predict calls: each client gets its own scores, whatever else is in the batch, and is not computed when it
//! is gone.

use std::sync::atomic::Ordering;

use flechette::server::proto::FeatureColumn;
use flechette::server::proto::ctr_client::CtrClient;
use tonic::Code;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::fake::{FAIL, PANIC, until};
use crate::serving::{Running, channel, request};

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
