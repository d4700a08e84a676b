//! The metrics of a process. `series` has the name, the buckets and the help of each.
//!
//! Each [`Metrics`] owns a recorder, so nothing here is global and every test has its own metrics.
//! [`Metrics::model`] registers all series of a model and returns atomics ([`ModelMetrics`]), which the hot
//! path keeps and increments. A series is never removed, so the number of label values is bounded: they are
//! from loaded models and their schemas, and of the labels that clients set, only the first ones have series
//! (`label_names.rs`). Calls that name no loaded model are counted under `NO_MODEL`.
//!
//! The server counts requests. The batcher counts the queue, batches and `predict_seconds`. The engine counts
//! rows (`tables`), `lookup_seconds`, `dense_seconds` and `cache`. Server and engine get the same atomics
//! from [`Metrics::model`].

mod events;
mod label_names;
mod page;
mod register;
mod series;
mod statistics;
mod training;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use metrics::{Counter, Gauge, KeyName, NoopRecorder, Recorder, Unit};
use metrics_exporter_prometheus::{
    BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use metrics_process::Collector;

use crate::schema::{Schema, TableSchema};
use crate::sync::EvenPoisoned;

pub(crate) use events::{Event, EventKind, Events};
use label_names::LabelNames;
pub(crate) use page::Page;
use register::{Series, WithoutGauges, recorded};
use series::{ALL, BUILD_INFO, CERTIFICATE_EXPIRY, MODEL_VERSION, MetricKind, MetricSpec, REQUESTS};
pub(crate) use series::{
    BatchMetrics, CacheMetrics, ConnectionMetrics, DeviceMetrics, LabelMetrics, LearnMetrics, SECONDS,
    ServerMetrics, ShadowMetrics, SpanMetrics, StoreMetrics, SwitchMetrics, TableMetrics, TraceMetrics,
    TrainingMetrics,
};
pub(crate) use statistics::{RunningTotal, Statistics, Total};
pub(crate) use training::{Training, TrainingState};

/// The `model` label of calls that do not name a loaded model.
const NO_MODEL: &str = "(none)";

/// The names of the gRPC status codes, by number.
pub(crate) const CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// The name of a gRPC status code. A number without a name is `UNKNOWN`, as in gRPC.
pub(crate) fn code_name(code: i32) -> &'static str {
    CODES[code_index(code)]
}

fn code_index(code: i32) -> usize {
    usize::try_from(code).ok().filter(|code| *code < CODES.len()).unwrap_or(2)
}

/// The metrics of the process.
pub struct Metrics {
    /// `None`: no series is kept.
    recorder: Option<PrometheusRecorder>,
    page: PrometheusHandle,
    /// Memory, processor time, threads and open files, which are read when the page is requested.
    process: Collector,
    pub(crate) server: ServerMetrics,
    pub(crate) events: Arc<Events>,
    /// Calls that did not name a loaded model.
    pub(crate) no_model: Requests,
    models: Mutex<BTreeMap<String, Arc<ModelMetrics>>>,
    label_names: LabelNames,
    /// The models that are trained in this process.
    trainings: Mutex<BTreeMap<String, Arc<Training>>>,
}

/// Every series of one model. Incrementing one is an atomic operation.
#[allow(missing_docs)] // the help texts say it
pub(crate) struct ModelMetrics {
    pub requests: Requests,
    pub version: Gauge,
    pub batches: BatchMetrics,
    pub switches: SwitchMetrics,
    pub device: DeviceMetrics,
    pub store: StoreMetrics,
    pub cache: CacheMetrics,
    pub trace: TraceMetrics,
    pub learn: LearnMetrics,
    /// In the order of the schema's tables.
    pub(crate) tables: Vec<TableMetrics>,
    /// What KServe's statistics report.
    pub statistics: Statistics,
}

