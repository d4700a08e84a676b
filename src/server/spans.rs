//! Spans of requests, for a collector of OpenTelemetry (`otel.endpoint`).
//!
//! A span is made when its request has ended, from the instants that its [`Report`] has, with a child for
//! each stage that took time. It belongs to the trace of the client's `traceparent`, whose flag says whether
//! it is recorded; without one, `otel.sample_ratio` of the requests are.
//!
//! Nothing waits for the collector. Spans go to a bounded queue ([`Queue`]), and a task ([`Exporter`]) sends
//! them. Spans that find the queue full, and those that the collector did not take in time, are dropped and
//! counted.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use opentelemetry::trace::{
    Span as _, SpanContext, SpanKind, Status, TraceContextExt, TraceFlags, TraceState, Tracer, TracerProvider,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    Sampler, SdkTracer, SdkTracerProvider, Span, SpanData, SpanExporter as _, SpanProcessor,
};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};
use tonic::Code;
use tonic::transport::{ClientTlsConfig, Endpoint};

use super::ServerError;
use super::origin::{Origin, TraceId, TraceParent};
use super::report::{Instants, Report};
use crate::config::OtelConfig;
use crate::metrics::{Metrics, SpanMetrics};
use crate::types::Version;

/// Most spans that wait for the collector, and most of one message to it.
const QUEUE: usize = 8192;
const BATCH: usize = 512;

/// How often spans are sent, and how long the collector may take for them.
const SEND_EVERY: Duration = Duration::from_secs(1);
const SEND: Duration = Duration::from_secs(5);

/// How often a collector that does not answer is asked whether it is there, and how long that answer may
/// take. Both pass within [`SEND`]. Without spans on their way it is not asked: collectors close such
/// connections.
const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// How long the last spans may take when the server ends.
const FLUSH: Duration = Duration::from_secs(2);

/// Makes spans.
pub(crate) struct Spans {
    tracer: SdkTracer,
    queue: mpsc::Sender<Message>,
}

impl Spans {
    /// Starts the task that sends spans. The collector need not be there yet.
    ///
    /// # Errors
    /// When the endpoint is not an address.
    pub(crate) fn start(config: &OtelConfig, metrics: &Metrics) -> Result<Self, ServerError> {
        let resource = Resource::builder().with_service_name(config.service_name.clone());
        let resource = resource.with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
        let resource = resource.build();
        let mut collector = collector(config)?;
        collector.set_resource(&resource);
        let metrics = Arc::new(metrics.spans());
        let (queue, spans) = mpsc::channel(QUEUE);
        tokio::spawn(Exporter { collector, metrics: metrics.clone() }.run(spans));
        let sampler = Sampler::parent_based(Sampler::TraceIdRatioBased(config.sample_ratio));
        let provider = SdkTracerProvider::builder()
            .with_resource(resource)
            .with_sampler(sampler)
            .with_span_processor(Queue { queue: queue.clone(), metrics })
            .build();
        Ok(Self { tracer: provider.tracer(env!("CARGO_PKG_NAME")), queue })
    }

    /// Makes the spans of a request, if it is recorded. Returns the id of their trace.
    pub(crate) fn record(&self, report: &Report<'_>) -> Option<TraceId> {
        let clock = Clock::now();
        let Instants { arrived, ended, .. } = report.times;
        let parent = report.arrival.origin.parent.map(|parent| context(parent, &report.arrival.origin));
        let parent =
            parent.map_or_else(Context::new, |parent| Context::new().with_remote_span_context(parent));
        // The method of a service that does not have it is any text of a client.
        let known = report.code != Code::Unimplemented;
        let name = if known { report.arrival.method().to_owned() } else { "unknown method".to_owned() };
        let builder = self.tracer.span_builder(name).with_kind(SpanKind::Server);
        let mut span = builder.with_start_time(clock.at(arrived)).start_with_context(&self.tracer, &parent);
        if !span.is_recording() {
            return None;
        }
        describe(&mut span, report);
        let within = Context::new().with_remote_span_context(span.span_context().clone());
        for (stage, from, to) in spans_of(&report.times) {
            let child = self.tracer.span_builder(stage).with_start_time(clock.at(from));
            child.start_with_context(&self.tracer, &within).end_with_timestamp(clock.at(to));
        }
        let trace = u128::from_be_bytes(span.span_context().trace_id().to_bytes());
        span.end_with_timestamp(clock.at(ended));
        Some(TraceId(trace))
    }

    /// Sends what waits, unless that takes too long.
    pub(crate) async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        let flush = async {
            if self.queue.send(Message::Flush(done)).await.is_ok() {
                let _ = flushed.await;
            }
        };
        let _ = timeout(FLUSH, flush).await;
    }
}

/// The address of the collector, to which the first message connects.
fn collector(config: &OtelConfig) -> Result<SpanExporter, ServerError> {
    let wrong = |error: &dyn std::fmt::Display| ServerError::Otel(format!("{}: {error}", config.endpoint));
    let mut endpoint = Endpoint::from_shared(config.endpoint.clone()).map_err(|error| wrong(&error))?;
    if endpoint.uri().scheme_str() == Some("https") {
        let tls = ClientTlsConfig::new().with_enabled_roots();
        endpoint = endpoint.tls_config(tls).map_err(|error| wrong(&error))?;
    }
    // Without these, messages to a collector that vanished would be lost until TCP gives up.
    let endpoint = endpoint.http2_keep_alive_interval(KEEP_ALIVE).keep_alive_timeout(KEEP_ALIVE);
    let channel = endpoint.connect_timeout(SEND).connect_lazy();
    let exporter = SpanExporter::builder().with_tonic().with_channel(channel).with_timeout(SEND);
    exporter.build().map_err(|error| wrong(&error))
}

