//! Encrypted ports: who gets through the handshake, who is closed and when, and new certificates while calls
//! run.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use flechette::server::proto::ctr_client::CtrClient;
use prost::Message;
use prost::bytes::Bytes;
use rustls::HandshakeKind;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::Status;
use tonic::codegen::http::Request;
use tonic::transport::{Channel, Endpoint};

use crate::attacks::http2::PREFACE;
use crate::certificates::{Authority, Files, Signed, endpoint, tls_client, tls_stream, tls_stream_of};
use crate::fake::{LIMIT, until};
use crate::serving::{Running, http_get_on, request};

/// The year in which the certificates of most tests expire.
const UNTIL: i32 = 2090;

/// The length of a ClientHello is in its bytes 3 and 4; this one is not complete.
const HALF_A_HELLO: [u8; 8] = [0x16, 3, 1, 0x01, 0x00, 1, 0, 0];

/// A server with a certificate of this authority, which its clients must have too if `mutual`.
async fn start(files: &Files, authority: &Authority, mutual: bool) -> Running {
    let mut tls = files.certificate(&authority.sign(UNTIL));
    tls.client_ca = mutual.then(|| files.write("clients.pem", &authority.pem()));
    Running::start_with(|parts| {
        parts.tls = Some(tls);
        parts.server.handshake = Duration::from_secs(20);
    })
    .await
}

async fn score(endpoint: Endpoint) -> Result<(), String> {
    let channel = endpoint.connect().await.map_err(|error| format!("{error:?}"))?;
    // The server refuses a certificate after the handshake of the client, whose call then may wait for ever.
    let scored = tokio::time::timeout(Duration::from_secs(60), score_on(CtrClient::new(channel))).await;
    scored.map_err(|late| late.to_string())?.map_err(|status| format!("{status:?}"))
}

async fn score_on(mut client: CtrClient<Channel>) -> Result<(), Status> {
    let (message, scores) = request(2, 5);
    assert_eq!(client.predict(message).await?.into_inner().scores, scores);
    Ok(())
}

