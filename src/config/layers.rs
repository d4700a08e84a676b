//! The three layers of the configuration (file, environment, flags), and the parsing of their texts into
//! values.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use toml::de::{DeTable, DeValue};
use tracing_subscriber::filter::{LevelFilter, Targets};

use super::models::{common_key, key_of_variable, of_model};
use super::security::SWITCH;
use super::settings::{self, Fallback, SECTIONS};
use super::{
    BatcherConfig, ConfigError, DeviceConfig, DeviceKind, Flags, LearnConfig, LogConfig, LogFormat, NO_OTEL,
    OtelConfig, ServerConfig, Source, TableMemory, ThreadsConfig, TraceConfig, VersionsConfig, unknown,
};

/// Every environment variable of a setting begins with this.
pub(super) const PREFIX: &str = "FLECHETTE_";

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The least bytes of a file of learned samples, and how many files the log must have room for.
const LEAST_SEGMENT: u64 = 64 << 10;
const LEARN_SEGMENTS: u64 = 4;

/// Most bytes of a batch for each byte of its message: an id of one byte takes 8 bytes, and an offset 4.
const BATCH_GROWTH: u64 = 12;

/// Most memory of a message of this size, as the server counts it (`server/meter.rs`): the bytes themselves,
/// 64 for an empty string, which takes 2, and more for each tensor, output and parameter of KServe, which
/// take 2 as well. A native message takes less. `SPARE` is for capacity of vectors that is not used.
pub(crate) fn message_bytes(max_bytes: u64) -> u64 {
    const MOST_TENSORS: u64 = 20_001;
    const MOST_OTHERS: u64 = 20_001 + 100;
    const SPARE: u64 = 1024;
    let entries = max_bytes / 2;
    let tensors = entries.min(MOST_TENSORS);
    33 * max_bytes + SPARE + 976 * tensors + 288 * (entries - tensors).min(MOST_OTHERS)
}

/// For every key that a layer gives: the text of the highest layer, with its source. Layers are added from
/// the lowest to the highest.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layers {
    /// The flags of the third layer, which also name the file.
    pub(super) flags: Flags,
    pub(super) given: BTreeMap<String, Given>,
    /// `$XDG_CACHE_HOME` and `$HOME`, if they are absolute paths.
    cache_home: Option<PathBuf>,
    home: Option<PathBuf>,
    /// Unknown names, and values that cannot be read.
    pub(super) errors: Vec<ConfigError>,
    /// Keys without effect: one sentence each.
    pub(super) warnings: Vec<String>,
}

#[derive(Clone, Debug)]
pub(super) struct Given {
    /// The full key.
    key: String,
    pub(super) text: String,
    pub(super) source: Source,
}

impl Layers {
    pub(crate) fn add_file(&mut self, path: &Path, text: &str) {
        let line = |at: usize| 1 + text.get(..at).unwrap_or_default().matches('\n').count();
        let table = match DeTable::parse(text) {
            Ok(table) => table.into_inner(),
            Err(error) => {
                let line = line(error.span().map_or(0, |span| span.start));
                let reason = error.message().to_owned();
                self.errors.push(ConfigError::Toml { path: path.to_owned(), line, reason });
                return;
            }
        };
        let source = |at| Source::File { path: path.to_owned(), line: line(at) };
        self.add_table(&[], &table, &source);
    }

    /// Adds a table of the file. `path` is its name.
    fn add_table(&mut self, path: &[&str], table: &DeTable<'_>, source: &impl Fn(usize) -> Source) {
        for (key, value) in table {
            let (path, source_of) = ([path, &[key.get_ref()]].concat(), source(key.span().start));
            let is_table = match path.as_slice() {
                [section] => SECTIONS.iter().any(|known| known.name == *section),
                ["models", _] | ["models", _, "batcher"] => true,
                _ => false,
            };
            let name = path.join(".");
            let is_value = of_model(&name).is_some_and(|(_, setting)| setting.lists);
            match value.get_ref() {
                DeValue::Table(table) if is_table => self.add_table(&path, table, source),
                DeValue::Table(_) if !is_value && (path.len() == 1 || path[0] == "models") => {
                    self.errors.push(unknown::section(source_of.to_string(), name));
                }
                value => self.add_value(name, value, source_of),
            }
        }
    }