impl ModelMetrics {
    fn new(recorder: &dyn Recorder, name: &str, schema: &Schema) -> Self {
        let model = &[("model", name)];
        let table =
            |table: &TableSchema| TableMetrics::new(recorder, &[("model", name), ("table", &table.name)]);
        Self {
            requests: Requests::new(recorder, name),
            version: Series::register(recorder, MODEL_VERSION.name, model),
            batches: BatchMetrics::new(recorder, model),
            switches: SwitchMetrics::new(recorder, model),
            device: DeviceMetrics::new(recorder, model),
            store: StoreMetrics::new(recorder, model),
            cache: CacheMetrics::new(recorder, model),
            trace: TraceMetrics::new(recorder, model),
            learn: LearnMetrics::new(recorder, model),
            tables: schema.tables.iter().map(table).collect(),
            statistics: Statistics::default(),
        }
    }

    /// Sets the gauges of a model that is no longer loaded.
    fn unloaded(&self) {
        let (cache, device, store) = (&self.cache, &self.device, &self.store);
        let bytes = [&cache.used_bytes, &cache.pool_bytes, &cache.capacity_bytes];
        let entries = [&cache.entries, &cache.entries_max, &cache.pointers];
        let memory = [&device.lost, &device.worker_bytes, &device.pinned_bytes];
        let tables = [&store.ram_bytes, &store.mapped_bytes];
        let switches = [&self.switches.age_seconds, &self.switches.refused_now];
        let others = [&self.version, &self.batches.queue_samples].into_iter().chain(switches);
        for gauge in bytes.into_iter().chain(entries).chain(memory).chain(tables).chain(others) {
            gauge.set(0.0);
        }
        self.switches.freshness_seconds.set(f64::NAN);
    }
}

/// Counters of answered calls, one for each status code.
pub(crate) struct Requests([Counter; CODES.len()]);

impl Requests {
    fn new(recorder: &dyn Recorder, model: &str) -> Self {
        let counter = |code| Series::register(recorder, REQUESTS.name, &[("model", model), ("code", code)]);
        Self(CODES.map(counter))
    }

    /// Counts one answer with this gRPC status code.
    pub(crate) fn count(&self, code: i32) {
        self.0[code_index(code)].increment(1);
    }
}

impl Metrics {
    /// Metrics without any model. All descriptions are registered.
    ///
    /// # Errors
    /// When the exporter refuses the buckets of a histogram.
    pub fn new() -> Result<Self, BuildError> {
        Self::build(true)
    }

    /// Metrics whose series have no effect. Events are kept nevertheless.
    ///
    /// # Errors
    /// As of [`Metrics::new`].
    pub(crate) fn disabled() -> Result<Self, BuildError> {
        Self::build(false)
    }

    fn build(enabled: bool) -> Result<Self, BuildError> {
        let mut builder = PrometheusBuilder::new();
        for MetricSpec { name, kind, .. } in ALL.into_iter().flatten() {
            let Some(buckets) = kind.buckets() else { continue };
            builder = builder.set_buckets_for_metric(Matcher::Full((*name).to_owned()), buckets)?;
        }
        let recorder = builder.build_recorder();
        for MetricSpec { name, kind, help } in ALL.into_iter().flatten() {
            let name = KeyName::from_const_str(name);
            let help = (*help).into();
            match kind {
                MetricKind::Counter => recorder.describe_counter(name, Some(Unit::Count), help),
                MetricKind::Gauge => recorder.describe_gauge(name, None, help),
                MetricKind::Seconds => recorder.describe_histogram(name, Some(Unit::Seconds), help),
                MetricKind::Samples => recorder.describe_histogram(name, Some(Unit::Count), help),
                MetricKind::Differences => recorder.describe_histogram(name, None, help),
            }
        }
        let process = Collector::default();
        metrics::with_local_recorder(&recorder, || process.describe());
        let page = recorder.handle();
        let recorder = enabled.then_some(recorder);
        let series = recorded(recorder.as_ref());
        let server = ServerMetrics::new(series, &[]);
        let version = &[("version", env!("CARGO_PKG_VERSION"))];
        Gauge::register(series, BUILD_INFO.name, version).set(1.0);
        let no_model = Requests::new(series, NO_MODEL);
        let (models, trainings) = <(Mutex<_>, Mutex<_>)>::default();
        let (events, label_names) = <(Arc<_>, LabelNames)>::default();
        Ok(Self { recorder, page, process, server, events, no_model, models, label_names, trainings })
    }

