//! Clients that take connections, places, memory or descriptors and give nothing back. Others must be served,
//! and the server must end in time.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use flechette::dataset::synthetic::write_criteo_tsv;
use flechette::predict::{Description, Predict, PredictError};
use flechette::schema::Schema;
use flechette::schema::preset::{self, ArchKind};
use flechette::server::Server;
use flechette::server::proto::{GetModelRequest, PredictResponse};
use flechette::trainer;
use flechette::trainer::optim::{Optimizer, OptimizerKind};
use flechette::types::{Batch, Scores, Version};
use h2::client::{ResponseFuture, SendRequest};
use prost::Message;
use prost::bytes::Bytes;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};
use tonic::Code;
use tonic::codegen::http::{HeaderMap, Request};
use tonic_types::StatusExt;

use crate::fake::{Fake, LIMIT, until};
use crate::kserve::typed;
use crate::program::{Served, metrics_page, run_failing, run_json};
use crate::serving::{self, Running, http_get, request};
use crate::switching::wait;

/// The first bytes of an HTTP/2 client: the fixed text and an empty SETTINGS frame.
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// A directory with a small model.
fn models() -> tempfile::TempDir {
    let models = tempfile::tempdir().unwrap();
    let sgd = Optimizer::new(OptimizerKind::Sgd, 0.1);
    let schema = preset::criteo(ArchKind::Dlrm, 4, 100);
    trainer::initialise(&schema, sgd, 1).unwrap().save(models.path(), "ads").unwrap();
    models
}

fn serve(setup: &str, models: &Path, flags: &str) -> Served {
    Served::start_in(setup, models.to_str().unwrap(), flags)
}

/// A connection whose stream windows have `window` bytes.
pub async fn connect(address: SocketAddr, window: u32) -> SendRequest<Bytes> {
    let stream = TcpStream::connect(address).await.unwrap();
    let (send, connection) = h2::client::Builder::new()
        .initial_window_size(window)
        .initial_max_send_streams(1000)
        .handshake(stream)
        .await
        .unwrap();
    tokio::spawn(connection);
    send.ready().await.unwrap()
}

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

fn head() -> Request<()> {
    head_of("flechette.v1.Ctr/Predict")
}

pub fn head_of(path: &str) -> Request<()> {
    let request = Request::builder().method("POST").uri(format!("http://x/{path}"));
    request.header("content-type", "application/grpc").header("te", "trailers").body(()).unwrap()
}

/// The length-prefixed frame of a message.
pub fn frame(message: &[u8]) -> Bytes {
    let mut frame = vec![0];
    frame.extend((message.len() as u32).to_be_bytes());
    frame.extend_from_slice(message);
    frame.into()
}

/// The code and message of an answer without a body.
async fn status(answer: ResponseFuture) -> (Code, String) {
    let answer = tokio::time::timeout(LIMIT, answer).await.expect("an answer in time").unwrap();
    let status = |headers: &HeaderMap| tonic::Status::from_header_map(headers);
    let status = status(answer.headers()).expect("a status in the headers");
    (status.code(), status.message().to_owned())
}

/// Whether the server closes the connection.
async fn closed(stream: &mut TcpStream) -> bool {
    let mut bytes = Vec::new();
    tokio::time::timeout(LIMIT, stream.read_to_end(&mut bytes)).await.is_ok()
}

/// Waits until the server has read what was sent on a connection: a later call has its answer.
async fn has_arrived(raw: &mut SendRequest<Bytes>) {
    let (answer, mut body) = raw.send_request(head(), false).unwrap();
    body.send_data(frame(&request(1, 3).0.encode_to_vec()), true).unwrap();
    tokio::time::timeout(LIMIT, answer).await.expect("an answer in time").unwrap();
}

