//! Every metric: its name, unit, buckets and help, in one struct.
//!
//! A [`Metrics`] owns a recorder of its own, so nothing here is global and every test has its
//! own page. A name is looked up once: [`Metrics::model`] registers all series of a model and
//! hands out plain atomics, [`ModelMetrics`], which the hot path holds and increments. Labels
//! come from loaded models and their schemas only, never from a client, so the label sets are
//! bounded; calls that name no loaded model are counted under [`NO_MODEL`].
//!
//! Who counts what: the server counts requests; the batcher counts the queue, batches and
//! `predict_seconds`; the engine counts rows (`tables`), `lookup_seconds`, `dense_seconds` and
//! `cache`. The engine and the server each ask [`Metrics::model`] and get the same handles.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder, Unit};
use metrics_exporter_prometheus::{
    BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};

use crate::schema::Schema;

/// The `model` label of calls that name no loaded model.
pub(crate) const NO_MODEL: &str = "(none)";

/// The `code` label of each gRPC status code, by its number.
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

/// Upper bounds in seconds of every duration histogram.
const SECONDS: &[f64] = &[
    0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    10.0,
];

/// Upper bounds of the batch-size histogram.
const SAMPLES: &[f64] =
    &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0];

#[derive(Clone, Copy)]
enum Kind {
    Counter,
    Gauge,
    Seconds,
    Samples,
}

/// One metric's name, kind and help.
struct Spec(&'static str, Kind, &'static str);

const REQUESTS: Spec =
    Spec("flechette_requests_total", Kind::Counter, "Ctr calls answered, by model and gRPC status code.");
const REQUEST_SECONDS: Spec =
    Spec("flechette_request_seconds", Kind::Seconds, "Time from a decoded Predict request to its answer.");
const QUEUE_SECONDS: Spec =
    Spec("flechette_queue_seconds", Kind::Seconds, "Time a request waited for a worker.");
const PREDICT_SECONDS: Spec =
    Spec("flechette_predict_seconds", Kind::Seconds, "Time the model took for one merged batch.");
const LOOKUP_SECONDS: Spec = Spec(
    "flechette_lookup_seconds",
    Kind::Seconds,
    "Thread-seconds of the embedding lookup of one batch, summed over the threads that shared it.",
);
const DENSE_SECONDS: Spec = Spec(
    "flechette_dense_seconds",
    Kind::Seconds,
    "Thread-seconds of the dense layers of one batch, summed over the threads that shared it.",
);
const BATCH_SAMPLES: Spec = Spec("flechette_batch_samples", Kind::Samples, "Samples in one merged batch.");
const QUEUE_SAMPLES: Spec =
    Spec("flechette_queue_samples", Kind::Gauge, "Samples that wait for a worker now.");
const MODEL_VERSION: Spec =
    Spec("flechette_model_version", Kind::Gauge, "The version of the model that scores now.");
const CACHE_HITS: Spec =
    Spec("flechette_cache_hits_total", Kind::Counter, "Row lookups that the cache answered.");
const CACHE_MISSES: Spec =
    Spec("flechette_cache_misses_total", Kind::Counter, "Row lookups that went to the store.");
const CACHE_EVICTIONS: Spec =
    Spec("flechette_cache_evictions_total", Kind::Counter, "Rows that left the cache to make room.");
const CACHE_POINTED: Spec = Spec(
    "flechette_cache_pointed_total",
    Kind::Counter,
    "Row lookups that the cache answered with a pointer into the store's memory.",
);
const CACHE_COLLISIONS: Spec = Spec(
    "flechette_cache_collisions_total",
    Kind::Counter,
    "Misses that found another row of their table under their key (cache.key_bits).",
);
const CACHE_NOT_ADMITTED: Spec = Spec(
    "flechette_cache_not_admitted_total",
    Kind::Counter,
    "Missed rows that the admission policy did not let into the cache.",
);
const CACHE_REJECTED: Spec = Spec(
    "flechette_cache_rejected_total",
    Kind::Counter,
    "Missed rows that found no room in the cache until eviction had made some.",
);
const ABSENT_IDS: Spec = Spec(
    "flechette_absent_ids_total",
    Kind::Counter,
    "Ids that the table does not hold and that took its default.",
);
const TRACE_ACCESSES: Spec =
    Spec("flechette_trace_accesses_total", Kind::Counter, "Sampled accesses that were written to the trace.");
