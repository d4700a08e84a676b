//! Limits on the memory that clients can make a server use: bytes of calls in flight, columns and
//! connections.

use std::net::SocketAddr;
use std::time::Duration;

use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::{FeatureColumn, PredictRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::Code;
use tonic::transport::Channel;

use crate::fake::until;
use crate::serving::{Running, channel, request};

/// A request of a few kilobytes, whose strings take many times as much memory when they are decoded.
fn multiplied(strings: usize) -> PredictRequest {
    let (mut message, _) = request(2, 1);
    message.features[0].ids.clear();
    message.features[0].strings = vec![Default::default(); strings];
    message
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_limit_on_bytes_in_flight_counts_decoded_bytes() {
    let mut running = Running::start_with(|parts| parts.server.max_inflight_bytes = 200_000).await;
    // 20,000 bytes on the wire, at least 640,000 in memory.
    let status = running.client.predict(multiplied(10_000)).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    for needle in ["limit 200000 (server.max_inflight_bytes)", "for this call's message"] {
        assert!(status.message().contains(needle), "{needle:?} in {status}");
    }
    running.until_metric("flechette_requests_total{model=\"(none)\",code=\"RESOURCE_EXHAUSTED\"} 1").await;
    // The bytes of refused calls are released.
    let status = running.client.predict(multiplied(1000)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    for seed in 0..200 {
        let (message, scores) = request(60, seed);
        assert_eq!(running.client.predict(message).await.unwrap().into_inner().scores, scores);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_calls_hold_their_bytes_until_they_are_answered() {
    let running = Running::start_with(|parts| parts.server.max_inflight_bytes = 64 << 10).await;
    running.model.hold();
    let (first, first_scores) = request(64, 0);
    let mut held = vec![(running.send(first), first_scores)];
    until(async || running.model.begun() == 1).await;
    let refused = loop {
        assert!(held.len() < 1000, "64 KiB hold more than 1,000 calls of 64 samples");
        let (message, scores) = request(64, held.len() as u64);
        let mut sent = running.send(message);
        let queued = format!("flechette_queue_samples{{model=\"ads\"}} {}", 64 * held.len());
        tokio::select! {
            answer = &mut sent => break answer.unwrap().unwrap_err(),
            () = running.until_metric(&queued) => held.push((sent, scores)),
        }
    };
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.message().contains("limit 65536 (server.max_inflight_bytes)"), "{refused}");
    assert!(held.len() > 1);
    running.model.release();
    for (sent, scores) in held {
        assert_eq!(sent.await.unwrap().unwrap(), scores);
    }
    let (message, scores) = request(64, 5);
    assert_eq!(running.send(message).await.unwrap().unwrap(), scores);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_columns_than_a_schema_may_have_are_refused_before_decoding() {
    let mut running = Running::start_with(|parts| parts.server.max_bytes = 1 << 20).await;
    let (mut message, _) = request(2, 1);
    message.features = vec![FeatureColumn::default(); 400_000];
    let status = running.client.predict(message).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(status.message(), "features: limit 10000 columns, got more");
    let (message, scores) = request(2, 1);
    assert_eq!(running.client.predict(message).await.unwrap().into_inner().scores, scores);
}

async fn served(client: &mut CtrClient<Channel>) -> Result<(), tonic::Status> {
    client.predict(request(1, 1).0).await.map(drop)
}

/// Whether the server closes a new connection without an answer in this time.
async fn closed_within(time: Duration, address: SocketAddr) -> bool {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let closed = tokio::time::timeout(time, stream.read(&mut [0; 64])).await;
    matches!(closed, Ok(Ok(0) | Err(_)))
}

/// The same, for tests that ask again and again.
async fn closed_at_once(address: SocketAddr) -> bool {
    closed_within(Duration::from_millis(200), address).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_past_the_limit_are_closed_and_closing_one_makes_room() {
    let mut running = Running::start_with(|parts| parts.server.max_connections = 2).await;
    served(&mut running.client).await.unwrap();
    let mut second = CtrClient::new(channel(running.grpc).await);
    served(&mut second).await.unwrap();
    assert!(closed_within(Duration::from_secs(5), running.grpc).await);
    served(&mut running.client).await.unwrap();
    drop(second);
    until(async || !closed_at_once(running.grpc).await).await;
    until(async || {
        let third = Channel::from_shared(format!("http://{}", running.grpc)).unwrap().connect().await;
        match third {
            Ok(third) => served(&mut CtrClient::new(third)).await.is_ok(),
            Err(_) => false,
        }
    })
    .await;

    let held =
        (TcpStream::connect(running.http).await.unwrap(), TcpStream::connect(running.http).await.unwrap());
    until(async || closed_at_once(running.http).await).await;
    drop(held);
    until(async || !closed_at_once(running.http).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_http_request_that_never_ends_is_disconnected() {
    let running = Running::start_with(|parts| parts.server.http_idle = Duration::from_millis(500)).await;
    let mut slow = TcpStream::connect(running.http).await.unwrap();
    // Sends a header byte by byte without end, so only the server can end the connection.
    until(async || running.get("/healthz").await.0 == 200).await;
    slow.write_all(b"GET /healthz HTTP/1.1\r\nX: ").await.unwrap();
    let (mut read, mut write) = slow.split();
    let dripping = async {
        while write.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let mut answer = Vec::new();
    tokio::select! {
        () = dripping => {}
        ended = read.read_to_end(&mut answer) => drop(ended),
    }
    assert!(!answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    assert_eq!(running.get("/healthz").await.0, 200);
}