    /// The series of a model. They are registered by the first call; later calls return the same ones.
    pub(crate) fn model(&self, name: &str, schema: &Schema) -> Arc<ModelMetrics> {
        let mut models = self.models.lock().even_poisoned();
        let entry = models.entry(name.to_owned());
        entry.or_insert_with(|| Arc::new(ModelMetrics::new(self.series(), name, schema))).clone()
    }

    /// Metrics of a further engine of a model: the counters and histograms are those of the model, the gauges
    /// are not shown, and the statistics are its own.
    pub(crate) fn secondary(&self, name: &str, schema: &Schema) -> Arc<ModelMetrics> {
        Arc::new(ModelMetrics::new(&WithoutGauges(self.series()), name, schema))
    }

    /// Metrics of an engine that are not shown.
    pub(crate) fn hidden(name: &str, schema: &Schema) -> Arc<ModelMetrics> {
        Arc::new(ModelMetrics::new(&NoopRecorder, name, schema))
    }

    /// The series of a label, which are not shown if the model has had too many. Later calls return the same
    /// ones.
    pub(crate) fn label(&self, model: &str, label: &str) -> LabelMetrics {
        let shown = self.label_names.has_room(model, label);
        let recorder = if shown { self.series() } else { &NoopRecorder };
        LabelMetrics::new(recorder, &[("model", model), ("label", label)])
    }

    /// The series of the shadow of a model. Later calls return the same ones.
    pub(crate) fn shadow(&self, model: &str) -> ShadowMetrics {
        ShadowMetrics::new(self.series(), &[("model", model)])
    }

    /// Ends the series of a model that was unloaded: its counters stay on the page, and its gauges become 0.
    /// If the model is loaded again, its counters go on, with the tables of its new schema.
    pub(crate) fn forget(&self, name: &str) {
        let removed = self.models.lock().even_poisoned().remove(name);
        removed.iter().for_each(|model| model.unloaded());
    }

    /// The series of a training, which runs. They are registered by the first call.
    pub(crate) fn training(&self, model: &str) -> Arc<Training> {
        let mut trainings = self.trainings.lock().even_poisoned();
        let new = || {
            let series = TrainingMetrics::new(self.series(), &[("model", model)]);
            Arc::new(Training::new(model, series, self.events.clone()))
        };
        trainings.entry(model.to_owned()).or_insert_with(new).clone()
    }

    /// The state of a model's training; `None` if it is not trained in this process.
    #[must_use]
    pub(crate) fn training_state(&self, model: &str) -> Option<TrainingState> {
        let trainings = self.trainings.lock().even_poisoned();
        Some(trainings.get(model)?.state())
    }

    /// The series of the connections of a port. Later calls return the same ones.
    pub(crate) fn connections(&self, port: &str) -> ConnectionMetrics {
        ConnectionMetrics::new(self.series(), &[("port", port)])
    }

    /// The counters of spans. Without spans the page does not have these series.
    #[cfg_attr(not(feature = "otel"), allow(dead_code))] // only spans count
    pub(crate) fn spans(&self) -> SpanMetrics {
        SpanMetrics::new(self.series(), &[])
    }

    /// When the server's certificate expires. Without one the page does not have this series.
    pub(crate) fn certificate_expiry(&self) -> Gauge {
        Series::register(self.series(), CERTIFICATE_EXPIRY.name, &[])
    }

    /// All metrics in Prometheus's text format. A recorded value of a histogram takes memory until this is
    /// called, so the server calls it every few seconds. Empty if they are disabled.
    #[must_use]
    pub(crate) fn render(&self) -> String {
        let Some(recorder) = &self.recorder else { return String::new() };
        metrics::with_local_recorder(recorder, || self.process.collect());
        page::arranged(&self.page.render())
    }

    pub(crate) fn are_enabled(&self) -> bool {
        self.recorder.is_some()
    }

    fn series(&self) -> &dyn Recorder {
        recorded(self.recorder.as_ref())
    }
}

#[cfg(test)]
mod tests;