const TRACE_DROPPED: Spec = Spec(
    "flechette_trace_dropped_total",
    Kind::Counter,
    "Sampled accesses that were not written: too much waited, or the disk failed.",
);
const CACHE_USED: Spec =
    Spec("flechette_cache_used_bytes", Kind::Gauge, "Bytes of the cache's pool that hold rows.");
const CACHE_CAPACITY: Spec =
    Spec("flechette_cache_capacity_bytes", Kind::Gauge, "Bytes that the cache may take, index and pool.");
const CACHE_ENTRIES: Spec =
    Spec("flechette_cache_entries", Kind::Gauge, "Entries of the cache now: rows in it, and pointers.");
const CACHE_POINTERS: Spec = Spec(
    "flechette_cache_pointers",
    Kind::Gauge,
    "Of the cache's entries, those that point into the store's memory now.",
);
const DEVICE_LOST: Spec = Spec(
    "flechette_device_lost",
    Kind::Gauge,
    "1 once the device has failed: scores then come from the host until a restart. 0 before, and without a device.",
);
const DEVICE_WORKER: Spec = Spec(
    "flechette_device_worker_bytes",
    Kind::Gauge,
    "Memory of the device that batches under way have, beside the cache; 0 without a device.",
);
const DEVICE_PINNED: Spec = Spec(
    "flechette_device_pinned_bytes",
    Kind::Gauge,
    "Pinned memory of the host that batches under way have, staging included; 0 without a device.",
);
const BUILD_INFO: Spec = Spec("flechette_build_info", Kind::Gauge, "Always 1; the labels say which build.");

const ALL: [&Spec; 27] = [
    &REQUESTS,
    &REQUEST_SECONDS,
    &QUEUE_SECONDS,
    &PREDICT_SECONDS,
    &LOOKUP_SECONDS,
    &DENSE_SECONDS,
    &BATCH_SAMPLES,
    &QUEUE_SAMPLES,
    &MODEL_VERSION,
    &CACHE_HITS,
    &CACHE_MISSES,
    &CACHE_EVICTIONS,
    &CACHE_POINTED,
    &CACHE_COLLISIONS,
    &CACHE_NOT_ADMITTED,
    &CACHE_REJECTED,
    &ABSENT_IDS,
    &TRACE_ACCESSES,
    &TRACE_DROPPED,
    &CACHE_USED,
    &CACHE_CAPACITY,
    &CACHE_ENTRIES,
    &CACHE_POINTERS,
    &DEVICE_LOST,
    &DEVICE_WORKER,
    &DEVICE_PINNED,
    &BUILD_INFO,
];

/// The process's metrics: one page, the models on it, and the calls that belong to none.
pub struct Metrics {
    recorder: PrometheusRecorder,
    page: PrometheusHandle,
    /// Calls that named no loaded model.
    pub no_model: Requests,
    models: Mutex<BTreeMap<String, Arc<ModelMetrics>>>,
}

/// Every series of one model, registered. Incrementing one is an atomic operation.
pub struct ModelMetrics {
    /// Answered calls by status code.
    pub requests: Requests,
    /// Seconds from a decoded request to its answer.
    pub request_seconds: Histogram,
    /// Seconds a request waited for a worker.
    pub queue_seconds: Histogram,
    /// Seconds of one call of the model on a merged batch.
    pub predict_seconds: Histogram,
    /// Thread-seconds of the embedding lookup of one batch, summed over its threads.
    pub lookup_seconds: Histogram,
    /// Thread-seconds of the dense layers of one batch, summed over its threads.
    pub dense_seconds: Histogram,
    /// Samples of one merged batch.
    pub batch_samples: Histogram,
    /// Samples that wait now.
    pub queue_samples: Gauge,
    /// The version that scores now.
    pub version: Gauge,
    /// The device, where the cache lies on one.
    pub device: DeviceMetrics,
    /// The cache as a whole.
    pub cache: CacheMetrics,
    /// The recording of its accesses.
    pub trace: TraceMetrics,
    /// One a table, at `TableId::index`.
    pub tables: Vec<TableMetrics>,
}