/// Whether the server closes the connection in time, whatever it sends before.
async fn closed(mut stream: impl tokio::io::AsyncRead + Unpin, within: Duration) -> bool {
    let mut bytes = Vec::new();
    tokio::time::timeout(within, stream.read_to_end(&mut bytes)).await.is_ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_trusts_the_authority_is_served_and_others_are_not() {
    let (files, authority) = (Files::new(), Authority::new());
    let running = start(&files, &authority, false).await;
    score(endpoint(running.grpc, &authority, None)).await.unwrap();
    let error = score(endpoint(running.grpc, &Authority::new(), None)).await.unwrap_err();
    assert!(error.contains("InvalidCertificate"), "{error}");
    running.until_metric("flechette_tls_handshakes_failed_total{port=\"grpc\"} 1").await;
    // As a load balancer probes the port.
    drop(TcpStream::connect(running.grpc).await.unwrap());
    // The other port stays plain.
    assert_eq!(running.get("/healthz").await.0, 200);
    // 2090-12-31.
    running.until_metric("flechette_tls_certificate_expiry_seconds 3818361600").await;
    let error = tls_stream(running.grpc, &authority, "http/1.1").await.unwrap_err().to_string();
    assert!(error.contains("NoApplicationProtocol"), "{error}");
    running.until_metric("flechette_tls_handshakes_failed_total{port=\"grpc\"} 2").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_client_ca_only_clients_with_its_certificates_are_served() {
    let (files, authority, other) = (Files::new(), Authority::new(), Authority::new());
    let running = start(&files, &authority, true).await;
    score(endpoint(running.grpc, &authority, Some(&authority.sign(UNTIL)))).await.unwrap();
    for own in [None, Some(other.sign(UNTIL)), Some(authority.sign(2020))] {
        let error = score(endpoint(running.grpc, &authority, own.as_ref())).await;
        error.expect_err("a client without a good certificate");
    }
    assert_eq!(running.get("/readyz").await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_certificate_of_a_client_is_verified_at_each_connection() {
    let (files, authority) = (Files::new(), Authority::new());
    for mutual in [false, true] {
        let running = start(&files, &authority, mutual).await;
        let own = mutual.then(|| authority.sign(UNTIL));
        let client = tls_client(&authority, own.as_ref(), "h2");
        let mut kinds = Vec::new();
        for _ in 0..2 {
            let mut stream = tls_stream_of(&client, running.grpc).await.unwrap();
            kinds.push(stream.get_ref().1.handshake_kind().unwrap());
            // The server has sent its tickets before it answers.
            stream.write_all(PREFACE).await.unwrap();
            stream.read_exact(&mut [0; 9]).await.unwrap();
        }
        let second = if mutual { HandshakeKind::Full } else { HandshakeKind::Resumed };
        assert_eq!(kinds, [HandshakeKind::Full, second], "{mutual}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_http_port_can_be_encrypted_and_asks_for_no_certificate() {
    let (files, authority) = (Files::new(), Authority::new());
    let mut tls = files.certificate(&authority.sign(UNTIL));
    tls.http = true;
    tls.client_ca = Some(files.write("clients.pem", &authority.pem()));
    let running = Running::start_with(|parts| parts.tls = Some(tls)).await;
    for path in ["/healthz", "/readyz", "/metrics", "/", "/status.json"] {
        let stream = tls_stream(running.http, &authority, "http/1.1").await.unwrap();
        assert_eq!(http_get_on(stream, path, "").await.0, 200, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_of_the_other_kind_is_closed_at_once() {
    let (files, authority) = (Files::new(), Authority::new());
    let mut tls = files.certificate(&authority.sign(UNTIL));
    tls.http = true;
    let encrypted = Running::start_with(|parts| parts.tls = Some(tls)).await;
    let plain = Running::start().await;
    let hello = [&HALF_A_HELLO[..], &[0; 200]].concat();
    for (port, first) in [
        (encrypted.grpc, &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"[..]),
        (encrypted.http, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"),
        (plain.grpc, &hello),
        (plain.http, &hello),
    ] {
        let mut stream = TcpStream::connect(port).await.unwrap();
        stream.write_all(first).await.unwrap();
        assert!(closed(stream, LIMIT).await, "{port}");
    }
    let stream = tls_stream(encrypted.http, &authority, "http/1.1").await.unwrap();
    let page = http_get_on(stream, "/metrics", "").await.1;
    for port in ["grpc", "http"] {
        let one = format!("flechette_tls_handshakes_failed_total{{port=\"{port}\"}} 1");
        assert!(page.lines().any(|line| line == one), "{page}");
        plain.until_metric(&one).await;
    }
    score(endpoint(encrypted.grpc, &authority, None)).await.unwrap();
    plain.send(request(1, 3).0).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handshakes_that_never_end_hold_up_no_other() {
    let (files, authority) = (Files::new(), Authority::new());
    let running = start_with_8_places(&files, &authority, Duration::from_secs(60)).await;
    for port in [running.grpc, running.http] {
        let _held = begin_7_handshakes(port).await;
        // One place is left, and the handshakes of the others do not block it.
        let started = Instant::now();
        serve_one(port, &running, &authority).await;
        assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    }
}

/// A server with both ports encrypted, each with places for 8 connections.
async fn start_with_8_places(files: &Files, authority: &Authority, handshake: Duration) -> Running {
    let mut tls = files.certificate(&authority.sign(UNTIL));
    tls.http = true;
    Running::start_with(|parts| {
        parts.tls = Some(tls);
        (parts.server.max_connections, parts.server.handshake) = (8, handshake);
    })
    .await
}

async fn begin_7_handshakes(port: SocketAddr) -> Vec<TcpStream> {
    let mut held = Vec::new();
    for first in [&[][..], &HALF_A_HELLO[..1], &HALF_A_HELLO].into_iter().cycle().take(7) {
        let mut stream = TcpStream::connect(port).await.unwrap();
        stream.write_all(first).await.unwrap();
        held.push(stream);
    }
    held
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handshakes_that_never_end_are_closed_and_make_room() {
    let (files, authority) = (Files::new(), Authority::new());
    let running = start_with_8_places(&files, &authority, Duration::from_secs(6)).await;
    let make_room = async |port, protocol| {
        for stream in begin_7_handshakes(port).await {
            assert!(closed(stream, LIMIT).await);
        }
        let mut open = Vec::new();
        for _ in 0..7 {
            open.push(tls_stream(port, &authority, protocol).await);
        }
        assert!(open.iter().all(Result::is_ok));
        // A handshake without a request after it has the same limit.
        for stream in open {
            assert!(closed(stream.unwrap(), LIMIT).await);
        }
    };
    tokio::join!(make_room(running.grpc, "h2"), make_room(running.http, "http/1.1"));
}

async fn serve_one(port: SocketAddr, running: &Running, authority: &Authority) {
    if port == running.grpc {
        score(endpoint(port, authority, None)).await.unwrap();
    } else {
        let stream = tls_stream(port, authority, "http/1.1").await.unwrap();
        assert_eq!(http_get_on(stream, "/healthz", "").await.0, 200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn encrypted_answers_that_are_not_read_take_no_places_and_their_connection_is_closed() {
    let (files, authority) = (Files::new(), Authority::new());
    let tls = files.certificate(&authority.sign(UNTIL));
    let running = Running::start_with(|parts| {
        parts.tls = Some(tls);
        parts.server.max_requests = 4;
        parts.server.write = Duration::from_secs(10);
    })
    .await;
    let stream = tls_stream(running.grpc, &authority, "h2").await.unwrap();
    let builder = h2::client::Builder::new().initial_window_size(0).initial_max_send_streams(9).clone();
    let (mut raw, connection) = builder.handshake::<_, Bytes>(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let message = request(60, 1).0.encode_to_vec();
    let frame = [&[0][..], &(message.len() as u32).to_be_bytes(), &message].concat();
    let mut held = Vec::new();
    for _ in 0..4 {
        let head = Request::builder().method("POST").uri("http://x/flechette.v1.Ctr/Predict");
        let head = head.header("content-type", "application/grpc").header("te", "trailers").body(()).unwrap();
        let (answer, mut body) = raw.send_request(head, false).unwrap();
        body.send_data(frame.clone().into(), true).unwrap();
        held.push(answer.await.unwrap());
    }
    score(endpoint(running.grpc, &authority, None)).await.unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(60), connection).await;
    assert!(ended.is_ok(), "the connection is closed in time");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_encrypted_http_client_that_reads_no_answers_is_closed() {
    let (files, authority) = (Files::new(), Authority::new());
    let mut tls = files.certificate(&authority.sign(UNTIL));
    tls.http = true;
    let running = Running::start_with(|parts| {
        parts.tls = Some(tls);
        parts.server.http_idle = Duration::from_secs(6);
    })
    .await;
    let mut unread = tls_stream(running.http, &authority, "http/1.1").await.unwrap();
    let asks = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n".repeat(1000);
    let asking = async { while unread.write_all(&asks).await.is_ok() && unread.flush().await.is_ok() {} };
    tokio::time::timeout(Duration::from_secs(120), asking).await.expect("closed in time");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_certificate_is_used_for_new_connections_while_calls_run() {
    let (files, old, new) = (Files::new(), Authority::new(), Authority::new());
    let running = start(&files, &old, false).await;
    let client = CtrClient::new(endpoint(running.grpc, &old, None).connect().await.unwrap());
    let (stop, mut stopped) = tokio::sync::oneshot::channel::<()>();
    let calls = Arc::new(AtomicUsize::new(0));
    let (count, counted) = (calls.clone(), || calls.load(Ordering::SeqCst));
    let calling = tokio::spawn(async move {
        while stopped.try_recv().is_err() {
            score_on(client.clone()).await.unwrap();
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    let Signed { certificate, key } = new.sign(2091);
    // The two files are never both new at the same time for the server to see.
    files.write("server.pem", &certificate);
    tokio::time::sleep(Duration::from_millis(300)).await;
    score(endpoint(running.grpc, &old, None)).await.unwrap();
    files.write("server.key", &key);
    until(async || score(endpoint(running.grpc, &new, None)).await.is_ok()).await;
    running.until_metric("flechette_tls_certificate_expiry_seconds 3849897600").await;
    score(endpoint(running.grpc, &old, None)).await.unwrap_err();
    // On the connection that was opened with the old certificate.
    let before = counted();
    until(async || counted() > before + 1).await;
    stop.send(()).unwrap();
    calling.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn authorities_of_clients_change_for_new_connections() {
    let (files, authority, other) = (Files::new(), Authority::new(), Authority::new());
    let running = start(&files, &authority, true).await;
    let (own, others) = (authority.sign(UNTIL), other.sign(UNTIL));
    score(endpoint(running.grpc, &authority, Some(&others))).await.unwrap_err();
    files.write("clients.pem", &other.pem());
    until(async || score(endpoint(running.grpc, &authority, Some(&others))).await.is_ok()).await;
    score(endpoint(running.grpc, &authority, Some(&own))).await.unwrap_err();
}
