//! The smaller sections: their values, and how they are read.

use std::path::PathBuf;
use std::time::Duration;

use tracing_subscriber::filter::{LevelFilter, Targets};

use super::layers::Layers;
use super::security::SWITCH;
use super::values::{BYTES_FORM, GIB, MIB, parse_bytes};
use super::{ConfigError, NO_OTEL, ServerConfig};

/// The least bytes of a file of learned samples, and how many files the log must have room for.
const LEAST_SEGMENT: u64 = 64 << 10;
const LEARN_SEGMENTS: u64 = 4;

/// Most bytes of a batch for each byte of its message: an id of one byte takes 8 bytes, and an offset 4.
const BATCH_GROWTH: u64 = 12;

/// Section `log`.
#[allow(missing_docs)] // settings/ has the meaning of each key
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogConfig {
    pub level: String,
    pub format: LogFormat,
    /// `None`: no request is slow.
    pub slow: Option<Duration>,
}

/// Section `otel`.
#[allow(missing_docs)] // settings/ has the meaning of each key
#[derive(Clone, Debug, PartialEq)]
pub struct OtelConfig {
    pub endpoint: String,
    /// The share of the requests without a trace of their client that are recorded.
    pub sample_ratio: f64,
    pub service_name: String,
}

/// How a line of the log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogFormat {
    Text,
    /// An object with the fields of the event.
    Json,
}

/// Where the rows of tables are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableMemory {
    /// In memory if they fit, otherwise in mapped files.
    Auto,
    /// In memory of the process.
    Ram,
    /// In mapped files.
    Mapped,
}

/// Section `batcher`; each model has a batcher.
#[allow(missing_docs)] // settings/ has the meaning of each key
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatcherConfig {
    /// Limit of a merged batch.
    pub max_samples: usize,
    pub max_delay: Duration,
    pub queue_samples: usize,
    pub queue_bytes: usize,
    /// Threads that call the model; at least 1.
    pub workers: usize,
    pub default_deadline: Duration,
}

/// Section `trace`.
#[allow(missing_docs)] // settings/ has the meaning of each key
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TraceConfig {
    /// Share of the rows whose accesses are recorded; 0 records nothing.
    pub rate: f64,
    /// Limit of all access traces of a model.
    pub max_bytes: u64,
}

/// Section `learn`.
#[allow(missing_docs)] // settings/ has the meaning of each key
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LearnConfig {
    pub enabled: bool,
    /// Limit of all segments of a model's log.
    pub max_bytes: u64,
    /// A segment of this size is followed by another one.
    pub segment_bytes: u64,
}

/// Section `versions`.
#[allow(missing_docs)] // settings/ has the meaning of each key
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct VersionsConfig {
    /// Full versions that stay on disk; at least 1.
    pub keep: usize,
    pub compact_at: f64,
}

/// Section `device`.
#[allow(missing_docs)] // settings/ has the meaning of each key
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceConfig {
    pub kind: DeviceKind,
    /// Directory for compiled kernels; `None`: they are not saved.
    pub kernel_cache: Option<PathBuf>,
}

/// Which device to use.
#[allow(missing_docs)] // settings/ has the meaning of each key
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceKind {
    /// `Cuda` if it works, otherwise `Host`.
    Auto,
    Host,
    /// A GPU, or an error.
    Cuda,
}

/// Section `threads`. Each count is at least 1.
#[allow(missing_docs)] // settings/ has the meaning of each key
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ThreadsConfig {
    pub compute: usize,
    pub io: usize,
}

impl Layers {
    /// The interval between two readings of the models' directory, unless it is 0.
    pub(super) fn watch(&self) -> Result<Option<Duration>, ConfigError> {
        let seconds = self.whole("models.watch_seconds", 0, 86_400)?;
        Ok((seconds > 0).then(|| Duration::from_secs(seconds)))
    }

    pub(crate) fn batcher(&self, server: &ServerConfig) -> Result<BatcherConfig, ConfigError> {
        // A smaller queue would always refuse a request of the largest size.
        let least = server.max_samples as u64;
        let queue_samples = self.optional("batcher.queue_samples", |key| self.whole(key, least, 1 << 30))?;
        let max_bytes = server.max_bytes as u64;
        let least_bytes = BATCH_GROWTH * max_bytes;
        let queue_bytes =
            self.optional("batcher.queue_bytes", |key| self.room(key, least_bytes, max_bytes))?;
        Ok(BatcherConfig {
            max_samples: self.whole("batcher.max_samples", 1, 1 << 20)? as usize,
            max_delay: Duration::from_micros(self.whole("batcher.max_delay_us", 0, 60_000_000)?),
            queue_samples: queue_samples.unwrap_or(65_536.max(4 * least)) as usize,
            queue_bytes: queue_bytes.unwrap_or((256 * MIB).max(least_bytes)) as usize,
            workers: self.threads_of("batcher.workers", 1024)?,
            default_deadline: Duration::from_millis(self.whole(
                "batcher.default_deadline_ms",
                1,
                3_600_000,
            )?),
        })
    }

