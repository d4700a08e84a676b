//! Calls of health and reflection: without a message they are ended, they keep no connection open, and the
//! open ones of a connection have a limit.

use std::time::{Duration, Instant};

use tonic::Code;

use super::http2::{connect, frame, has_arrived, head_of, status};
use crate::fake::{LIMIT, until};
use crate::serving::Running;

const CHECK: &str = "grpc.health.v1.Health/Check";
const WATCH: &str = "grpc.health.v1.Health/Watch";
const LIVE: &str = "inference.GRPCInferenceService/ServerLive";
const REFLECTION: &str = "grpc.reflection.v1.ServerReflection/ServerReflectionInfo";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_and_reflection_without_a_message_are_ended() {
    let running = Running::start_with(|parts| {
        parts.server.body = Duration::from_millis(300);
        parts.server.stream_idle = Duration::from_millis(300);
    })
    .await;
    let mut raw = connect(running.grpc, 65_535).await;
    for path in [CHECK, WATCH, LIVE] {
        let (answer, _body) = raw.send_request(head_of(path), false).unwrap();
        let (code, message) = status(answer).await;
        assert_eq!(code, Code::DeadlineExceeded, "{message}");
        assert!(message.contains("0.3 s (server.body_seconds)"), "{message}");
    }
    let (answer, _body) = raw.send_request(head_of(REFLECTION), false).unwrap();
    let ended = async {
        let mut answers = answer.await.unwrap().into_body();
        while answers.data().await.is_some() {}
    };
    tokio::time::timeout(LIMIT, ended).await.expect("an end in time");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_with_nothing_but_a_health_watch_is_closed_when_it_is_idle() {
    let running = Running::start_with(|parts| {
        parts.server.grpc_idle = Some(Duration::from_secs(5));
        parts.server.handshake = Duration::from_secs(5);
    })
    .await;
    let mut raw = connect(running.grpc, 65_535).await;
    let (answer, mut body) = raw.send_request(head_of(WATCH), false).unwrap();
    body.send_data(frame(&[]), true).unwrap();
    let mut statuses = answer.await.unwrap().into_body();
    assert!(statuses.data().await.unwrap().is_ok());
    // Other calls keep the connection open, and the watch with it.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(7) {
        has_arrived(&mut raw).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // But not calls of health.
    let mut checks = raw.clone();
    tokio::spawn(async move {
        while let Ok((answer, mut body)) = checks.send_request(head_of(CHECK), false) {
            let _ = body.send_data(frame(&[]), true);
            let _ = answer.await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    let ended = tokio::time::timeout(LIMIT, statuses.data()).await;
    assert!(!matches!(ended.expect("closed in time"), Some(Ok(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_and_reflection_calls_that_the_server_ends_keep_no_connection_open() {
    let running = Running::start_with(|parts| {
        parts.server.grpc_idle = Some(Duration::from_secs(3));
        parts.server.handshake = Duration::from_secs(3);
        parts.server.body = Duration::from_millis(300);
        parts.server.stream_idle = Duration::from_millis(300);
    })
    .await;
    let mut raw = connect(running.grpc, 65_535).await;
    // Their bodies do not end, so the server reads them for a while after its answers.
    let calls = async {
        for path in [REFLECTION, CHECK].into_iter().cycle() {
            let Ok((answer, _body)) = raw.send_request(head_of(path), false) else { return };
            let Ok(answer) = answer.await else { return };
            let mut answers = answer.into_body();
            while answers.data().await.is_some() {}
        }
    };
    tokio::time::timeout(LIMIT, calls).await.expect("closed in time");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_open_health_calls_of_a_connection_have_a_limit() {
    let running = Running::start().await;
    let mut raw = connect(running.grpc, 65_535).await;
    let paths = [CHECK, LIVE].into_iter().cycle().take(33);
    let mut held: Vec<_> = paths.map(|path| raw.send_request(head_of(path), false).unwrap()).collect();
    let (code, message) = status(held.pop().unwrap().0).await;
    assert_eq!(code, Code::ResourceExhausted, "{message}");
    held.pop().unwrap().1.send_reset(h2::Reason::CANCEL);
    let check = async || {
        let (answer, mut body) =
            raw.clone().ready().await.unwrap().send_request(head_of(CHECK), false).unwrap();
        body.send_data(frame(&[]), true).unwrap();
        !answer.await.unwrap().headers().contains_key("grpc-status")
    };
    until(check).await;
}
