//! What the log says of requests: who sent them, how they ended, and where their time went.
//!
//! Servers of these tests run on the test's own thread, so that the test has their log alone.

use std::io;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use flechette::schema::preset::ArchKind;
use flechette::server::ServerParts;
use flechette::server::inference::ModelInferRequest;
use flechette::server::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use flechette::server::proto::PredictRequest;
use prost::Message;
use prost::bytes::Bytes;
use serde_json::{Value, json};
use tonic::{Code, Request};
use tracing::subscriber::{DefaultGuard, NoSubscriber};
use tracing::{Dispatch, Level};

use crate::fake::{PANIC, until};
#[cfg(not(feature = "otel"))]
use crate::program::flechette;
use crate::program::{Served, Workshop};
use crate::serving::{Running, channel, request};
use crate::wire::{Raw, frame};

/// While a process has one subscriber, tracing asks the subscriber of the thread that first reaches an event
/// whether it is wanted. A test of another file has none, and would turn the event off for these tests. So
/// there is always a second one.
static SECOND: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::new()));

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

/// The log of this thread, as lines of JSON.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Collects the lines of this thread at this level and above, until the guard is dropped.
    pub fn begin(level: Level) -> (Self, DefaultGuard) {
        LazyLock::force(&SECOND);
        let log = Self::default();
        let lines = log.clone();
        let subscriber = tracing_subscriber::fmt().json().flatten_event(true).with_max_level(level);
        let subscriber = subscriber.with_writer(move || lines.clone()).finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    pub fn lines(&self) -> Vec<Value> {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The lines with this message.
    pub fn with(&self, message: &str) -> Vec<Value> {
        self.lines().into_iter().filter(|line| line["message"] == message).collect()
    }

    /// Waits for the warning of the slow request with this id.
    pub async fn slow(&self, id: &str) -> Value {
        let found = || self.with("slow request").into_iter().find(|line| line["id"] == id);
        until(async || found().is_some()).await;
        found().unwrap()
    }

    /// Waits for a line with this message, and returns the only one.
    pub async fn only(&self, message: &str) -> Value {
        until(async || !self.with(message).is_empty()).await;
        let mut lines = self.with(message);
        assert_eq!(lines.len(), 1, "{lines:#?}");
        lines.remove(0)
    }
}

fn slow_after(millis: u64) -> impl FnOnce(&mut ServerParts) {
    move |parts| parts.slow = Some(Duration::from_millis(millis))
}

fn micros(line: &Value, field: &str) -> u64 {
    line[field].as_u64().unwrap_or_else(|| panic!("no {field}: {line}"))
}

#[tokio::test]
async fn a_slow_request_has_a_warning_with_its_id_and_the_stage_that_took_the_time() {
    let (log, _guard) = Log::begin(Level::INFO);
    let running = Running::start_with(slow_after(200)).await;
    running.model.hold();
    let named = |samples, id: &str| {
        let message = PredictRequest { request_id: id.to_owned(), ..request(samples, 1).0 };
        running.send(message)
    };
    let computed = named(3, "computed");
    until(async || running.model.begun() == 1).await;
    let queued = named(2, "queued");
    running.until_metric("flechette_queue_samples{model=\"ads\"} 2").await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    running.model.release();
    computed.await.unwrap().unwrap();
    queued.await.unwrap().unwrap();
    let sent = Instant::now();
    named(1, "fast").await.unwrap().unwrap();
    let fast = sent.elapsed() < Duration::from_millis(200);

    for (id, samples, stage) in [("computed", 3, "lookup"), ("queued", 2, "queue")] {
        let line = log.slow(id).await;
        assert_eq!((&line["level"], &line["model"]), (&json!("WARN"), &json!("ads")));
        assert_eq!((&line["samples"], &line["version"]), (&json!(samples), &json!(7)), "{line}");
        assert_eq!(
            (&line["stage"], &line["code"], &line["method"]),
            (&json!(stage), &json!("Ok"), &json!("flechette.v1.Ctr/Predict"))
        );
        assert!(micros(&line, &format!("{stage}_us")) >= 200_000, "{line}");
        let stages = ["message", "queue", "lookup", "dense", "compute", "rest"];
        let sum: u64 = stages.map(|stage| micros(&line, &format!("{stage}_us"))).iter().sum();
        assert!(micros(&line, "took_us").abs_diff(sum) <= stages.len() as u64, "{line}");
    }
    let warnings = log.with("slow request");
    assert!(!fast || warnings.iter().all(|line| line["id"] != "fast"), "{warnings:#?}");
}

#[tokio::test]
async fn a_request_that_its_client_has_given_up_is_slow_by_the_stage_that_it_was_in() {
    let (log, _guard) = Log::begin(Level::INFO);
    let running = Running::start_with(slow_after(200)).await;
    running.model.hold();
    let given_up = running.send(request(1, 1).0);
    until(async || running.model.begun() == 1).await;
    tokio::time::sleep(Duration::from_millis(250)).await;
    given_up.abort();
    let line = log.only("slow request").await;
    assert_eq!((&line["stage"], &line["version"]), (&json!("compute"), &Value::Null), "{line}");
    running.model.release();
}

#[tokio::test]
async fn a_message_that_arrives_slowly_is_the_stage_of_its_request() {
    let (log, _guard) = Log::begin(Level::INFO);
    let running = Running::start_with(slow_after(200)).await;
    let raw = Raw::connect(running.grpc).await;
    let call = raw.begin("flechette.v1.Ctr/Predict", &[("x-request-id", "late")]).await;
    let message = frame(&request(1, 1).0.encode_to_vec());
    // When a later call has its answer, this one has arrived.
    assert_eq!(raw.call_path("flechette.v1.Ctr/Predict", message.clone(), &[]).await.code, Code::Ok);
    // Longer than any other stage takes.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(call.finish(message).await.code, Code::Ok);
    let line = log.slow("late").await;
    assert_eq!(line["stage"], "message", "{line}");
}

#[tokio::test]
async fn every_line_of_a_request_has_the_id_that_its_client_gave() {
    let (log, _guard) = Log::begin(Level::DEBUG);
    let running = Running::start().await;
    let parent = format!("00-{TRACE}-b7ad6b7169203331-00");
    let mut expected = Vec::new();
    let own = "a \"b\" c";
    for (own, header, parent) in [
        (own, "of the call", Some(&parent)),
        ("", "of the call", Some(&parent)),
        ("", "", Some(&parent)),
        ("", "", None),
    ] {
        let mut message = Request::new(PredictRequest { request_id: own.to_owned(), ..request(1, 1).0 });
        let metadata = message.metadata_mut();
        if !header.is_empty() {
            metadata.insert("x-request-id", header.parse().unwrap());
        }
        if let Some(parent) = parent {
            metadata.insert("traceparent", parent.parse().unwrap());
        }
        running.client.clone().predict(message).await.unwrap();
        let trace = parent.map_or(Value::Null, |_| json!(TRACE));
        let id = [own, header, trace.as_str().unwrap_or("")].into_iter().find(|id| !id.is_empty());
        expected.push((json!(id.unwrap_or("")), trace));
    }
    until(async || log.with("request").len() == expected.len()).await;
    let lines = log.with("request").into_iter();
    let found: Vec<_> = lines.map(|mut line| (line["id"].take(), line["trace_id"].take())).collect();
    assert_eq!(found, expected);

    // In the other protocol, of a call that reaches no model.
    let mut kserve = GrpcInferenceServiceClient::new(channel(running.grpc).await);
    let unknown =
        ModelInferRequest { model_name: "none".to_owned(), id: "k-1".to_owned(), ..Default::default() };
    assert_eq!(kserve.model_infer(unknown).await.unwrap_err().code(), Code::NotFound);
    let line = log.with("request").pop().unwrap();
    assert_eq!((&line["id"], &line["code"]), (&json!("k-1"), &json!("NotFound")), "{line}");
    assert!(line["error"].as_str().unwrap().contains("no model \"none\" is served"), "{line}");
}

#[tokio::test]
async fn an_id_with_line_breaks_forges_no_line() {
    let (log, _guard) = Log::begin(Level::DEBUG);
    let running = Running::start().await;
    let id = format!("x\n{{\"level\":\"ERROR\"}}\u{1b}[2J{}", "y".repeat(900));
    running.send(PredictRequest { request_id: id, ..request(1, 1).0 }).await.unwrap().unwrap();
    let line = log.only("request").await;
    let shown = line["id"].as_str().unwrap();
    assert!(shown.starts_with("x\u{fffd}{\"level\":\"ERROR\"}\u{fffd}[2Jyy"), "{shown}");
    assert!(shown.chars().count() <= 128, "{shown}");
}

#[tokio::test]
async fn refused_input_is_a_line_at_debug_with_its_reason() {
    let (log, _guard) = Log::begin(Level::DEBUG);
    let running = Running::start().await;
    let mut wrong = request(1, 1).0;
    wrong.features.pop();
    wrong.request_id = "wrong".to_owned();
    running.send(wrong).await.unwrap().unwrap_err();
    let line = log.only("request").await;
    assert_eq!((&line["code"], &line["id"]), (&json!("InvalidArgument"), &json!("wrong")), "{line}");
    assert_eq!(line["error"], json!("features: \"strict\" is missing"));

    // These never become a request.
    let raw = Raw::connect(running.grpc).await;
    let headers = [("x-request-id", "bad")];
    for (path, frames, words) in [
        ("flechette.v1.Ctr/Predict", vec![0, 0, 0, 0, 1, 0xff], "malformed"),
        ("flechette.v1.Ctr/PredictStream", vec![0, 0, 0, 0, 1, 0xff], "malformed"),
        ("flechette.v1.Ctr/Predict", vec![0, 0x7f, 0, 0, 0], "message: limit"),
        ("flechette.v1.Ctr/Forget", vec![0, 0, 0, 0, 0], "flechette.v1.Ctr/Forget: no such method"),
    ] {
        let before = log.with("request").len();
        let code = raw.call_path(path, Bytes::from(frames), &headers).await.code;
        until(async || log.with("request").len() > before).await;
        let line = log.with("request").pop().unwrap();
        assert_eq!((&line["id"], &line["method"]), (&json!("bad"), &json!(path)), "{line}");
        assert_eq!(line["code"], json!(format!("{code:?}")), "{line}");
        assert!(line["error"].as_str().unwrap_or("").contains(words), "{line}");
    }
}

#[tokio::test]
async fn a_request_that_fails_by_the_servers_fault_has_an_error_with_its_id() {
    let (log, _guard) = Log::begin(Level::INFO);
    let running = Running::start().await;
    let mut message = request(1, 1).0;
    message.dense[0] = PANIC;
    message.request_id = "unlucky".to_owned();
    running.send(message).await.unwrap().unwrap_err();
    let line = log.only("request failed").await;
    assert_eq!((&line["level"], &line["id"]), (&json!("ERROR"), &json!("unlucky")), "{line}");
    assert!(line["error"].as_str().unwrap().contains("makes the model panic"), "{line}");
}

#[test]
fn a_flood_of_warnings_is_a_bounded_number_of_lines_and_how_many_were_left_out() {
    let workshop = Workshop::new(300, 100);
    workshop.train(ArchKind::Dlrm);
    // Every request is slow.
    let served = Served::start_in("export FLECHETTE_LOG_SLOW_SECONDS=0.000001", &workshop.models, "");
    served.score("dlrm", &workshop.valid, "--batch 1");
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success(), "{log}");
    let lines = log.lines().filter(|line| line.contains("slow request")).count();
    assert_eq!(lines, 20, "{log}");
    let report = log.lines().find(|line| line.contains("lines were left out")).expect(&log);
    let left_out: u64 = report.split_once("left_out=").unwrap().1.split(' ').next().unwrap().parse().unwrap();
    assert!(left_out >= 80 && report.contains("at=\"src/server/report.rs:"), "{report}");
}