/// Counters of a model's recorded trace.
pub struct TraceMetrics {
    /// Accesses that were written.
    pub recorded: Counter,
    /// Accesses that were sampled and not written.
    pub dropped: Counter,
}

/// The cache of one model as a whole.
pub struct CacheMetrics {
    /// Bytes of the pool that hold rows.
    pub used_bytes: Gauge,
    /// Bytes that index and pool may take; 0 with the cache off.
    pub capacity_bytes: Gauge,
    /// Rows in the cache, and pointers.
    pub entries: Gauge,
    /// Of these the pointers.
    pub pointers: Gauge,
    /// Missed rows that the admission policy did not let in.
    pub not_admitted: Counter,
    /// Missed rows that found no room.
    pub rejected: Counter,
}

/// A model's part of a device.
pub struct DeviceMetrics {
    /// Whether the device has failed.
    pub lost: Gauge,
    /// Memory of the device beside the cache.
    pub worker_bytes: Gauge,
    /// Pinned memory of the host.
    pub pinned_bytes: Gauge,
}

/// Row counters of one table.
pub struct TableMetrics {
    /// Lookups answered by the cache.
    pub hits: Counter,
    /// Lookups that went to the store.
    pub misses: Counter,
    /// Rows that left the cache.
    pub evictions: Counter,
    /// Lookups answered by a pointer into the store's memory.
    pub pointed: Counter,
    /// Of the misses, those whose key another row had.
    pub collisions: Counter,
    /// Ids that took the table's default.
    pub absent: Counter,
}

/// Counters of answered calls, one a status code.
pub struct Requests([Counter; CODES.len()]);

impl Requests {
    /// Counts one answer; `code` is the gRPC number, and a number past the last is `UNKNOWN`.
    pub(crate) fn count(&self, code: i32) {
        let known = usize::try_from(code).ok().and_then(|code| self.0.get(code));
        known.unwrap_or(&self.0[2]).increment(1);
    }
}

impl Metrics {
    /// An empty page with every metric described.
    ///
    /// # Errors
    /// [`BuildError`] from the exporter when a histogram has no buckets.
    pub fn new() -> Result<Self, BuildError> {
        let mut builder = PrometheusBuilder::new();
        for Spec(name, kind, _) in ALL {
            let buckets = match kind {
                Kind::Seconds => SECONDS,
                Kind::Samples => SAMPLES,
                Kind::Counter | Kind::Gauge => continue,
            };
            builder = builder.set_buckets_for_metric(Matcher::Full((*name).to_owned()), buckets)?;
        }
        let recorder = builder.build_recorder();
        for Spec(name, kind, help) in ALL {
            let name = KeyName::from_const_str(name);
            let help = (*help).into();
            match kind {
                Kind::Counter => recorder.describe_counter(name, Some(Unit::Count), help),
                Kind::Gauge => recorder.describe_gauge(name, None, help),
                Kind::Seconds => recorder.describe_histogram(name, Some(Unit::Seconds), help),
                Kind::Samples => recorder.describe_histogram(name, Some(Unit::Count), help),
            }
        }
        let page = recorder.handle();
        let register = Register { recorder: &recorder };
        register.gauge(&BUILD_INFO, &[("version", env!("CARGO_PKG_VERSION"))]).set(1.0);
        let no_model = register.requests(NO_MODEL);
        Ok(Self { recorder, page, no_model, models: Mutex::default() })
    }

    /// The series of a model: registered the first time, the same handles ever after.
    pub fn model(&self, name: &str, schema: &Schema) -> Arc<ModelMetrics> {
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = models.entry(name.to_owned());
        entry.or_insert_with(|| Arc::new(Register { recorder: &self.recorder }.model(name, schema))).clone()
    }