    fn add_value(&mut self, name: String, value: &DeValue<'_>, source: Source) {
        let known = settings::find(&name).or_else(|| of_model(&name).map(|(_, setting)| setting));
        let Some(setting) = known else {
            return self.errors.push(unknown::key(source.to_string(), name));
        };
        let text = plain(value).or_else(|| setting.lists.then(|| joined(value))?);
        let Some(text) = text else {
            let or_list = if setting.lists { ", or a list or table of them" } else { "" };
            let (expected, got) = (format!("a string or a number{or_list}"), value.type_str().to_owned());
            return self.errors.push(ConfigError::Value { key: name, source_of: source, expected, got });
        };
        self.give(name, text, source);
    }

    fn give(&mut self, key: String, text: String, source: Source) {
        self.given.insert(key.clone(), Given { key, text, source });
    }

    pub(crate) fn add_environment(&mut self, environment: impl IntoIterator<Item = (OsString, OsString)>) {
        for (name, value) in environment {
            if name == "XDG_CACHE_HOME" || name == "HOME" {
                // The XDG specification: a path that is not absolute is ignored.
                let path = Some(PathBuf::from(&value)).filter(|path| path.is_absolute());
                *(if name == "HOME" { &mut self.home } else { &mut self.cache_home }) = path;
                continue;
            }
            let Some(name) = name.to_str().filter(|n| n.starts_with(PREFIX)) else { continue };
            let known = settings::all().map(|setting| setting.key).find(|key| variable(key) == name);
            let Some(key) = known.map(str::to_owned).or_else(|| key_of_variable(name)) else {
                self.errors.extend(unknown::environment_variable(name, &value));
                continue;
            };
            let source = Source::Environment(name.to_owned());
            match value.into_string() {
                Ok(text) => self.give(key, text, source),
                Err(bytes) => {
                    let (expected, got) = ("UTF-8 text".to_owned(), format!("{bytes:?}"));
                    self.errors.push(ConfigError::Value { key, source_of: source, expected, got });
                }
            }
        }
    }

    pub(crate) fn add_flags(&mut self, flags: &Flags) {
        self.flags = flags.clone();
        for (key, text) in flags.given() {
            let flag = settings::find(key).map_or(key, |setting| setting.flag);
            self.give(key.to_owned(), text.to_owned(), Source::Flag(flag));
        }
    }