/// Reads to a frame whose first bytes are these: its length, its type and its flags.
async fn read_to(stream: &mut TcpStream, head: [u8; 5]) {
    let mut bytes = Vec::new();
    let read = async {
        while !bytes.windows(5).any(|found: &[u8]| found == head) {
            let mut more = [0; 1024];
            let count = stream.read(&mut more).await.unwrap();
            assert!(count > 0, "closed without this frame");
            bytes.extend(&more[..count]);
        }
    };
    tokio::time::timeout(LIMIT, read).await.expect("a frame in time");
}

async fn is_served(running: &Running) -> bool {
    let (message, scores) = request(1, 3);
    running.send(message).await.unwrap().is_ok_and(|got| got == scores)
}

/// The processor time that a process has used.
fn processor_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    let ticks: u64 = [11, 12].map(|field| fields[field].parse::<u64>().unwrap()).iter().sum();
    Duration::from_millis(ticks * 10)
}

#[test]
fn with_few_descriptors_the_http_port_answers_beside_many_idle_connections() {
    let models = models();
    let served = serve("ulimit -n 64", models.path(), "");
    let idle: Vec<_> = (0..120).map(|_| std::net::TcpStream::connect(served.grpc).unwrap()).collect();
    let before = processor_time(served.id());
    std::thread::sleep(Duration::from_secs(1));
    assert!(processor_time(served.id()) - before < Duration::from_millis(300));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let health = async { tokio::time::timeout(LIMIT, http_get(served.http, "/healthz")).await };
    assert_eq!(runtime.block_on(health).expect("an answer in time").0, 200);
    drop(idle);
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success(), "{log}");
    // The most lines of a warning in a minute.
    for (words, lines) in
        [("limit of open files (ulimit -n) is too low", 1), ("new connections are closed at once", 20)]
    {
        assert_eq!(log.matches(words).count(), lines, "{log}");
    }
}

#[test]
fn the_soft_limit_of_descriptors_is_raised_to_the_hard_one() {
    let models = models();
    let served = serve("ulimit -Sn 40", models.path(), "");
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", served.id())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let values: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(values[3], values[4], "{line}");
}

#[test]
fn without_descriptors_a_port_waits_and_serves_again_when_there_are_some() {
    let models = models();
    let served = serve("true", models.path(), "");
    let pid = Pid::from_raw(served.id() as i32).unwrap();
    let few = |current| Rlimit { current: Some(current), maximum: Some(20_000) };
    let old = prlimit(Some(pid), Resource::Nofile, few(4)).unwrap();
    let waiting = std::net::TcpStream::connect(served.grpc).unwrap();
    let before = processor_time(served.id());
    std::thread::sleep(Duration::from_secs(1));
    let used = processor_time(served.id()) - before;
    prlimit(Some(pid), Resource::Nofile, old).unwrap();
    assert!(used < Duration::from_millis(300), "{used:?}");
    std::thread::sleep(Duration::from_millis(500));
    drop(waiting);
    assert_eq!(served.metric("flechette_serving_version", &["model=\"ads\""]), 1.0);
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success(), "{log}");
    assert_eq!(log.matches("connections cannot be accepted").count(), 1, "{log}");
}

