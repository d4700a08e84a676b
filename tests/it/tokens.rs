//! Tokens: which calls need one of which role, and how they change while the server runs.

use std::path::PathBuf;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flechette::config::AuthConfig;
use flechette::server::ServerParts;
use h2::SendStream;
use h2::client::ResponseFuture;
use prost::bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::codegen::http::Request;
use tonic::{Code, Status};

use crate::certificates::Files;
use crate::fake::until;
use crate::serving::{Running, http_get_on};

const PREDICT: &str = "predict-0123456789abcdef";
const ADMIN: &str = "admin-0123456789abcdef";
const METRICS: &str = "metrics-0123456789abcdef";
const UNKNOWN: &str = "unknown-0123456789abcdef";

/// Files with one token for each role.
fn tokens(files: &Files) -> AuthConfig {
    let file = |name: &str, token: &str| -> Option<PathBuf> { Some(files.write(name, token)) };
    AuthConfig {
        predict: file("predict", PREDICT),
        admin: file("admin", ADMIN),
        metrics: file("metrics", METRICS),
    }
}

async fn start(change: impl FnOnce(&mut ServerParts)) -> (Files, Running) {
    let files = Files::new();
    let auth = tokens(&files);
    let running = Running::start_with(|parts| {
        parts.auth = auth;
        change(parts);
    })
    .await;
    (files, running)
}

/// A call without a message.
struct Call {
    answer: ResponseFuture,
    message: SendStream<Bytes>,
}

/// Begins a call with this path.
async fn begin(running: &Running, path: &str, token: Option<&str>) -> Call {
    let stream = TcpStream::connect(running.grpc).await.unwrap();
    let (mut send, connection) = h2::client::Builder::new().handshake::<_, Bytes>(stream).await.unwrap();
    tokio::spawn(connection);
    let head = Request::builder().method("POST").uri(format!("http://x/{path}"));
    let mut head = head.header("content-type", "application/grpc").header("te", "trailers");
    if let Some(token) = token {
        head = head.header("authorization", format!("Bearer {token}"));
    }
    let (answer, message) = send.send_request(head.body(()).unwrap(), false).unwrap();
    Call { answer, message }
}

async fn status(answer: ResponseFuture) -> Status {
    let answer = tokio::time::timeout(Duration::from_secs(60), answer).await.expect("an answer in time");
    Status::from_header_map(answer.unwrap().headers()).unwrap_or_else(|| Status::new(Code::Ok, ""))
}

/// The status of a call that is refused before any of its message is sent.
async fn refused(running: &Running, path: &str, token: Option<&str>) -> Status {
    let Call { answer, message } = begin(running, path, token).await;
    let status = status(answer).await;
    drop(message);
    status
}