    pub(super) fn server(&self) -> Result<ServerConfig, ConfigError> {
        let max_bytes = self.bytes("server.max_bytes", 1024, GIB)?;
        let count = |key| self.whole(key, 1, 1 << 20).map(|count| count as usize);
        let seconds = |key, least| self.whole(key, least, 86_400).map(Duration::from_secs);
        let least = message_bytes(max_bytes);
        let inflight = self.optional("server.max_inflight_bytes", |key| self.room(key, least, max_bytes))?;
        Ok(ServerConfig {
            grpc: self.address("server.grpc")?,
            http: self.address("server.http")?,
            metrics: self.choice("server.metrics", SWITCH)?,
            models: self.text("server.models").map(PathBuf::from),
            max_samples: count("server.max_samples")?,
            max_bytes: max_bytes as usize,
            max_requests: count("server.max_requests")?,
            max_inflight_bytes: inflight.unwrap_or(GIB.max(least)) as usize,
            max_connections: count("server.max_connections")?,
            handshake: seconds("server.handshake_seconds", 1)?,
            body: seconds("server.body_seconds", 1)?,
            write: seconds("server.write_seconds", 1)?,
            http_idle: seconds("server.http_idle_seconds", 1)?,
            grpc_idle: Some(seconds("server.grpc_idle_seconds", 0)?).filter(|idle| !idle.is_zero()),
            stream_idle: seconds("server.stream_idle_seconds", 1)?,
            max_streams: count("server.max_streams")? as u32,
            reflection: self.administration("server.reflection")?,
            admin: self.administration("server.admin")?,
            drain_delay: seconds("server.drain_delay_seconds", 0)?,
            drain: seconds("server.drain_seconds", 0)?,
        })
    }

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
        let valid = |text: &str| {
            text.parse::<Targets>().is_ok() && text.split(',').all(|part| directive(part.trim()))
        };
        self.parse("log.level", expected, |text| valid(text).then(|| text.to_owned()))
    }

    /// A number of threads; 0 becomes the number of cores.
    fn threads_of(&self, key: &'static str, most: u64) -> Result<usize, ConfigError> {
        Ok(match self.whole(key, 0, most)? {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            count => count as usize,
        })
    }

    /// Takes the value that other layers give to a key.
    pub(super) fn take(&mut self, key: &str, from: &Self) {
        match from.given.get(key) {
            Some(given) => self.given.insert(key.to_owned(), given.clone()),
            None => self.given.remove(key),
        };
    }

    /// The layer that gives a key's value; `None` for a default.
    pub(crate) fn source(&self, key: &str) -> Option<&Source> {
        self.given.get(key).map(|given| &given.source)
    }

    /// The text of a key from the highest layer that gives it, or its default text. A model's setting that is
    /// not given has the text of the common one.
    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        if let Some(given) = self.given.get(key) {
            return Some(given.text.trim());
        }
        let of_model = of_model(key).map(|(_, setting)| setting);
        if let Some(common) = of_model.and_then(common_key) {
            return self.text(common);
        }
        match of_model.or_else(|| settings::find(key))?.default {
            Fallback::Text(text) => Some(text),
            Fallback::Words(_) => None,
        }
    }

    /// The value of a key that has no default text: `None` if no layer gives it.
    pub(crate) fn optional<'k, T>(
        &self,
        key: &'k str,
        read: impl FnOnce(&'k str) -> Result<T, ConfigError>,
    ) -> Result<Option<T>, ConfigError> {
        self.text(key).is_some().then(|| read(key)).transpose()
    }

    /// Reads a key that is given or has a default text. `read` returns `None` if the text is not what
    /// `expected` describes.
    pub(super) fn parse<T>(
        &self,
        key: &str,
        expected: impl FnOnce() -> String,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, ConfigError> {
        let text = self.text(key);
        text.and_then(read).ok_or_else(|| ConfigError::Value {
            key: self.given.get(key).map_or(key, |given| &given.key).to_owned(),
            source_of: self.source(key).cloned().unwrap_or(Source::Default),
            expected: expected(),
            got: text.map_or("nothing".to_owned(), |text| format!("{text:?}")),
        })
    }

    pub(crate) fn whole(&self, key: &'static str, least: u64, most: u64) -> Result<u64, ConfigError> {
        let expected = || format!("a whole number from {least} to {most}");
        self.parse(key, expected, |text| {
            text.replace('_', "").parse().ok().filter(|n| (least..=most).contains(n))
        })
    }

    pub(crate) fn bytes(&self, key: &'static str, least: u64, most: u64) -> Result<u64, ConfigError> {
        let expected = || format!("{BYTES_FORM}, from {least} to {most}");
        self.parse(key, expected, |text| parse_bytes(text).filter(|n| (least..=most).contains(n)))
    }

    /// Bytes that must hold the largest message: a lower limit would refuse that message for ever.
    fn room(&self, key: &'static str, least: u64, max_bytes: u64) -> Result<u64, ConfigError> {
        let expected = || {
            format!(
                "{BYTES_FORM}, at least {least}, which a message of server.max_bytes = {max_bytes} may take"
            )
        };
        self.parse(key, expected, |text| parse_bytes(text).filter(|n| (least..=1024 * GIB).contains(n)))
    }

    /// A number from 0 to 1.
    pub(crate) fn fraction(&self, key: &str) -> Result<f64, ConfigError> {
        let expected = || "a number from 0 to 1".to_owned();
        self.parse(key, expected, |text| text.parse().ok().filter(|f| (0.0..=1.0).contains(f)))
    }

    /// A number above 0 and at most `most`.
    pub(crate) fn share(&self, key: &'static str, most: f64) -> Result<f64, ConfigError> {
        let expected = || format!("a number above 0 and at most {most}");
        self.parse(key, expected, |text| text.parse().ok().filter(|f| *f > 0.0 && *f <= most))
    }

    fn address(&self, key: &'static str) -> Result<SocketAddr, ConfigError> {
        let (found, reason) = match self.text(key).map(ToSocketAddrs::to_socket_addrs) {
            Some(Ok(mut found)) => (found.next(), String::new()),
            Some(Err(error)) => (None, format!(" ({error})")),
            None => (None, String::new()),
        };
        self.parse(key, || format!("host:port, such as 127.0.0.1:8001{reason}"), |_| found)
    }

    pub(crate) fn choice<T: Copy>(&self, key: &'static str, choices: &[(&str, T)]) -> Result<T, ConfigError> {
        let expected = || choices.iter().map(|c| c.0).collect::<Vec<_>>().join(", ");
        self.parse(key, expected, |text| choices.iter().find(|c| c.0 == text).map(|c| c.1))
    }
}

