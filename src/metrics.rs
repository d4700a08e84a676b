//! Every metric: name, unit, buckets and help.
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
mod statistics;
mod training;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use metrics::{Counter, Gauge, Histogram, KeyName, NoopRecorder, Recorder, Unit};
use metrics_exporter_prometheus::{
    BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use metrics_process::Collector;

use crate::schema::{Schema, Table};
use crate::sync::EvenPoisoned;

pub(crate) use events::{Event, EventKind, Events};
use label_names::LabelNames;
pub(crate) use page::Page;
use register::{Labels, Series, WithoutGauges, recorded};
pub(crate) use statistics::{RunningTotal, Statistics, Total};
pub(crate) use training::{Training, TrainingState};

/// The `model` label of calls that do not name a loaded model.
pub(crate) const NO_MODEL: &str = "(none)";

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

/// Upper bounds, in seconds, of the buckets of every duration histogram.
pub(crate) const SECONDS: &[f64] = &[
    0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    10.0,
];

/// Upper bounds of the buckets of the batch-size histogram.
const SAMPLES: &[f64] =
    &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0];

/// Upper bounds of the buckets of differences between two probabilities.
const DIFFERENCES: &[f64] = &[1e-6, 1e-5, 1e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];

#[derive(Clone, Copy)]
enum Kind {
    Counter,
    Gauge,
    Seconds,
    Samples,
    Differences,
}

/// The types of the fields, by kind.
type Seconds = Histogram;
type Samples = Histogram;
type Differences = Histogram;

/// One metric's name, kind and help.
#[derive(Clone, Copy)]
struct Spec(&'static str, Kind, &'static str);

const REQUESTS: Spec =
    Spec("flechette_requests_total", Kind::Counter, "Calls answered, by model and gRPC status code.");
const MODEL_VERSION: Spec =
    Spec("flechette_serving_version", Kind::Gauge, "The version of the model that new batches use.");
const BUILD_INFO: Spec =
    Spec("flechette_build_info", Kind::Gauge, "Always 1; the label is the version of the program.");
const CERTIFICATE_EXPIRY: Spec = Spec(
    "flechette_tls_certificate_expiry_seconds",
    Kind::Gauge,
    "When the server's certificate expires, in seconds since 1970.",
);

/// All metrics, except those of the process, which have the names that Prometheus gives them.
const ALL: [&[Spec]; 15] = [
    &[REQUESTS, MODEL_VERSION, BUILD_INFO, CERTIFICATE_EXPIRY],
    ServerMetrics::SPECS,
    ConnectionMetrics::SPECS,
    SpanMetrics::SPECS,
    BatchMetrics::SPECS,
    SwitchMetrics::SPECS,
    LabelMetrics::SPECS,
    ShadowMetrics::SPECS,
    TrainingMetrics::SPECS,
    TraceMetrics::SPECS,
    LearnMetrics::SPECS,
    StoreMetrics::SPECS,
    CacheMetrics::SPECS,
    DeviceMetrics::SPECS,
    TableMetrics::SPECS,
];

