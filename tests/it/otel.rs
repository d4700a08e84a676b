//! Spans of a real server at a real collector of OpenTelemetry: a gRPC server with the collector's service.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use flechette::config::OtelConfig;
use flechette::server::ServerParts;
use flechette::server::proto::PredictRequest;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use serde_json::json;
use tokio::net::TcpListener;
use tonic::codegen::{Service, http};
use tonic::{Code, Request, Response, Status};
use tracing::Level;

use crate::fake::{PANIC, until};
use crate::program::flechette;
use crate::serving::{Running, request};
use crate::tracing::Log;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// What a collector has got.
#[derive(Clone, Default)]
struct Collector {
    spans: Arc<Mutex<Vec<Span>>>,
    resource: Arc<Mutex<Vec<KeyValue>>>,
    /// Whether it never answers.
    silent: bool,
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        if self.silent {
            std::future::pending::<()>().await;
        }
        for of_resource in request.into_inner().resource_spans {
            *self.resource.lock().unwrap() = of_resource.resource.unwrap().attributes;
            let spans = of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            self.spans.lock().unwrap().extend(spans);
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    async fn start(self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = TraceServiceServer::new(self);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let server = server.clone();
                let calls = service_fn(move |call: http::Request<Incoming>| {
                    let mut server = server.clone();
                    async move { server.call(call).await }
                });
                let http2 = http2::Builder::new(TokioExecutor::new());
                tokio::spawn(http2.serve_connection(TokioIo::new(stream), calls));
            }
        });
        address
    }

    fn spans(&self) -> Vec<Span> {
        self.spans.lock().unwrap().clone()
    }

    /// Waits for the span of a request, which is the only one, and returns it with its children by name.
    async fn only(&self) -> (Span, BTreeMap<String, Span>) {
        let of_server = |span: &Span| span.kind() == SpanKind::Server;
        until(async || self.spans().iter().any(of_server)).await;
        let (mut requests, children): (Vec<_>, Vec<_>) = self.spans().into_iter().partition(of_server);
        assert_eq!(requests.len(), 1, "{requests:#?}");
        (requests.remove(0), children.into_iter().map(|span| (span.name.clone(), span)).collect())
    }
}

fn to(address: SocketAddr, sample_ratio: f64) -> impl FnOnce(&mut ServerParts) {
    let endpoint = format!("http://{address}");
    move |parts| {
        parts.otel = Some(OtelConfig { endpoint, sample_ratio, service_name: "scores".to_owned() });
    }
}