/// Whether the call may be sent again after a time that the status gives.
fn has_retry(status: &tonic::Status) -> bool {
    status.get_details_retry_info().is_some_and(|info| info.retry_delay.is_some())
}

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
async fn connections_without_a_preface_are_closed_and_make_room() {
    let running = Running::start_with(|parts| {
        parts.server.max_connections = 3;
        parts.server.handshake = Duration::from_secs(5);
    })
    .await;
    // The client of `running` is the third.
    assert!(is_served(&running).await);
    let (mut silent, mut slow) =
        (TcpStream::connect(running.grpc).await.unwrap(), TcpStream::connect(running.grpc).await.unwrap());
    slow.write_all(&PREFACE[..10]).await.unwrap();
    assert!(closed(&mut silent).await && closed(&mut slow).await);
    running.until_metric("flechette_connections{port=\"grpc\"} 1").await;
    let mut late = TcpStream::connect(running.grpc).await.unwrap();
    late.write_all(PREFACE).await.unwrap();
    let mut later = TcpStream::connect(running.grpc).await.unwrap();
    assert!(closed(&mut later).await);
    // A connection with a preface stays open: it answers a PING.
    late.write_all(&http2_frame(6, 0, 0, &[0; 8])).await.unwrap();
    read_to(&mut late, [0, 0, 8, 6, 1]).await;
    running.until_metric("flechette_connections{port=\"grpc\"} 2").await;
    assert!(is_served(&running).await);
    let mut silent = TcpStream::connect(running.http).await.unwrap();
    assert!(closed(&mut silent).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_and_refused_connections_are_counted_by_port() {
    let running = Running::start_with(|parts| parts.server.max_connections = 3).await;
    assert!(is_served(&running).await);
    running.until_metric("flechette_connections_max{port=\"grpc\"} 3").await;
    // The client of `running` is the third.
    let taken = [(); 2].map(|()| std::net::TcpStream::connect(running.grpc).unwrap());
    running.until_metric("flechette_connections{port=\"grpc\"} 3").await;
    running.until_metric("flechette_connections_refused_total{port=\"grpc\"} 0").await;
    let mut refused = TcpStream::connect(running.grpc).await.unwrap();
    assert!(closed(&mut refused).await);
    running.until_metric("flechette_connections_refused_total{port=\"grpc\"} 1").await;
    drop(taken);
    running.until_metric("flechette_connections{port=\"grpc\"} 1").await;
    // The one that asks.
    running.until_metric("flechette_connections{port=\"http\"} 1").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_connection_is_closed_and_its_client_connects_again() {
    let running = Running::start_with(|parts| parts.server.grpc_idle = Some(Duration::from_secs(2))).await;
    assert!(is_served(&running).await);
    let mut raw = TcpStream::connect(running.grpc).await.unwrap();
    raw.write_all(PREFACE).await.unwrap();
    // GOAWAY.
    read_to(&mut raw, [0, 0, 8, 7, 0]).await;
    drop(raw);
    running.until_metric("flechette_connections{port=\"grpc\"} 0").await;
    assert!(is_served(&running).await);
}

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

/// A request for the scores of one sample, and a message that names its model but does not end.
fn whole_and_cut() -> (Bytes, Bytes) {
    let whole = frame(&request(1, 3).0.encode_to_vec());
    let cut = whole.slice(..whole.len() - 1);
    (whole, cut)
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
            (1, Duration::from_secs(2));
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
    // One request, because the model is overloaded 100 ms after the first sample of several.
    let waiting = running.send(request(20, 1).0);
    running.until_metric("flechette_queue_samples{model=\"ads\"} 19").await;
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

/// A HEADERS frame of a Predict call, with `END_HEADERS`.
pub fn headers(stream: u32) -> Vec<u8> {
    // Literals without indexing, and POST and http from the static table.
    let mut block = vec![0x83, 0x86];
    for (name, value) in [(vec![0x04], "/flechette.v1.Ctr/Predict"), (vec![0x0f, 0x10], "application/grpc")] {
        block.extend(name);
        block.push(value.len() as u8);
        block.extend(value.as_bytes());
    }
    http2_frame(1, 4, stream, &block)
}

pub fn http2_frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    let mut frame = vec![length[1], length[2], length[3], kind, flags];
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_head_of_an_http_request_has_a_limit() {
    let running = Running::start().await;
    let mut raw = TcpStream::connect(running.http).await.unwrap();
    // More than the limit of 16 KiB, and no end. What the server has not read when it closes is lost.
    raw.write_all(format!("GET /healthz HTTP/1.1\r\nname: {}", "x".repeat(20 << 10)).as_bytes())
        .await
        .unwrap();
    let mut answer = vec![0; 1000];
    let length =
        tokio::time::timeout(LIMIT, raw.read(&mut answer)).await.expect("an answer in time").unwrap();
    let answer = String::from_utf8_lossy(&answer[..length]);
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
}