/// Defines series with the same labels: a field, a kind, a name and a help text for each.
macro_rules! series {
    ($(#[$doc:meta])* $group:ident: $($field:ident: $kind:ident, $name:literal, $help:literal;)+) => {
        $(#[$doc])*
        #[allow(missing_docs)] // the help texts say it
        pub(crate) struct $group {
            $(pub $field: $kind,)+
        }

        impl $group {
            const SPECS: &'static [Spec] = &[$(Spec($name, Kind::$kind, $help)),+];

            fn new(recorder: &dyn Recorder, labels: Labels) -> Self {
                Self { $($field: Series::register(recorder, $name, labels)),+ }
            }
        }
    };
}

series! {
    /// Series of the whole server.
    ServerMetrics:
    ready: Gauge, "flechette_ready", "1 if /readyz answers 200, otherwise 0.";
    not_served: Gauge, "flechette_models_not_served",
        "Models of the directory that could not be loaded; the log and /readyz say why.";
    places: Gauge, "flechette_places_taken",
        "Calls that are computed and open streams; server.max_requests limits them.";
    in_flight: Gauge, "flechette_calls_in_flight",
        "Calls from their headers until their answer has left; twice server.max_requests limits them.";
    in_flight_bytes: Gauge, "flechette_in_flight_bytes",
        "Memory of messages and answers of calls in flight; server.max_inflight_bytes limits it.";
}

series! {
    /// Series of the connections of a port.
    ConnectionMetrics:
    open: Gauge, "flechette_connections", "Open connections, by port.";
    most: Gauge, "flechette_connections_max",
        "Most open connections of a port: server.max_connections, or fewer if few files may be open.";
    refused: Counter, "flechette_connections_refused_total",
        "Connections that were closed at once, because the port had its most.";
}

series! {
    /// Counters of spans for a collector of OpenTelemetry. A request has several.
    #[derive(Debug)]
    #[cfg_attr(not(feature = "otel"), allow(dead_code))] // only spans count
    SpanMetrics:
    exported: Counter, "flechette_spans_exported_total",
        "Spans that the collector (otel.endpoint) has taken.";
    dropped: Counter, "flechette_spans_dropped_total",
        "Spans that were dropped, because the collector did not take them or the queue was full.";
}

series! {
    /// Series of a model's batches.
    BatchMetrics:
    request_seconds: Seconds, "flechette_request_seconds",
        "Time from a decoded request for scores, of either protocol, to its answer.";
    queue_seconds: Seconds, "flechette_queue_seconds", "Time a request waited for a worker.";
    predict_seconds: Seconds, "flechette_predict_seconds", "Time the model took for one merged batch.";
    lookup_seconds: Seconds, "flechette_lookup_seconds",
        "Thread-seconds of the embedding lookup of one batch, summed over the threads that shared it.";
    dense_seconds: Seconds, "flechette_dense_seconds",
        "Thread-seconds of the dense layers of one batch, summed over the threads that shared it.";
    batch_samples: Samples, "flechette_batch_samples", "Samples in one merged batch.";
    queue_samples: Gauge, "flechette_queue_samples", "Samples that wait for a worker now.";
    panics: Counter, "flechette_batch_panics_total",
        "Panics of the model or of the batcher. The requests concerned got an error, or were computed again.";
}

series! {
    /// Series of the versions that a running model takes over.
    SwitchMetrics:
    done: Counter, "flechette_switches_total", "New versions that were taken over while serving.";
    refused: Counter, "flechette_switches_refused_total",
        "New versions that were refused while serving, because they are damaged or do not fit.";
    refused_now: Gauge, "flechette_newer_versions_refused",
        "Refused versions that are newer than the latest one that could be loaded.";
    seconds: Seconds, "flechette_switch_seconds",
        "Time to take over an opened version, including the wait for batches of the old one.";
    carried: Counter, "flechette_switch_rows_carried_total",
        "Cached rows that a new version changed and that stayed cached, with their new values.";
    dropped: Counter, "flechette_switch_rows_dropped_total",
        "Cached rows that a new version changed and that were removed from the cache.";
    age_seconds: Gauge, "flechette_serving_version_age_seconds", "Time since the served version was loaded.";
    freshness_seconds: Gauge, "flechette_freshness_seconds",
        "Time since the last batch that the served version was trained on; NaN if the version does not say.";
}

series! {
    /// Series of a label of a model.
    LabelMetrics:
    requests: Counter, "flechette_label_requests_total",
        "Requests that a label's version was asked to score: because they named the label, or because they \
         named neither a version nor a label.";
    failures: Counter, "flechette_label_failures_total",
        "Such requests that were refused because of load, or that were queued and got no scores.";
    seconds: Seconds, "flechette_label_request_seconds",
        "Time from a decoded request for a label's version to its scores.";
    version: Gauge, "flechette_label_version",
        "The version that a label names; 0 if it is not loaded. Of each model, stable, canary and the first \
         64 other names have series.";
}

series! {
    /// Series of the version that scores requests of a model a second time.
    ShadowMetrics:
    difference: Differences, "flechette_shadow_difference",
        "Absolute difference between the probability of a sample and that of the shadow.";
    largest: Gauge, "flechette_shadow_difference_max", "The largest of these differences.";
    dropped: Counter, "flechette_shadow_dropped_total",
        "Requests that the shadow should have scored too, but did not, because its queue was full.";
    failed: Counter, "flechette_shadow_failed_total", "Requests that the shadow could not score.";
}

series! {
    /// Series of a model that is trained in this process.
    TrainingMetrics:
    state: Gauge, "flechette_training_state",
        "1: training runs. 0: training has ended. -1: training has failed.";
    steps: Counter, "flechette_training_steps_total", "Steps that were trained in this process.";
    samples: Counter, "flechette_training_samples_total", "Samples that were trained in this process.";
    auc: Gauge, "flechette_progressive_auc",
        "AUC of the last samples (--window) before they were trained, at most about 5 seconds ago.";
    log_loss: Gauge, "flechette_progressive_log_loss", "Log loss of the same samples.";
    calibration: Gauge, "flechette_progressive_calibration",
        "Sum of the probabilities of the same samples divided by their clicks.";
    published: Counter, "flechette_publishes_total", "Versions that were published.";
    not_published: Counter, "flechette_publishes_failed_total",
        "Versions that could not be written, or that --publish-gate refused.";
    publish_seconds: Seconds, "flechette_publish_seconds", "Time from the cut of a version to its last byte.";
    pause_seconds: Seconds, "flechette_publish_pause_seconds",
        "The longest time that a step waited for the cut of a version, but not for a pipeline to fill again.";
    publish_bytes: Counter, "flechette_publish_bytes_total", "Bytes of the versions that were published.";
    publish_rows: Counter, "flechette_publish_rows_total", "Rows of the versions that were published.";
}

series! {
    /// Counters of a model's recorded trace.
    TraceMetrics:
    recorded: Counter, "flechette_trace_accesses_total", "Sampled accesses that were written to the trace.";
    dropped: Counter, "flechette_trace_dropped_total",
        "Sampled accesses that were not written, because the buffer was full or the disk failed.";
}

series! {
    /// Series of a model's log of learned samples.
    LearnMetrics:
    samples: Counter, "flechette_learn_samples_total", "Samples of Learn calls that were made durable.";
    refused: Counter, "flechette_learn_refused_total",
        "Samples of Learn calls that were refused or failed: no room, or the disk failed or was too slow.";
    bytes: Gauge, "flechette_learn_bytes", "Bytes of the log of learned samples, at most 5 seconds ago.";
    sync_seconds: Seconds, "flechette_learn_sync_seconds",
        "Time to write and sync the samples of the Learn calls that waited together.";
}

series! {
    /// Series of the tables of a model's served version.
    StoreMetrics:
    ram_bytes: Gauge, "flechette_store_ram_bytes",
        "Bytes of the served version's rows in memory of the process (store.memory).";
    mapped_bytes: Gauge, "flechette_store_mapped_bytes",
        "Bytes of the served version's rows in mapped files (store.memory).";
}

series! {
    /// Series of the cache of a model.
    CacheMetrics:
    used_bytes: Gauge, "flechette_cache_used_bytes", "Bytes of the cache's pool that hold rows.";
    capacity_bytes: Gauge, "flechette_cache_capacity_bytes",
        "Bytes that the cache may use, index and pool.";
    entries: Gauge, "flechette_cache_entries", "Entries of the cache now: rows and pointers.";
    pointers: Gauge, "flechette_cache_pointers",
        "Entries of the cache that are pointers into the store's memory now.";
    not_admitted: Counter, "flechette_cache_not_admitted_total",
        "Missed rows that the admission policy did not admit to the cache.";
    rejected: Counter, "flechette_cache_rejected_total",
        "Missed rows that were not cached, because eviction had not yet made room.";
}

series! {
    /// Series of a model on a device.
    DeviceMetrics:
    lost: Gauge, "flechette_device_lost",
        "1 after the device has failed: the host computes scores until a restart. 0 otherwise.";
    worker_bytes: Gauge, "flechette_device_worker_bytes",
        "Device memory of the batches in flight, without the cache; 0 without a device.";
    pinned_bytes: Gauge, "flechette_device_pinned_bytes",
        "Pinned host memory of the batches in flight, including staging buffers; 0 without a device.";
}

series! {
    /// Counters of one table's row lookups.
    TableMetrics:
    hits: Counter, "flechette_cache_hits_total", "Row lookups that hit the cache.";
    misses: Counter, "flechette_cache_misses_total",
        "Row lookups that missed the cache and read the store.";
    evictions: Counter, "flechette_cache_evictions_total", "Rows that were evicted from the cache.";
    pointed: Counter, "flechette_cache_pointed_total",
        "Row lookups that hit a pointer into the store's memory.";
    collisions: Counter, "flechette_cache_collisions_total",
        "Misses because another row of the table has the same index key (cache.key_bits).";
    absent: Counter, "flechette_absent_ids_total",
        "Ids that the table does not hold, so its default was used.";
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
        let table = |table: &Table| TableMetrics::new(recorder, &[("model", name), ("table", &table.name)]);
        Self {
            requests: Requests::new(recorder, name),
            version: Series::register(recorder, MODEL_VERSION.0, model),
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
        let sizes = [&cache.used_bytes, &cache.capacity_bytes, &cache.entries, &cache.pointers];
        let memory = [&device.lost, &device.worker_bytes, &device.pinned_bytes];
        let tables = [&store.ram_bytes, &store.mapped_bytes];
        let switches = [&self.switches.age_seconds, &self.switches.refused_now];
        let others = [&self.version, &self.batches.queue_samples].into_iter().chain(switches);
        for gauge in sizes.into_iter().chain(memory).chain(tables).chain(others) {
            gauge.set(0.0);
        }
        self.switches.freshness_seconds.set(f64::NAN);
    }
}

/// Counters of answered calls, one for each status code.
pub(crate) struct Requests([Counter; CODES.len()]);

impl Requests {
    fn new(recorder: &dyn Recorder, model: &str) -> Self {
        let counter = |code| Series::register(recorder, REQUESTS.0, &[("model", model), ("code", code)]);
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
        for Spec(name, kind, _) in ALL.into_iter().flatten() {
            let buckets = match kind {
                Kind::Seconds => SECONDS,
                Kind::Samples => SAMPLES,
                Kind::Differences => DIFFERENCES,
                Kind::Counter | Kind::Gauge => continue,
            };
            builder = builder.set_buckets_for_metric(Matcher::Full((*name).to_owned()), buckets)?;
        }
        let recorder = builder.build_recorder();
        for Spec(name, kind, help) in ALL.into_iter().flatten() {
            let name = KeyName::from_const_str(name);
            let help = (*help).into();
            match kind {
                Kind::Counter => recorder.describe_counter(name, Some(Unit::Count), help),
                Kind::Gauge => recorder.describe_gauge(name, None, help),
                Kind::Seconds => recorder.describe_histogram(name, Some(Unit::Seconds), help),
                Kind::Samples => recorder.describe_histogram(name, Some(Unit::Count), help),
                Kind::Differences => recorder.describe_histogram(name, None, help),
            }
        }
        let process = Collector::default();
        metrics::with_local_recorder(&recorder, || process.describe());
        let page = recorder.handle();
        let recorder = enabled.then_some(recorder);
        let series = recorded(recorder.as_ref());
        let server = ServerMetrics::new(series, &[]);
        let version = &[("version", env!("CARGO_PKG_VERSION"))];
        Gauge::register(series, BUILD_INFO.0, version).set(1.0);
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
        Series::register(self.series(), CERTIFICATE_EXPIRY.0, &[])
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