    /// The page in Prometheus's text format.
    #[must_use]
    pub(crate) fn render(&self) -> String {
        self.page.render()
    }

    /// Folds recorded durations into their buckets. Between two calls every recorded value takes
    /// memory, so somebody must call this every few seconds: the server does.
    pub(crate) fn fold(&self) {
        self.page.run_upkeep();
    }
}

/// Registers series with the recorder.
struct Register<'a> {
    recorder: &'a PrometheusRecorder,
}

impl Register<'_> {
    fn model(&self, name: &str, schema: &Schema) -> ModelMetrics {
        let model = [("model", name)];
        ModelMetrics {
            requests: self.requests(name),
            request_seconds: self.histogram(&REQUEST_SECONDS, &model),
            queue_seconds: self.histogram(&QUEUE_SECONDS, &model),
            predict_seconds: self.histogram(&PREDICT_SECONDS, &model),
            lookup_seconds: self.histogram(&LOOKUP_SECONDS, &model),
            dense_seconds: self.histogram(&DENSE_SECONDS, &model),
            batch_samples: self.histogram(&BATCH_SAMPLES, &model),
            queue_samples: self.gauge(&QUEUE_SAMPLES, &model),
            version: self.gauge(&MODEL_VERSION, &model),
            device: DeviceMetrics {
                lost: self.gauge(&DEVICE_LOST, &model),
                worker_bytes: self.gauge(&DEVICE_WORKER, &model),
                pinned_bytes: self.gauge(&DEVICE_PINNED, &model),
            },
            cache: CacheMetrics {
                used_bytes: self.gauge(&CACHE_USED, &model),
                capacity_bytes: self.gauge(&CACHE_CAPACITY, &model),
                entries: self.gauge(&CACHE_ENTRIES, &model),
                pointers: self.gauge(&CACHE_POINTERS, &model),
                not_admitted: self.counter(&CACHE_NOT_ADMITTED, &model),
                rejected: self.counter(&CACHE_REJECTED, &model),
            },
            trace: TraceMetrics {
                recorded: self.counter(&TRACE_ACCESSES, &model),
                dropped: self.counter(&TRACE_DROPPED, &model),
            },
            tables: schema.tables.iter().map(|table| self.table(name, &table.name)).collect(),
        }
    }

    fn table(&self, model: &str, table: &str) -> TableMetrics {
        let labels = [("model", model), ("table", table)];
        TableMetrics {
            hits: self.counter(&CACHE_HITS, &labels),
            misses: self.counter(&CACHE_MISSES, &labels),
            evictions: self.counter(&CACHE_EVICTIONS, &labels),
            pointed: self.counter(&CACHE_POINTED, &labels),
            collisions: self.counter(&CACHE_COLLISIONS, &labels),
            absent: self.counter(&ABSENT_IDS, &labels),
        }
    }

    fn requests(&self, model: &str) -> Requests {
        Requests(CODES.map(|code| self.counter(&REQUESTS, &[("model", model), ("code", code)])))
    }

    fn counter(&self, spec: &Spec, labels: &[(&'static str, &str)]) -> Counter {
        self.recorder.register_counter(&key(spec, labels), &METADATA)
    }

    fn gauge(&self, spec: &Spec, labels: &[(&'static str, &str)]) -> Gauge {
        self.recorder.register_gauge(&key(spec, labels), &METADATA)
    }

    fn histogram(&self, spec: &Spec, labels: &[(&'static str, &str)]) -> Histogram {
        self.recorder.register_histogram(&key(spec, labels), &METADATA)
    }
}

static METADATA: Metadata<'static> = Metadata::new(module_path!(), Level::INFO, Some(module_path!()));

fn key(spec: &Spec, labels: &[(&'static str, &str)]) -> Key {
    let labels: Vec<Label> =
        labels.iter().map(|(name, value)| Label::new(*name, (*value).to_owned())).collect();
    Key::from_parts(spec.0, labels)
}

#[cfg(test)]
mod tests;