/// The status of a call with an empty message.
async fn call(running: &Running, path: &str, token: Option<&str>) -> Status {
    let Call { answer, mut message } = begin(running, path, token).await;
    // It fails if the call was refused before.
    let _ = message.send_data(Bytes::new(), true);
    status(answer).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_an_unknown_service_are_counted() {
    let (_files, running) = start(|_| {}).await;
    let status = refused(&running, "tensorflow.serving.PredictionService/Predict", Some(ADMIN)).await;
    assert_eq!(status.message(), "no such service or method");
    let page = page(&running, "/metrics", Some(METRICS)).await.1;
    let counted = "flechette_requests_total{model=\"(none)\",code=\"UNIMPLEMENTED\"} 1";
    assert!(page.contains(counted), "{page}");
}

/// Checks that a call is not refused for its token.
async fn let_in(running: &Running, path: &str, token: Option<&str>) {
    let status = call(running, path, token).await;
    let refused =
        matches!(status.code(), Code::Unauthenticated | Code::PermissionDenied | Code::Unimplemented);
    assert!(!refused, "{path} with {token:?}: {status:?}");
}

/// Paths of calls, by the role that they need.
const OPEN: &[&str] = &[
    "grpc.health.v1.Health/Check",
    "inference.GRPCInferenceService/ServerLive",
    "inference.GRPCInferenceService/ServerReady",
    "inference.GRPCInferenceService/ModelReady",
];
const OF_PREDICT: &[&str] = &[
    "flechette.v1.Ctr/Predict",
    "flechette.v1.Ctr/PredictStream",
    "flechette.v1.Ctr/Learn",
    "flechette.v1.Ctr/GetModel",
    "inference.GRPCInferenceService/ServerMetadata",
    "inference.GRPCInferenceService/ModelMetadata",
    "inference.GRPCInferenceService/ModelInfer",
    "inference.GRPCInferenceService/ModelStreamInfer",
    "inference.GRPCInferenceService/ModelStatistics",
    "inference.GRPCInferenceService/RepositoryIndex",
];
const OF_ADMIN: &[&str] = &[
    "flechette.v1.Ctr/SetLabel",
    "inference.GRPCInferenceService/RepositoryModelLoad",
    "inference.GRPCInferenceService/RepositoryModelUnload",
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_needs_a_token_of_its_role_before_its_message() {
    let (_files, running) = start(|_| {}).await;
    for path in OPEN {
        for token in [None, Some(UNKNOWN), Some(PREDICT)] {
            let_in(&running, path, token).await;
        }
    }
    for (paths, own, other, setting) in
        [(OF_PREDICT, PREDICT, METRICS, "auth.predict"), (OF_ADMIN, ADMIN, PREDICT, "auth.admin")]
    {
        for path in paths {
            for (token, code) in [
                (None, Code::Unauthenticated),
                (Some(UNKNOWN), Code::Unauthenticated),
                (Some(other), Code::PermissionDenied),
            ] {
                let status = refused(&running, path, token).await;
                assert_eq!(status.code(), code, "{path} with {token:?}: {status:?}");
                assert!(status.message().contains(setting), "{status:?}");
                assert!(!status.message().contains("0123456789abcdef"), "{status:?}");
            }
            let_in(&running, path, Some(own)).await;
        }
    }
    let refused = 2 * (OF_PREDICT.len() + OF_ADMIN.len());
    let line =
        |code: &str, count| format!("flechette_requests_total{{model=\"(none)\",code=\"{code}\"}} {count}");
    let page = page(&running, "/metrics", Some(METRICS)).await.1;
    assert!(page.contains(&line("UNAUTHENTICATED", refused)), "{page}");
    assert!(page.contains(&line("PERMISSION_DENIED", refused / 2)), "{page}");
}

async fn page(running: &Running, path: &str, token: Option<&str>) -> (u16, String) {
    page_as(running, path, token.map(|token| format!("Bearer {token}"))).await
}

async fn page_as(running: &Running, path: &str, authorization: Option<String>) -> (u16, String) {
    let line = authorization.map_or(String::new(), |value| format!("Authorization: {value}\r\n"));
    http_get_on(TcpStream::connect(running.http).await.unwrap(), path, &line).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_need_a_token_of_metrics_but_health_needs_none() {
    let (_files, running) = start(|_| {}).await;
    for path in ["/metrics", "/", "/status.json"] {
        for (token, code) in [
            (None, 401),
            (Some(UNKNOWN), 401),
            (Some(PREDICT), 403),
            (Some(ADMIN), 403),
            (Some(METRICS), 200),
        ] {
            let (status, text) = page(&running, path, token).await;
            assert_eq!(status, code, "{path} with {token:?}: {text}");
            assert!(code == 200 || text.contains("auth.metrics"), "{text}");
        }
    }
    for path in ["/healthz", "/readyz"] {
        assert_eq!(page(&running, path, None).await.0, 200);
    }
    assert_eq!(page(&running, "/nowhere", None).await.0, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_browser_sends_the_token_as_the_password_of_any_user() {
    let (_files, running) = start(|_| {}).await;
    let mut stream = TcpStream::connect(running.http).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    for scheme in ["Bearer", "Basic realm="] {
        assert!(answer.contains(&format!("www-authenticate: {scheme}")), "{answer}");
    }
    for (user, password, code) in
        [("", METRICS, 200), ("me", METRICS, 200), ("", ADMIN, 403), ("", UNKNOWN, 401)]
    {
        let authorization = format!("Basic {}", STANDARD.encode(format!("{user}:{password}")));
        let (status, text) = page_as(&running, "/status.json", Some(authorization)).await;
        assert_eq!(status, code, "{user}:{password}: {text}");
    }
    for wrong in ["Basic", "Basic !", "Basic bm9jb2xvbg==", "Basic Og=="] {
        assert_eq!(page_as(&running, "/", Some(wrong.to_owned())).await.0, 401, "{wrong}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_without_a_file_is_open() {
    let (_files, running) = start(|parts| parts.auth.metrics = None).await;
    assert_eq!(page(&running, "/metrics", None).await.0, 200);
    let (_files, running) = start(|parts| parts.auth.predict = None).await;
    for path in OF_PREDICT {
        let_in(&running, path, None).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reflection_and_administration_can_be_switched_off() {
    for with_tokens in [false, true] {
        let (_files, running) = start(|parts| {
            (parts.server.reflection, parts.server.admin) = (false, false);
            if !with_tokens {
                parts.auth = AuthConfig::default();
            }
        })
        .await;
        for path in OF_ADMIN {
            let status = refused(&running, path, Some(ADMIN)).await;
            let setting = if path.contains("reflection") { "server.reflection" } else { "server.admin" };
            assert_eq!(status.code(), Code::Unimplemented, "{path}: {status:?}");
            assert_eq!(status.message(), format!("{setting} is off"));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_that_is_removed_is_refused_on_open_connections_too() {
    let (files, running) = start(|_| {}).await;
    let path = OF_PREDICT[0];
    files.write("predict", "");
    tokio::time::sleep(Duration::from_secs(5)).await;
    // A bad file changes nothing.
    let_in(&running, path, Some(PREDICT)).await;
    files.write("predict", UNKNOWN);
    until(async || call(&running, path, Some(PREDICT)).await.code() == Code::Unauthenticated).await;
    let_in(&running, path, Some(UNKNOWN)).await;
    assert_eq!(call(&running, path, Some(ADMIN)).await.code(), Code::PermissionDenied);
}