/// The span of the client.
fn context(parent: TraceParent, origin: &Origin) -> SpanContext {
    let TraceParent { trace, span, sampled } = parent;
    let flags = if sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
    let state = origin.state.iter().filter_map(|state| state.to_str().ok()).collect::<Vec<_>>().join(",");
    let state: TraceState = state.parse().unwrap_or_default();
    SpanContext::new(trace.0.into(), span.into(), flags, true, state)
}

/// Sets the attributes and the status.
fn describe(span: &mut Span, report: &Report<'_>) {
    let (service, method) = report.arrival.method().split_once('/').unwrap_or(("", report.arrival.method()));
    span.set_attributes([
        KeyValue::new("rpc.system", "grpc"),
        KeyValue::new("rpc.service", service.to_owned()),
        KeyValue::new("rpc.method", method.to_owned()),
        KeyValue::new("rpc.grpc.status_code", report.code as i64),
    ]);
    let id = report.arrival.origin.id(report.id);
    if !id.is_empty() {
        span.set_attribute(KeyValue::new("flechette.request_id", id.into_owned()));
    }
    if let Some(model) = report.model {
        span.set_attribute(KeyValue::new("flechette.model", model.to_owned()));
        span.set_attribute(KeyValue::new("flechette.samples", report.samples as i64));
    }
    if let Some(Version(version)) = report.version {
        span.set_attribute(KeyValue::new("flechette.version", version as i64));
    }
    if is_of_server(report.code) {
        span.set_status(Status::error(report.error.unwrap_or_default().to_owned()));
    }
}

/// Whether the conventions of OpenTelemetry count this code as a failure of the server.
fn is_of_server(code: Code) -> bool {
    matches!(
        code,
        Code::Unknown
            | Code::DeadlineExceeded
            | Code::Unimplemented
            | Code::Internal
            | Code::Unavailable
            | Code::DataLoss
    )
}

/// The stages that took time, with their beginnings and ends. The lookups and the dense layers of a batch may
/// alternate, and are shown one after the other.
fn spans_of(times: &Instants) -> impl Iterator<Item = (&'static str, Instant, Instant)> {
    let stages = times.stages();
    let queued = times.steps.map_or(times.ended, |steps| steps.queued);
    let taken = queued + stages.queue;
    let starts = [times.arrived, queued, taken, taken + stages.lookup, taken + stages.lookup + stages.dense];
    let parts = stages.all().into_iter().zip(starts);
    parts.filter(|((_, time), _)| !time.is_zero()).map(|((name, time), start)| (name, start, start + time))
}

/// Translates instants to times of the day.
struct Clock(Instant, SystemTime);

impl Clock {
    fn now() -> Self {
        Self(Instant::now(), SystemTime::now())
    }

    fn at(&self, instant: Instant) -> SystemTime {
        let ago = self.0.checked_duration_since(instant).and_then(|ago| self.1.checked_sub(ago));
        ago.unwrap_or_else(|| self.1 + instant.saturating_duration_since(self.0))
    }
}

/// What the exporter gets.
enum Message {
    Span(Box<SpanData>),
    /// Send all spans before this, and reply.
    Flush(oneshot::Sender<()>),
}

/// The queue's end for spans.
#[derive(Debug)]
struct Queue {
    queue: mpsc::Sender<Message>,
    metrics: Arc<SpanMetrics>,
}

impl SpanProcessor for Queue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if self.queue.try_send(Message::Span(Box::new(span))).is_err() {
            self.metrics.dropped.increment(1);
        }
    }

    /// [`Spans::flush`] does that.
    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// Sends spans to the collector.
struct Exporter {
    collector: SpanExporter,
    metrics: Arc<SpanMetrics>,
}

impl Exporter {
    /// Ends when nothing can send spans any more.
    async fn run(self, mut queue: mpsc::Receiver<Message>) {
        let mut messages = Vec::new();
        while queue.recv_many(&mut messages, BATCH).await > 0 {
            let mut flushed = Vec::new();
            let mut spans = Vec::with_capacity(messages.len());
            for message in messages.drain(..) {
                match message {
                    Message::Span(span) => spans.push(*span),
                    Message::Flush(done) => flushed.push(done),
                }
            }
            self.send(spans).await;
            let wait = flushed.is_empty() && queue.len() < BATCH;
            flushed.into_iter().for_each(|done| _ = done.send(()));
            if wait {
                // More spans gather meanwhile.
                sleep(SEND_EVERY).await;
            }
        }
    }

    async fn send(&self, spans: Vec<SpanData>) {
        let count = spans.len() as u64;
        if count == 0 {
            return;
        }
        let failed = match timeout(SEND, self.collector.export(spans)).await {
            Ok(Ok(())) => return self.metrics.exported.increment(count),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer for {} s", SEND.as_secs()),
        };
        self.metrics.dropped.increment(count);
        tracing::warn!(spans = count, error = failed, "otel.endpoint: spans are dropped");
    }
}
