//! Calls that their clients cancel or do not complete. They are no failures of the server, and the other
//! calls of their connection are answered.

use std::collections::BTreeMap;
use std::time::Duration;

use flechette::server::proto::PredictResponse;
use prost::Message;
use prost::bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::Code;

use super::http2::{PREFACE, connect, frame, has_arrived, head, headers, http2_frame, status};
use crate::fake::{LIMIT, until};
use crate::serving::{Running, request};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_their_clients_do_not_complete_are_no_failures_of_the_server() {
    let running = Running::start().await;
    let whole = frame(&request(1, 3).0.encode_to_vec());
    let half = whole.slice(..whole.len() / 2);
    // The second half of the message does not matter, because its model is named in the first one.
    for (model, sent) in [("(none)", Bytes::new()), ("ads", half.clone())] {
        let counted = async |code: &str, calls: usize| {
            let line = format!("flechette_requests_total{{model=\"{model}\",code=\"{code}\"}} {calls}");
            running.until_metric(&line).await;
        };
        let mut raw = connect(running.grpc, 65_535).await;
        let mut reset = raw.send_request(head(), false).unwrap().1;
        reset.send_data(sent.clone(), false).unwrap();
        has_arrived(&mut raw).await;
        reset.send_reset(h2::Reason::CANCEL);
        counted("CANCELLED", 1).await;
        let mut raw = connect(running.grpc, 65_535).await;
        let mut lost = raw.send_request(head(), false).unwrap();
        lost.1.send_data(sent.clone(), false).unwrap();
        has_arrived(&mut raw).await;
        drop((lost, raw));
        counted("CANCELLED", 2).await;
        let mut raw = connect(running.grpc, 65_535).await;
        let (answer, mut ended) = raw.send_request(head(), false).unwrap();
        ended.send_data(sent, true).unwrap();
        let (code, message) = status(answer).await;
        assert_eq!((code, message.as_str()), (Code::InvalidArgument, "message: missing or incomplete"));
        counted("INVALID_ARGUMENT", 1).await;
    }
    let page = running.get("/metrics").await.1;
    let failed = |line: &&str| line.contains("code=\"INTERNAL\"") || line.contains("code=\"UNKNOWN\"");
    assert!(page.lines().filter(failed).all(|line| line.ends_with(" 0")), "{page}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_cancelled_calls_keeps_the_calls_of_its_connection_that_are_made_before_it_and_in_it() {
    const DATA: u8 = 0;
    const RESET: u8 = 3;
    const GOAWAY: u8 = 7;
    let running = Running::start().await;
    running.model.hold();
    let mut raw = TcpStream::connect(running.grpc).await.unwrap();
    raw.write_all(PREFACE).await.unwrap();
    // The scores of each call that waits for its answer, by its stream.
    let mut waiting = BTreeMap::new();
    let mut whole = |stream: u32| {
        let (message, scores) = request(2, stream.into());
        waiting.insert(stream, scores);
        [headers(stream), http2_frame(DATA, 1, stream, &frame(&message.encode_to_vec()))].concat()
    };
    let reset = |stream| [headers(stream), http2_frame(RESET, 0, stream, &[0, 0, 0, 8])].concat();
    raw.write_all(&whole(1)).await.unwrap();
    until(async || running.model.begun() == 1).await;
    let mut streams = (1..).map(|call| 1 + 2 * call);
    for _ in 0..10 {
        let mut storm = Vec::new();
        for _ in 0..2 {
            streams.by_ref().take(250).for_each(|stream| storm.extend(reset(stream)));
            streams.by_ref().take(1).for_each(|stream| storm.extend(whole(stream)));
        }
        let written = tokio::time::timeout(LIMIT, raw.write_all(&storm)).await;
        written.expect("the server reads on").unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(waiting.len(), 21);
    running.model.release();
    let read = async {
        while !waiting.is_empty() {
            let mut head = [0; 9];
            raw.read_exact(&mut head).await.expect("closed without an answer");
            let [a, b, c, kind, _, stream @ ..] = head;
            let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
            raw.read_exact(&mut payload).await.unwrap();
            assert_ne!(kind, GOAWAY, "{:?}", String::from_utf8_lossy(&payload));
            if kind == DATA && !payload.is_empty() {
                let answer = PredictResponse::decode(&payload[5..]).unwrap();
                let scores = waiting.remove(&u32::from_be_bytes(stream));
                assert_eq!(scores, Some(answer.scores), "one answer, with its scores");
            }
        }
    };
    let read = tokio::time::timeout(LIMIT, read).await;
    assert!(read.is_ok(), "no answer to {:?}", waiting.keys());
}