/// A request with a trace of its client.
fn traced(message: PredictRequest, flags: &str) -> Request<PredictRequest> {
    let mut message = Request::new(message);
    message.metadata_mut().insert("traceparent", format!("00-{TRACE}-{PARENT}-{flags}").parse().unwrap());
    message.metadata_mut().insert("tracestate", "vendor=abc,other=1".parse().unwrap());
    message
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn attribute(attributes: &[KeyValue], key: &str) -> Option<String> {
    let value = attributes.iter().find(|attribute| attribute.key == key)?.value.clone();
    match value {
        Some(AnyValue { value: Some(Value::StringValue(text)) }) => Some(text),
        Some(AnyValue { value: Some(Value::IntValue(number)) }) => Some(number.to_string()),
        other => panic!("{key}: {other:?}"),
    }
}

fn nanos(span: &Span) -> u64 {
    span.end_time_unix_nano - span.start_time_unix_nano
}

#[tokio::test]
async fn a_request_of_a_sampled_trace_has_a_span_in_it_with_a_child_for_each_stage() {
    let collector = Collector::default();
    // Without a trace of the client none would be recorded.
    let running = Running::start_with(to(collector.clone().start().await, 0.0)).await;
    running.model.hold();
    let message = PredictRequest { request_id: "r-1".to_owned(), ..request(3, 1).0 };
    let mut client = running.client.clone();
    let answer = tokio::spawn(async move { client.predict(traced(message, "01")).await });
    until(async || running.model.begun() == 1).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    running.model.release();
    answer.await.unwrap().unwrap();

    let (span, children) = collector.only().await;
    assert_eq!((hex(&span.trace_id), hex(&span.parent_span_id)), (TRACE.to_owned(), PARENT.to_owned()));
    assert_eq!(span.trace_state, "vendor=abc,other=1");
    assert_eq!(span.name, "flechette.v1.Ctr/Predict");
    for (key, value) in [
        ("rpc.system", "grpc"),
        ("rpc.service", "flechette.v1.Ctr"),
        ("rpc.method", "Predict"),
        ("rpc.grpc.status_code", "0"),
        ("flechette.request_id", "r-1"),
        ("flechette.model", "ads"),
        ("flechette.version", "7"),
        ("flechette.samples", "3"),
    ] {
        assert_eq!(attribute(&span.attributes, key).as_deref(), Some(value), "{key}");
    }
    let lookup = &children["lookup"];
    assert!(nanos(lookup) >= 100_000_000 && nanos(&span) >= nanos(lookup), "{span:?} {lookup:?}");
    assert!(children.contains_key("queue") && children.contains_key("message"), "{children:#?}");
    for child in children.values() {
        assert_eq!((&child.parent_span_id, &child.trace_id), (&span.span_id, &span.trace_id));
        assert!(child.start_time_unix_nano >= span.start_time_unix_nano, "{child:?}");
        assert!(child.end_time_unix_nano <= span.end_time_unix_nano, "{child:?}");
    }
    let resource = collector.resource.lock().unwrap().clone();
    assert_eq!(attribute(&resource, "service.name").as_deref(), Some("scores"));
    running.until_metric(&format!("flechette_spans_exported_total {}", 1 + children.len())).await;
}

#[tokio::test]
async fn a_client_that_does_not_record_its_trace_is_followed() {
    let collector = Collector::default();
    let running = Running::start_with(to(collector.clone().start().await, 1.0)).await;
    running.client.clone().predict(traced(request(1, 1).0, "00")).await.unwrap();
    // The share decides for a request without a trace.
    running.send(PredictRequest { request_id: "own".to_owned(), ..request(1, 1).0 }).await.unwrap().unwrap();
    let (span, _) = collector.only().await;
    assert_eq!(attribute(&span.attributes, "flechette.request_id").as_deref(), Some("own"));
    assert!(span.parent_span_id.is_empty() && hex(&span.trace_id) != TRACE, "{span:?}");
}

#[tokio::test]
async fn a_failure_of_the_server_is_an_error_and_its_line_names_the_trace() {
    let (log, _guard) = Log::begin(Level::INFO);
    let collector = Collector::default();
    let running = Running::start_with(to(collector.clone().start().await, 1.0)).await;
    let mut message = request(1, 1).0;
    message.dense[0] = PANIC;
    running.send(message).await.unwrap().unwrap_err();
    let (span, _) = collector.only().await;
    let status = span.status.clone().unwrap();
    assert!(status.code == 2 && status.message.contains("makes the model panic"), "{status:?}");
    let code = (Code::Internal as i32).to_string();
    assert_eq!(attribute(&span.attributes, "rpc.grpc.status_code"), Some(code));
    assert_eq!(log.only("request failed").await["trace_id"], json!(hex(&span.trace_id)));
}

#[tokio::test]
async fn the_last_spans_are_sent_before_the_server_ends() {
    let collector = Collector::default();
    let running = Running::start_with(to(collector.clone().start().await, 1.0)).await;
    for seed in 0..20 {
        running.send(request(1, seed).0).await.unwrap().unwrap();
    }
    running.stop().await.unwrap().unwrap();
    let requests = collector.spans().into_iter().filter(|span| span.kind() == SpanKind::Server);
    assert_eq!(requests.count(), 20);
}

#[tokio::test]
async fn without_a_collector_requests_are_answered_and_the_lost_spans_are_counted() {
    let (log, _guard) = Log::begin(Level::INFO);
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let running = Running::start_with(to(nobody, 1.0)).await;
    let (message, scores) = request(2, 1);
    assert_eq!(running.send(message).await.unwrap().unwrap(), scores);
    until(async || running.value("flechette_spans_dropped_total").await >= 1.0).await;
    let line = log.with("otel.endpoint: spans are dropped").remove(0);
    assert!(line["level"] == "WARN" && line["spans"].as_u64().unwrap() >= 1, "{line}");
    assert_eq!(running.value("flechette_spans_exported_total").await, 0.0);
}

#[tokio::test]
async fn a_collector_that_never_answers_delays_no_request_and_the_end_only_for_a_moment() {
    let silent = Collector { silent: true, ..Collector::default() };
    let running = Running::start_with(to(silent.start().await, 1.0)).await;
    let began = Instant::now();
    for seed in 0..100 {
        let (message, scores) = request(1, seed);
        assert_eq!(running.send(message).await.unwrap().unwrap(), scores);
    }
    running.stop().await.unwrap().unwrap();
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
}

#[test]
fn an_endpoint_without_a_scheme_is_refused_by_name() {
    let mut check = flechette();
    let check = check.args(["config", "check"]).env("FLECHETTE_OTEL_ENDPOINT", "collector:4317");
    let output = check.output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("otel.endpoint") && error.contains("http://HOST:PORT"), "{error}");
    assert_eq!(output.status.code(), Some(2));
}