    pub(super) fn memory(&self) -> Result<TableMemory, ConfigError> {
        let places =
            &[("auto", TableMemory::Auto), ("ram", TableMemory::Ram), ("mapped", TableMemory::Mapped)];
        self.choice("store.memory", places)
    }

    pub(crate) fn trace(&self) -> Result<TraceConfig, ConfigError> {
        let max_bytes = self.bytes("trace.max_bytes", MIB, 1024 * GIB)?;
        Ok(TraceConfig { rate: self.fraction("trace.rate")?, max_bytes })
    }

    pub(crate) fn learn(&self) -> Result<LearnConfig, ConfigError> {
        let max_bytes = self.bytes("learn.max_bytes", MIB, 1 << 50)?;
        // Trained samples are removed by whole segments, except the last one. A log that is one segment would
        // stay full for ever.
        let most = max_bytes / LEARN_SEGMENTS;
        let expected = || {
            let of = format!("a fourth of learn.max_bytes = {max_bytes}");
            format!("{BYTES_FORM}, from {LEAST_SEGMENT} to {most}, {of}")
        };
        let fits = |text: &str| parse_bytes(text).filter(|bytes| (LEAST_SEGMENT..=most).contains(bytes));
        let given = self.optional("learn.segment_bytes", |key| self.parse(key, expected, fits))?;
        Ok(LearnConfig {
            enabled: self.choice("learn.enabled", SWITCH)?,
            max_bytes,
            segment_bytes: given.unwrap_or((64 * MIB).min(most)),
        })
    }

    pub(crate) fn versions(&self) -> Result<VersionsConfig, ConfigError> {
        let keep = self.whole("versions.keep", 1, 1 << 20)? as usize;
        Ok(VersionsConfig { keep, compact_at: self.share("versions.compact_at", 100.0)? })
    }

    pub(crate) fn device(&self) -> Result<DeviceConfig, ConfigError> {
        let kinds = &[("auto", DeviceKind::Auto), ("host", DeviceKind::Host), ("cuda", DeviceKind::Cuda)];
        let kernel_cache = match self.text("device.kernel_cache") {
            Some("off") => None,
            Some(folder) => Some(PathBuf::from(folder)),
            None => {
                let caches = self.cache_home.clone();
                let caches = caches.or_else(|| self.home.as_ref().map(|home| home.join(".cache")));
                caches.map(|caches| caches.join("flechette/kernels"))
            }
        };
        Ok(DeviceConfig { kind: self.choice("device.kind", kinds)?, kernel_cache })
    }

    pub(crate) fn threads(&self) -> Result<ThreadsConfig, ConfigError> {
        let compute = self.threads_of("threads.compute", 4096)?;
        Ok(ThreadsConfig { compute, io: self.threads_of("threads.io", 4096)? })
    }

    pub(super) fn log(&self) -> Result<LogConfig, ConfigError> {
        let format = self.choice("log.format", &[("text", LogFormat::Text), ("json", LogFormat::Json)])?;
        let seconds = || "a number of seconds from 0 to 3600".to_owned();
        let slow = self.parse("log.slow_seconds", seconds, |text| {
            text.parse().ok().filter(|seconds| (0.0..=3600.0).contains(seconds))
        })?;
        let slow = Some(Duration::from_secs_f64(slow)).filter(|slow| !slow.is_zero());
        Ok(LogConfig { level: self.log_level()?, format, slow })
    }

    /// `None` without `otel.endpoint`.
    pub(super) fn otel(&self) -> Result<Option<OtelConfig>, ConfigError> {
        let sample_ratio = self.fraction("otel.sample_ratio")?;
        let not_empty = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        let service_name = self.parse("otel.service_name", || "a name".to_owned(), not_empty)?;
        let built_in = cfg!(feature = "otel");
        let expected = || match built_in {
            true => "http://HOST:PORT or https://HOST:PORT".to_owned(),
            false => format!("no value, because {NO_OTEL}"),
        };
        let is_url = |text: &str| text.starts_with("http://") || text.starts_with("https://");
        let url = |text: &str| (built_in && is_url(text)).then(|| text.to_owned());
        let endpoint = self.optional("otel.endpoint", |key| self.parse(key, expected, url))?;
        Ok(endpoint.map(|endpoint| OtelConfig { endpoint, sample_ratio, service_name }))
    }

    fn log_level(&self) -> Result<String, ConfigError> {
        let expected = || {
            "error, warn, info, debug or trace, or directives such as warn,flechette::server=debug".to_owned()
        };
        // A misspelt level would be a directive too: for a target of that name.
        // An empty text would be the level error.
        let level = |text: &str| !text.is_empty() && text.parse::<LevelFilter>().is_ok();
        let directive = |text: &str| text.contains('=') || level(text);
        // `Targets` takes a space for a part of the target's name.
        let trimmed = |text: &str| text.split(',').map(str::trim).collect::<Vec<_>>().join(",");
        let valid = |text: &String| text.parse::<Targets>().is_ok() && text.split(',').all(directive);
        self.parse("log.level", expected, |text| Some(trimmed(text)).filter(valid))
    }
}
