//! Answers that a client does not read. They count towards the bytes in flight, and take no place from
//! others.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use flechette::predict::{Description, Predict, PredictError};
use flechette::schema::Schema;
use flechette::server::proto::GetModelRequest;
use flechette::types::{Batch, Scores, Version};
use prost::Message;
use prost::bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};

use super::http2::{connect, frame, has_retry, head, head_of, whole_and_cut};
use super::served::is_served;
use crate::fake::{LIMIT, until};
use crate::serving::{Running, request};

/// A connection that reads nothing, with room for large answers.
struct Deaf(TcpStream);

impl AsyncRead for Deaf {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Poll::Pending
    }
}

impl AsyncWrite for Deaf {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_whose_answers_are_not_read_is_closed() {
    let running = Running::start_with(|parts| {
        parts.server.max_requests = 4;
        parts.server.write = Duration::from_secs(10);
    })
    .await;
    let mut raw = connect(running.grpc, 0).await;
    let held: Vec<_> = (0..4)
        .map(|seed| {
            let (answer, mut body) = raw.send_request(head(), false).unwrap();
            body.send_data(frame(&request(60, seed).0.encode_to_vec()), true).unwrap();
            answer
        })
        .collect();
    let mut answers = Vec::new();
    for answer in held {
        answers.push(answer.await.unwrap());
    }
    assert!(is_served(&running).await, "the answers take no places");
    let ended = tokio::time::timeout(LIMIT, answers[0].body_mut().data()).await;
    assert!(!matches!(ended.expect("closed in time"), Some(Ok(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_are_not_read_count_towards_the_bytes_in_flight() {
    let running = Running::start_with(|parts| parts.server.max_inflight_bytes = 100_000).await;
    let mut raw = connect(running.grpc, 0).await;
    let mut held = Vec::new();
    let mut refused = false;
    while !refused {
        assert!(held.len() < 1000, "100,000 bytes hold 1,000 calls of 60 samples");
        let (answer, mut body) = raw.clone().ready().await.unwrap().send_request(head(), false).unwrap();
        body.send_data(frame(&request(60, 1).0.encode_to_vec()), true).unwrap();
        let answer = answer.await.unwrap();
        refused = answer.headers().get("grpc-status").is_some_and(|code| code == "8");
        let status = tonic::Status::from_header_map(answer.headers()).filter(|_| refused);
        assert!(status.is_none_or(|status| has_retry(&status)), "a call may be sent again");
        held.push(answer);
    }
    raw = connect(running.grpc, 0).await;
    drop((held, raw));
    until(async || is_served(&running).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_few_connections_that_read_no_answers_take_no_place_from_others() {
    let running = Running::start_with(|parts| parts.server.max_requests = 40).await;
    let (whole, _) = whole_and_cut();
    let mut held = Vec::new();
    for _ in 0..12 {
        let mut raw = connect(running.grpc, 0).await;
        for _ in 0..10 {
            let (answer, mut body) = raw.send_request(head(), false).unwrap();
            body.send_data(whole.clone(), true).unwrap();
            held.push((raw.clone(), answer.await.unwrap()));
        }
    }
    assert!(is_served(&running).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_are_not_read_are_no_overload() {
    let running = Running::start_with(|parts| {
        (parts.batchers.common.max_samples, parts.batchers.common.default_deadline) =
            (1, Duration::from_secs(20));
    })
    .await;
    let (whole, _) = whole_and_cut();
    let mut raw = connect(running.grpc, 0).await;
    let mut unread = Vec::new();
    for _ in 0..40 {
        let (answer, mut body) = raw.send_request(head(), false).unwrap();
        body.send_data(whole.clone(), true).unwrap();
        unread.push(answer.await.unwrap());
    }
    running.take_a_fifth_of_a_second().await;
    running.model.hold();
    // One request, because the model is overloaded 100 ms after the first sample of several. It takes longer
    // than the second that a request may wait, although the samples whose answers are not read were fast.
    let waiting = running.send(request(60, 1).0);
    running.until_metric("flechette_queue_samples{model=\"ads\"} 59").await;
    tokio::time::sleep(Duration::from_millis(150)).await;
    let status = running.send(request(1, 4).0).await.unwrap().unwrap_err();
    assert!(status.message().contains("overloaded"), "{status}");
    running.model.release();
    waiting.await.unwrap().unwrap();
    // A client that tries again and again.
    let since = Instant::now();
    while !is_served(&running).await {
        assert!(since.elapsed() < LIMIT, "the idle model refuses all calls");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(unread.len(), 40);
}

/// A model whose description is long, so that short calls have long answers.
struct Wide;

impl Predict for Wide {
    fn predict(&self, _: &Batch) -> Result<Scores, PredictError> {
        Err(PredictError::Store("it is only described".to_owned()))
    }

    fn describe(&self) -> Description {
        let dense = |i| format!("[[dense]]\nname = \"{i:0100}\"\n");
        let schema = "[architecture]\nkind = \"dlrm\"\nbottom = [8]\ntop = [8]\n".to_owned()
            + &(0..40).map(dense).collect::<String>()
            + "[[features]]\nname = \"user\"\ntable = \"users\"\n"
            + "[[tables]]\nname = \"users\"\nrows = 10\ndim = 8\n";
        let schema = Arc::new(Schema::parse(&schema).unwrap());
        Description { model: "wide".to_owned(), version: Version(1), schema, max_samples: 1 }
    }

    fn ready(&self) -> bool {
        true
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_in_a_socket_that_is_not_read_are_in_flight_until_it_is_closed() {
    let running = Running::start_with(|parts| {
        parts.server.max_requests = 50;
        parts.server.max_streams = 10_000;
        parts.server.write = Duration::from_secs(10);
        parts.models = vec![Arc::new(Wide)];
    })
    .await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let stream = Deaf(socket.connect(running.grpc).await.unwrap());
    let (mut raw, connection) = h2::client::Builder::new()
        .initial_max_send_streams(10_000)
        .initial_connection_window_size(1 << 30)
        .handshake::<_, Bytes>(stream)
        .await
        .unwrap();
    tokio::spawn(connection);
    let request = GetModelRequest { model: "wide".to_owned() };
    let is_served = async || running.client.clone().get_model(request.clone()).await.is_ok();
    let ask = frame(&request.encode_to_vec());
    let mut calls = Vec::new();
    // Until the buffers of the two sockets are full. The client never learns that it may send more than the
    // first 65,535 bytes.
    let full = "flechette_requests_total{model=\"(none)\",code=\"RESOURCE_EXHAUSTED\"}";
    while running.value(full).await == 0.0 {
        assert!(calls.len() < 65_535 / ask.len(), "{} answers", calls.len());
        for _ in 0..20 {
            let (answer, mut body) = raw.send_request(head_of("flechette.v1.Ctr/GetModel"), false).unwrap();
            body.send_data(ask.clone(), true).unwrap();
            calls.push(answer);
        }
        assert!(is_served().await, "after {} calls", calls.len());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    running.until_metric("flechette_connections{port=\"grpc\"} 1").await;
}
