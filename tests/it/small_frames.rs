//! Clients that send many short messages on one connection, which h2 counts against it until they are read:
//! the connection stays, and its calls are answered.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::attacks::http2::{PREFACE, connect, frame, head_of, headers, headers_of, http2_frame};
use crate::fake::{LIMIT, until};
use crate::serving::{Running, request};
use crate::stream::expect_answers;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const END_STREAM: u8 = 1;
const ACK: u8 = 1;

/// A connection of which each byte that is sent is ours. What the server sends is read by a task.
struct Raw {
    socket: tokio::net::tcp::OwnedWriteHalf,
    /// Ends with the kind of the first frame that is on the observed stream with data, or is GOAWAY.
    first: tokio::task::JoinHandle<u8>,
}

impl Raw {
    async fn open(running: &Running, observed: u32) -> Self {
        let (mut read, mut socket) = TcpStream::connect(running.grpc).await.unwrap().into_split();
        socket.write_all(PREFACE).await.unwrap();
        let first = tokio::spawn(async move {
            loop {
                let mut head = [0; 9];
                read.read_exact(&mut head).await.expect("closed without an answer");
                let mut payload = vec![0; usize::from(head[1]) * 256 + usize::from(head[2])];
                read.read_exact(&mut payload).await.unwrap();
                if head[3] == GOAWAY || (head[3] == DATA && head[5..] == observed.to_be_bytes()) {
                    return head[3];
                }
            }
        });
        Self { socket, first }
    }

    async fn send(&mut self, frames: &[Vec<u8>]) {
        self.socket.write_all(&frames.concat()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_calls_that_are_refused_before_their_message_arrives_leave_the_connection_open() {
    let running = Running::start_with(|parts| parts.server.max_requests = 1).await;
    running.model.hold();
    let mut raw = Raw::open(&running, 1).await;
    let body = frame(&request(2, 1).0.encode_to_vec());
    assert!(body.len() < 256);
    raw.send(&[headers(1), http2_frame(DATA, END_STREAM, 1, &body)]).await;
    until(async || running.model.begun() == 1).await;
    // The place is taken, so these are refused at once.
    for round in 0..40 {
        let calls: Vec<u32> = (0..100).map(|call| 3 + 2 * (round * 100 + call)).collect();
        raw.send(&calls.iter().map(|&call| headers(call)).collect::<Vec<_>>()).await;
        sleep(Duration::from_millis(10)).await;
        let late = |&call: &u32| {
            [(0, &body[..]), (END_STREAM, &[])].map(|(end, bytes)| http2_frame(DATA, end, call, bytes))
        };
        raw.send(&calls.iter().flat_map(late).collect::<Vec<_>>()).await;
    }
    let refused = "flechette_requests_total{model=\"(none)\",code=\"RESOURCE_EXHAUSTED\"}";
    until(async || running.value(refused).await == 4000.0).await;
    running.model.release();
    assert_eq!(timeout(LIMIT, raw.first).await.unwrap().unwrap(), DATA);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_on_their_way_to_streams_that_the_server_has_ended_leave_the_connection_open() {
    const STREAMS: u32 = 40;
    const LAST: u32 = 1 + 2 * STREAMS;
    let running = Running::start().await;
    let mut raw = Raw::open(&running, LAST).await;
    let streams: Vec<u32> = (0..STREAMS).map(|stream| 1 + 2 * stream).collect();
    let malformed = frame(&[0xff; 8]);
    for &stream in &streams {
        let path = "/flechette.v1.Ctr/PredictStream";
        raw.send(&[headers_of(stream, path), http2_frame(DATA, 0, stream, &malformed)]).await;
    }
    let ended = "flechette_requests_total{model=\"(none)\",code=\"INTERNAL\"}";
    until(async || running.value(ended).await == f64::from(STREAMS)).await;
    let message = frame(&request(1, 1).0.encode_to_vec());
    assert!(message.len() < 256);
    for stream in streams {
        let mut late = vec![http2_frame(DATA, 0, stream, &message); 100];
        late.push(http2_frame(DATA, END_STREAM, stream, &[]));
        raw.send(&late).await;
    }
    let whole = frame(&request(2, 1).0.encode_to_vec());
    raw.send(&[headers(LAST), http2_frame(DATA, END_STREAM, LAST, &whole)]).await;
    assert_eq!(timeout(LIMIT, raw.first).await.unwrap().unwrap(), DATA);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_of_short_messages_waits_for_a_slow_model() {
    const REQUESTS: u64 = 3000;
    let running = Running::start().await;
    running.model.hold();
    let raw = connect(running.grpc, 1 << 20).await;
    let (answer, mut body) =
        raw.clone().send_request(head_of("flechette.v1.Ctr/PredictStream"), false).unwrap();
    let messages: Vec<_> = (0..REQUESTS).map(|seed| frame(&request(1, seed).0.encode_to_vec())).collect();
    for (message, seed) in messages.into_iter().zip(1..) {
        assert!(message.len() < 100);
        body.send_data(message, seed == REQUESTS).unwrap();
    }
    until(async || running.model.begun() > 0).await;
    // The client sends until the window of the call is full.
    sleep(Duration::from_millis(300)).await;
    running.model.release();
    expect_answers(answer.await.unwrap().into_body(), 1, REQUESTS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rest_of_a_refused_message_is_no_fault_of_its_client() {
    const CALLS: u32 = 200;
    let running = Running::start_with(|parts| parts.server.max_requests = 1).await;
    running.model.hold();
    let held = running.send(request(2, 1).0);
    until(async || running.model.begun() == 1).await;
    let (mut read, mut write) = TcpStream::connect(running.grpc).await.unwrap().into_split();
    write.write_all(PREFACE).await.unwrap();
    let ended = Arc::new(AtomicU32::new(0));
    let counted = ended.clone();
    let mut answers = tokio::spawn(async move {
        loop {
            let mut head = [0; 9];
            read.read_exact(&mut head).await.expect("closed without an answer");
            let mut payload = vec![0; usize::from(head[1]) * 256 + usize::from(head[2])];
            read.read_exact(&mut payload).await.unwrap();
            assert!(![RESET, GOAWAY].contains(&head[3]), "{head:?}: {payload:?}");
            if head[3] == HEADERS && head[4] & END_STREAM != 0 {
                counted.fetch_add(1, Ordering::SeqCst);
            }
            if (head[3], head[4]) == (PING, ACK) {
                return;
            }
        }
    });
    let calls = (0..CALLS).map(|call| 1 + 2 * call);
    // The rest of each message follows when its call was refused a while ago.
    let begin = [&[0, 0, 0, 8, 0][..], &[0xff; 1024]].concat();
    for call in calls.clone() {
        write.write_all(&[headers(call), http2_frame(DATA, 0, call, &begin)].concat()).await.unwrap();
    }
    until(async || ended.load(Ordering::SeqCst) == CALLS).await;
    for call in calls {
        let late = [0, END_STREAM].map(|end| http2_frame(DATA, end, call, &[0xff; 512]));
        write.write_all(&late.concat()).await.unwrap();
    }
    write.write_all(&http2_frame(PING, 0, 0, &[1; 8])).await.unwrap();
    timeout(LIMIT, &mut answers).await.expect("an answer in time").unwrap();
    assert_eq!(ended.load(Ordering::SeqCst), CALLS);
    running.model.release();
    held.await.unwrap().unwrap();
}
