//! Every metric: name, unit, buckets and help.
//!
//! Each [`Metrics`] owns a recorder, so nothing here is global and every test has its own page.
//! [`Metrics::model`] registers all series of a model and returns atomics ([`ModelMetrics`]), which the hot
//! path keeps and increments. Labels come from loaded models and their schemas, never from clients, so their
//! number is bounded. Calls that name no loaded model are counted under `NO_MODEL`.
//!
//! The server counts requests. The batcher counts the queue, batches and `predict_seconds`. The engine counts
//! rows (`tables`), `lookup_seconds`, `dense_seconds` and `cache`. Server and engine get the same atomics
//! from [`Metrics::model`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder, Unit};
use metrics_exporter_prometheus::{
    BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};

use crate::schema::Schema;

/// The `model` label of calls that do not name a loaded model.
pub(crate) const NO_MODEL: &str = "(none)";

/// The names of the gRPC status codes, by number.
const CODES: [&str; 17] = [
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
    Spec("flechette_model_version", Kind::Gauge, "The version of the model that new batches use.");
const CACHE_HITS: Spec = Spec("flechette_cache_hits_total", Kind::Counter, "Row lookups that hit the cache.");
const CACHE_MISSES: Spec = Spec(
    "flechette_cache_misses_total",
    Kind::Counter,
    "Row lookups that missed the cache and read the store.",
);
const CACHE_EVICTIONS: Spec =
    Spec("flechette_cache_evictions_total", Kind::Counter, "Rows that were evicted from the cache.");
const CACHE_POINTED: Spec = Spec(
    "flechette_cache_pointed_total",
    Kind::Counter,
    "Row lookups that hit a pointer into the store's memory.",
);
const CACHE_COLLISIONS: Spec = Spec(
    "flechette_cache_collisions_total",
    Kind::Counter,
    "Misses that found another row of their table under their key (cache.key_bits).",
);
const CACHE_NOT_ADMITTED: Spec = Spec(
    "flechette_cache_not_admitted_total",
    Kind::Counter,
    "Missed rows that the admission policy did not admit to the cache.",
);
const CACHE_REJECTED: Spec = Spec(
    "flechette_cache_rejected_total",
    Kind::Counter,
    "Missed rows that were not cached because the cache was full until eviction finished.",
);
const ABSENT_IDS: Spec = Spec(
    "flechette_absent_ids_total",
    Kind::Counter,
    "Ids past the end of the table, which took its default.",
);
const TRACE_ACCESSES: Spec =
    Spec("flechette_trace_accesses_total", Kind::Counter, "Sampled accesses that were written to the trace.");
const TRACE_DROPPED: Spec = Spec(
    "flechette_trace_dropped_total",
    Kind::Counter,
    "Sampled accesses that were not written: the buffer was full, or the disk failed.",
);
const CACHE_USED: Spec =
    Spec("flechette_cache_used_bytes", Kind::Gauge, "Bytes of the cache's pool that hold rows.");
const CACHE_CAPACITY: Spec =
    Spec("flechette_cache_capacity_bytes", Kind::Gauge, "Bytes that the cache may use, index and pool.");
const CACHE_ENTRIES: Spec =
    Spec("flechette_cache_entries", Kind::Gauge, "Entries of the cache now: rows and pointers.");
const CACHE_POINTERS: Spec = Spec(
    "flechette_cache_pointers",
    Kind::Gauge,
    "Entries of the cache that are pointers into the store's memory now.",
);
const DEVICE_LOST: Spec = Spec(
    "flechette_device_lost",
    Kind::Gauge,
    "1 after the device has failed: the host computes scores until a restart. 0 otherwise.",
);
const DEVICE_WORKER: Spec = Spec(
    "flechette_device_worker_bytes",
    Kind::Gauge,
    "Device memory of the batches in flight, without the cache; 0 without a device.",
);
const DEVICE_PINNED: Spec = Spec(
    "flechette_device_pinned_bytes",
    Kind::Gauge,
    "Pinned host memory of the batches in flight, including staging buffers; 0 without a device.",
);
const BUILD_INFO: Spec =
    Spec("flechette_build_info", Kind::Gauge, "Always 1; the label is the version of the program.");

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

/// The metrics of the process.
pub struct Metrics {
    recorder: PrometheusRecorder,
    page: PrometheusHandle,
    /// Calls that did not name a loaded model.
    pub(crate) no_model: Requests,
    models: Mutex<BTreeMap<String, Arc<ModelMetrics>>>,
}

/// Every series of one model. Incrementing one is an atomic operation.
#[allow(missing_docs)] // the help texts above say it
pub(crate) struct ModelMetrics {
    pub(crate) requests: Requests,
    pub(crate) request_seconds: Histogram,
    pub(crate) queue_seconds: Histogram,
    pub(crate) predict_seconds: Histogram,
    pub(crate) lookup_seconds: Histogram,
    pub(crate) dense_seconds: Histogram,
    pub(crate) batch_samples: Histogram,
    pub(crate) queue_samples: Gauge,
    pub(crate) version: Gauge,
    pub(crate) device: DeviceMetrics,
    pub(crate) cache: CacheMetrics,
    pub(crate) trace: TraceMetrics,
    /// In the order of the schema's tables.
    pub(crate) tables: Vec<TableMetrics>,
}

/// Counters of a model's recorded trace.
#[allow(missing_docs)]
pub(crate) struct TraceMetrics {
    pub recorded: Counter,
    pub dropped: Counter,
}

/// Series of the cache of a model.
#[allow(missing_docs)]
pub(crate) struct CacheMetrics {
    pub used_bytes: Gauge,
    pub capacity_bytes: Gauge,
    pub entries: Gauge,
    pub pointers: Gauge,
    pub not_admitted: Counter,
    pub rejected: Counter,
}

/// Series of a model on a device.
#[allow(missing_docs)]
pub(crate) struct DeviceMetrics {
    pub lost: Gauge,
    pub worker_bytes: Gauge,
    pub pinned_bytes: Gauge,
}

/// Row counters of one table.
#[allow(missing_docs)]
pub(crate) struct TableMetrics {
    pub hits: Counter,
    pub misses: Counter,
    pub evictions: Counter,
    pub pointed: Counter,
    pub collisions: Counter,
    pub absent: Counter,
}

/// Counters of answered calls, one for each status code.
pub(crate) struct Requests([Counter; CODES.len()]);

impl Requests {
    /// Counts one answer with this gRPC status code.
    pub(crate) fn count(&self, code: i32) {
        self.0[code_index(code)].increment(1);
    }
}

impl Metrics {
    /// An empty page with the descriptions of all metrics.
    ///
    /// # Errors
    /// When the exporter refuses the buckets of a histogram.
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

    /// The series of a model. They are registered by the first call; later calls return the same ones.
    pub(crate) fn model(&self, name: &str, schema: &Schema) -> Arc<ModelMetrics> {
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = models.entry(name.to_owned());
        entry.or_insert_with(|| Arc::new(Register { recorder: &self.recorder }.model(name, schema))).clone()
    }

    /// The page in Prometheus's text format.
    #[must_use]
    pub(crate) fn render(&self) -> String {
        self.page.render()
    }

    /// Adds recorded values to their histograms. Each value takes memory until then, so the server calls this
    /// every few seconds.
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
