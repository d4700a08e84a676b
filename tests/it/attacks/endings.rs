//! What is still open when a server ends: idle connections, calls without a body, a model that never answers.
//! It ends in time.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use flechette::server::Server;
use prost::Message;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::http2::{PREFACE, connect, frame, has_arrived, head, read_to};
use super::served::{is_served, models, serve};
use crate::fake::{Fake, LIMIT, until};
use crate::serving::{self, Running, http_get, request};
use crate::switching::wait;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_does_not_wait_for_idle_connections() {
    let running = Running::start_with(|parts| parts.server.drain = Duration::from_secs(600)).await;
    assert!(is_served(&running).await);
    let _silent = TcpStream::connect(running.grpc).await.unwrap();
    let mut deaf = TcpStream::connect(running.grpc).await.unwrap();
    deaf.write_all(PREFACE).await.unwrap();
    // The answer to its SETTINGS.
    read_to(&mut deaf, [0, 0, 0, 4, 1]).await;
    let mut open = connect(running.grpc, 65_535).await;
    has_arrived(&mut open).await;
    running.until_metric("flechette_connections{port=\"grpc\"} 4").await;
    let started = Instant::now();
    let drained = running.stop().await.unwrap().unwrap();
    assert_eq!(drained.unfinished, 0);
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
}

#[test]
fn a_second_signal_ends_a_drain_at_once() {
    let models = models();
    let times = "export FLECHETTE_SERVER_BODY_SECONDS=600 FLECHETTE_SERVER_DRAIN_SECONDS=600";
    let served = serve(times, models.path(), "");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let mut raw = runtime.block_on(connect(served.grpc, 65_535));
    let _held = raw.send_request(head(), false).unwrap();
    let ready = || runtime.block_on(http_get(served.http, "/readyz")).0;
    runtime.block_on(has_arrived(&mut raw));
    served.terminate();
    wait("the drain begins", || ready() != 200);
    std::thread::sleep(Duration::from_millis(500));
    let started = Instant::now();
    served.terminate();
    let (status, log) = served.ended();
    assert!(started.elapsed() < LIMIT, "{:?}: {log}", started.elapsed());
    assert_eq!(status.code(), Some(130), "{log}");
}

#[test]
fn a_model_that_never_answers_does_not_hold_the_end_of_the_process() {
    let (ended, end) = mpsc::channel();
    let model = Fake::new();
    let held = model.clone();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let mut parts = serving::parts(&held);
            parts.server.drain = Duration::from_millis(100);
            let server = Server::bind(parts).await.unwrap();
            let raw = connect(server.grpc_addr(), 65_535);
            let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
            let server = tokio::spawn(server.run(async { drop(stopped.await) }));
            held.hold();
            let (_answer, mut body) = raw.await.send_request(head(), false).unwrap();
            body.send_data(frame(&request(1, 1).0.encode_to_vec()), true).unwrap();
            until(async || held.begun() == 1).await;
            stop.send(()).unwrap();
            assert_eq!(server.await.unwrap().unwrap().unfinished, 1);
        });
        // As at the end of `serve`.
        drop(runtime);
        ended.send(()).unwrap();
    });
    let in_time = end.recv_timeout(LIMIT);
    model.release();
    in_time.expect("the runtime ends while the model computes");
}