/// The text of a string or a number.
fn plain(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(digits) => {
            let number = i64::from_str_radix(digits.as_str(), digits.radix());
            Some(number.map_or_else(|_| digits.to_string(), |number| number.to_string()))
        }
        DeValue::Float(number) => Some(number.to_string()),
        _ => None,
    }
}

/// The elements of a list, or the `key = value` of a table, with commas.
fn joined(value: &DeValue<'_>) -> Option<String> {
    let parts: Option<Vec<String>> = match value {
        DeValue::Array(list) => list.iter().map(|part| plain(part.get_ref())).collect(),
        DeValue::Table(table) => {
            let pairs = table.iter().map(|(key, value)| (key.get_ref(), plain(value.get_ref())));
            pairs.map(|(key, value)| Some(format!("{key} = {}", value?))).collect()
        }
        _ => None,
    };
    Some(parts?.join(", "))
}

/// The environment variable of a key.
pub(crate) fn variable(key: &str) -> String {
    format!("{PREFIX}{}", key.replace('.', "_").to_uppercase())
}

/// The words of error messages for a value in bytes.
pub(crate) const BYTES_FORM: &str = "a number of bytes, plain or with the unit K, M, G, T, Ki, Mi, Gi or Ti";

/// Reads bytes: `512`, `64K` (1,000s), `16Mi` (1,024s), `1.5G`, each with or without a `B` at the end.
#[must_use]
pub(crate) fn parse_bytes(text: &str) -> Option<u64> {
    const UNITS: &[(&str, u64)] = &[
        ("Ki", 1 << 10),
        ("Mi", MIB),
        ("Gi", GIB),
        ("Ti", 1 << 40),
        ("K", 1_000),
        ("M", 1_000_000),
        ("G", 1_000_000_000),
        ("T", 1_000_000_000_000),
    ];
    let text = text.strip_suffix('B').unwrap_or(text);
    let Some((number, unit)) = UNITS.iter().find_map(|(u, n)| text.strip_suffix(u).map(|t| (t, *n))) else {
        return text.replace('_', "").parse().ok();
    };
    let bytes = number.trim().parse::<f64>().ok()? * unit as f64;
    // No machine has 2^63 bytes, and f64 would round such numbers.
    (0.0..9.2e18).contains(&bytes).then_some(bytes.round() as u64)
}