#[cfg(not(feature = "otel"))]
#[test]
fn settings_of_spans_are_refused_by_a_program_without_them() {
    let mut check = flechette();
    let check = check.args(["config", "check"]).env("FLECHETTE_OTEL_ENDPOINT", "http://127.0.0.1:4317");
    let output = check.output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    let words = "because this program was built without the cargo feature otel";
    assert!(error.contains("otel.endpoint") && error.contains(words), "{error}");
    assert_eq!(output.status.code(), Some(2));
}

#[tokio::test]
async fn a_learn_call_is_counted_and_logged_once_with_its_id_and_model() {
    let (log, _guard) = Log::begin(Level::DEBUG);
    let dir = tempfile::tempdir().unwrap();
    let learning = crate::learn::served::learning(dir.path(), crate::learn::served::CONFIG, &[]).await;
    let mut call = Request::new(crate::learn::served::labelled(request(1, 1).0, 7.0));
    call.metadata_mut().insert("x-request-id", "l-1".parse().unwrap());
    let status = learning.client.clone().learn(call).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let line = log.only("request").await;
    let said = ["model", "id", "code"].map(|field| line[field].as_str().unwrap().to_owned());
    assert_eq!(said, ["ads", "l-1", "InvalidArgument"], "{line}");
    assert!(line["error"].as_str().unwrap().contains("label"), "{line}");
}
