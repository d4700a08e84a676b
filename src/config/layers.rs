//! The three layers of the configuration (file, environment, flags), and the parsing of their texts into
//! values.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::settings::{self, Fallback};
use super::{
    BatcherConfig, ConfigError, DeviceConfig, DeviceKind, Flags, LearnConfig, ServerConfig, Source,
    ThreadsConfig, TraceConfig, VersionsConfig,
};

/// Every environment variable of a setting begins with this.
const PREFIX: &str = "FLECHETTE_";
/// Variables with this prefix that only tests read. They are not reported as unknown.
const TEST_VARIABLES: &[&str] = &["FLECHETTE_DATA"];

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// For every key that a layer gives: the text of the highest layer, with its source. Layers are added from
/// the lowest to the highest.
#[derive(Default)]
pub(crate) struct Layers {
    given: BTreeMap<&'static str, Given>,
    /// `$XDG_CACHE_HOME` and `$HOME`, if they are absolute paths.
    cache_home: Option<PathBuf>,
    home: Option<PathBuf>,
    /// Unknown names, and keys without effect: one sentence each.
    pub(crate) warnings: Vec<String>,
}

struct Given {
    text: String,
    source: Source,
}

impl Layers {
    pub(crate) fn add_file(&mut self, path: PathBuf, text: &str) -> Result<(), ConfigError> {
        let table = toml::Table::from_str(text).map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            let line = 1 + before.matches('\n').count();
            ConfigError::Toml { path: path.clone(), line, reason: error.message().to_owned() }
        })?;
        for (section, value) in &table {
            let toml::Value::Table(section_table) = value else {
                self.warnings.push(format!("file {}: unknown key {section}", path.display()));
                continue;
            };
            for (key, value) in section_table {
                let name = format!("{section}.{key}");
                let Some(key) = settings::find(&name).map(|setting| setting.key) else {
                    self.warnings.push(format!("file {}: unknown key {name}", path.display()));
                    continue;
                };
                let source = Source::File(path.clone());
                let text = match value {
                    toml::Value::String(text) => text.clone(),
                    toml::Value::Integer(_) | toml::Value::Float(_) => value.to_string(),
                    other => {
                        let expected = "a string or a number".to_owned();
                        return Err(ConfigError::Value {
                            key,
                            source_of: source,
                            expected,
                            got: other.to_string(),
                        });
                    }
                };
                self.given.insert(key, Given { text, source });
            }
        }
        Ok(())
    }

    pub(crate) fn add_environment(
        &mut self,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<(), ConfigError> {
        for (name, value) in environment {
            if name == "XDG_CACHE_HOME" || name == "HOME" {
                // The XDG specification: a path that is not absolute is ignored.
                let path = Some(PathBuf::from(&value)).filter(|path| path.is_absolute());
                *(if name == "HOME" { &mut self.home } else { &mut self.cache_home }) = path;
                continue;
            }
            let Some(name) = name.to_str().filter(|n| n.starts_with(PREFIX)) else { continue };
            if TEST_VARIABLES.contains(&name) {
                continue;
            }
            let Some(key) = settings::all().map(|setting| setting.key).find(|key| variable(key) == name)
            else {
                self.warnings.push(format!("environment: unknown variable {name}"));
                continue;
            };
            let source = Source::Environment(name.to_owned());
            let text = value.into_string().map_err(|bytes| ConfigError::Value {
                key,
                source_of: source.clone(),
                expected: "UTF-8 text".to_owned(),
                got: format!("{bytes:?}"),
            })?;
            self.given.insert(key, Given { text, source });
        }
        Ok(())
    }

    pub(crate) fn add_flags(&mut self, flags: &Flags) {
        for (key, text) in flags.given() {
            let flag = settings::find(key).map_or(key, |setting| setting.flag);
            self.given.insert(key, Given { text: text.to_owned(), source: Source::Flag(flag) });
        }
    }

    pub(crate) fn server(&self) -> Result<ServerConfig, ConfigError> {
        let max_bytes = self.bytes("server.max_bytes", 1024, GIB)?;
        let count = |key| self.whole(key, 1, 1 << 20).map(|count| count as usize);
        // With less than max_bytes, a message of the largest size would always be refused.
        let inflight =
            self.given("server.max_inflight_bytes", |key| self.bytes(key, max_bytes, 1024 * GIB))?;
        Ok(ServerConfig {
            grpc: self.address("server.grpc")?,
            http: self.address("server.http")?,
            models: self.text("server.models").map(PathBuf::from),
            max_samples: count("server.max_samples")?,
            max_bytes: max_bytes as usize,
            max_requests: count("server.max_requests")?,
            max_inflight_bytes: inflight.unwrap_or(GIB.max(16 * max_bytes)) as usize,
            max_connections: count("server.max_connections")?,
            http_idle: Duration::from_secs(self.whole("server.http_idle_seconds", 1, 86_400)?),
            stream_idle: Duration::from_secs(self.whole("server.stream_idle_seconds", 1, 86_400)?),
            max_streams: count("server.max_streams")? as u32,
            drain: Duration::from_secs(self.whole("server.drain_seconds", 0, 86_400)?),
        })
    }

    /// The interval between two readings of the models' directory, unless it is 0.
    pub(crate) fn watch(&self) -> Result<Option<Duration>, ConfigError> {
        let seconds = self.whole("models.watch_seconds", 0, 86_400)?;
        Ok((seconds > 0).then(|| Duration::from_secs(seconds)))
    }

    pub(crate) fn batcher(&self, server: &ServerConfig) -> Result<BatcherConfig, ConfigError> {
        // A smaller queue would always refuse a request of the largest size.
        let least = server.max_samples as u64;
        let queue_samples = self.given("batcher.queue_samples", |key| self.whole(key, least, 1 << 30))?;
        Ok(BatcherConfig {
            max_samples: self.whole("batcher.max_samples", 1, 1 << 20)? as usize,
            max_delay: Duration::from_micros(self.whole("batcher.max_delay_us", 0, 60_000_000)?),
            queue_samples: queue_samples.unwrap_or(65_536.max(4 * least)) as usize,
            queue_bytes: self.bytes("batcher.queue_bytes", MIB, 1024 * GIB)? as usize,
            workers: self.threads_of("batcher.workers", 1024)?,
        })
    }

    pub(crate) fn trace(&self) -> Result<TraceConfig, ConfigError> {
        let max_bytes = self.bytes("trace.max_bytes", MIB, 1024 * GIB)?;
        Ok(TraceConfig { rate: self.fraction("trace.rate")?, max_bytes })
    }

    pub(crate) fn learn(&self) -> Result<LearnConfig, ConfigError> {
        Ok(LearnConfig {
            enabled: self.choice("learn.enabled", &[("on", true), ("off", false)])?,
            max_bytes: self.bytes("learn.max_bytes", MIB, 1 << 50)?,
            segment_bytes: self.bytes("learn.segment_bytes", 64 << 10, 1024 * GIB)?,
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

    /// A number of threads; 0 becomes the number of cores.
    fn threads_of(&self, key: &'static str, most: u64) -> Result<usize, ConfigError> {
        Ok(match self.whole(key, 0, most)? {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            count => count as usize,
        })
    }

    /// The layer that gives a key's value; `None` for a default.
    pub(crate) fn source(&self, key: &str) -> Option<&Source> {
        self.given.get(key).map(|given| &given.source)
    }

    /// The text of a key from the highest layer that gives it, or its default text.
    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        if let Some(given) = self.given.get(key) {
            return Some(given.text.trim());
        }
        match settings::find(key)?.default {
            Fallback::Text(text) => Some(text),
            Fallback::Words(_) => None,
        }
    }

    /// The value of a key that has no default text: `None` if no layer gives it.
    pub(crate) fn given<T>(
        &self,
        key: &'static str,
        read: impl FnOnce(&'static str) -> Result<T, ConfigError>,
    ) -> Result<Option<T>, ConfigError> {
        self.text(key).is_some().then(|| read(key)).transpose()
    }

    /// Reads a key that is given or has a default text. `read` returns `None` if the text is not what
    /// `expected` describes.
    fn parse<T>(
        &self,
        key: &'static str,
        expected: impl FnOnce() -> String,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, ConfigError> {
        let text = self.text(key);
        text.and_then(read).ok_or_else(|| ConfigError::Value {
            key,
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

    /// A number from 0 to 1.
    pub(crate) fn fraction(&self, key: &'static str) -> Result<f64, ConfigError> {
        let expected = || "a number from 0 to 1".to_owned();
        self.parse(key, expected, |text| text.parse().ok().filter(|f| (0.0..=1.0).contains(f)))
    }

    /// A number above 0 and at most `most`.
    pub(crate) fn share(&self, key: &'static str, most: f64) -> Result<f64, ConfigError> {
        let expected = || format!("a number above 0 and at most {most}");
        self.parse(key, expected, |text| text.parse().ok().filter(|f| *f > 0.0 && *f <= most))
    }

    fn address(&self, key: &'static str) -> Result<SocketAddr, ConfigError> {
        let expected = || "host:port, such as 127.0.0.1:8001".to_owned();
        self.parse(key, expected, |text| text.to_socket_addrs().ok()?.next())
    }

    pub(crate) fn choice<T: Copy>(&self, key: &'static str, choices: &[(&str, T)]) -> Result<T, ConfigError> {
        let expected = || choices.iter().map(|c| c.0).collect::<Vec<_>>().join(", ");
        self.parse(key, expected, |text| choices.iter().find(|c| c.0 == text).map(|c| c.1))
    }
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
