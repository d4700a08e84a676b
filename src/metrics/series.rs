//! Every series: its name, its kind and its help.

use metrics::{Counter, Gauge, Histogram, Recorder};

use super::register::{Series, SeriesLabels};

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

/// How a metric is measured. The last three are histograms.
#[derive(Clone, Copy)]
pub(super) enum MetricKind {
    Counter,
    Gauge,
    Seconds,
    Samples,
    Differences,
}

impl MetricKind {
    /// Upper bounds of the buckets; `None` if it is no histogram.
    pub(super) fn buckets(self) -> Option<&'static [f64]> {
        match self {
            Self::Seconds => Some(SECONDS),
            Self::Samples => Some(SAMPLES),
            Self::Differences => Some(DIFFERENCES),
            Self::Counter | Self::Gauge => None,
        }
    }
}

/// The types of the fields, by kind.
type Seconds = Histogram;
type Samples = Histogram;
type Differences = Histogram;

/// What is fixed of a metric.
#[derive(Clone, Copy)]
pub(super) struct MetricSpec {
    pub name: &'static str,
    pub kind: MetricKind,
    pub help: &'static str,
}

pub(super) const REQUESTS: MetricSpec = MetricSpec {
    name: "flechette_requests_total",
    kind: MetricKind::Counter,
    help: "Calls answered, by model and gRPC status code.",
};
pub(super) const MODEL_VERSION: MetricSpec = MetricSpec {
    name: "flechette_serving_version",
    kind: MetricKind::Gauge,
    help: "The version of the model that new batches use.",
};
pub(super) const BUILD_INFO: MetricSpec = MetricSpec {
    name: "flechette_build_info",
    kind: MetricKind::Gauge,
    help: "Always 1; the label is the version of the program.",
};
pub(super) const CERTIFICATE_EXPIRY: MetricSpec = MetricSpec {
    name: "flechette_tls_certificate_expiry_seconds",
    kind: MetricKind::Gauge,
    help: "When the server's certificate expires, in seconds since 1970.",
};

/// All metrics, except those of the process, which have the names that Prometheus gives them.
pub(super) const ALL: [&[MetricSpec]; 15] = [
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
            const SPECS: &'static [MetricSpec] =
                &[$(MetricSpec { name: $name, kind: MetricKind::$kind, help: $help }),+];

            pub(super) fn new(recorder: &dyn Recorder, labels: SeriesLabels) -> Self {
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
        "Connections that were closed at once, because the port had reached its maximum.";
    handshakes_failed: Counter, "flechette_tls_handshakes_failed_total",
        "TLS handshakes that failed, for example because the client does not trust the certificate, and \
         those that began on a port without TLS; but not clients that only closed.";
    overdue: Counter, "flechette_connections_overdue_total",
        "gRPC connections that were closed because of server.handshake_seconds or server.write_seconds.";
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
    queue_samples: Gauge, "flechette_queue_samples",
        "Samples that wait now for the version that stable names.";
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
        "Time to switch to an opened version, including the wait for batches of the old one.";
    carried: Counter, "flechette_switch_rows_carried_total",
        "Cached rows that a new version changed and that stayed cached, with their new values.";
    dropped: Counter, "flechette_switch_rows_dropped_total",
        "Cached rows that a new version changed and that were removed from the cache.";
    age_seconds: Gauge, "flechette_serving_version_age_seconds", "Time since the served version was loaded.";
    freshness_seconds: Gauge, "flechette_freshness_seconds",
        "Time since the last batch that the served version was trained on; NaN if the version does not \
         say, 0 if that is later than now by the clock of this machine.";
}

series! {
    /// Series of a label of a model.
    LabelMetrics:
    requests: Counter, "flechette_label_requests_total",
        "Requests that a label's version was asked to score: because they named the label, or because they \
         named neither a version nor a label.";
    failures: Counter, "flechette_label_failures_total",
        "Requests that a label's version was asked to score, and that were refused because of load after \
         they were decoded, or were queued and got no scores.";
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
        "How long the next step waited for the cut of a version, without the time in which the pipeline \
         fills again.";
    publish_bytes: Counter, "flechette_publish_bytes_total", "Bytes of the versions that were published.";
    publish_rows: Counter, "flechette_publish_rows_total", "Rows of the versions that were published.";
}

series! {
    /// Counters of a model's access trace.
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
        "Samples of valid Learn calls that were refused or failed, or that clients gave up after a second.";
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
    pool_bytes: Gauge, "flechette_cache_pool_bytes", "Bytes of the cache's pool, which holds rows.";
    capacity_bytes: Gauge, "flechette_cache_capacity_bytes",
        "Bytes that the cache may use, index and pool.";
    entries: Gauge, "flechette_cache_entries", "Entries of the cache now: rows and pointers.";
    entries_max: Gauge, "flechette_cache_entries_max",
        "Entries of the cache above which eviction begins at the latest: 0.8 of the slots of its index.";
    pointers: Gauge, "flechette_cache_pointers",
        "Entries of the cache that are pointers into the store's memory now.";
    inserted: Counter, "flechette_cache_inserted_total", "Rows that were put into the cache.";
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
