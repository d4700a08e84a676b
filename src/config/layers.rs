//! The three layers, text by key with its source, and the text's way to a value.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::{
    BatcherConfig, ConfigError, DeviceConfig, DeviceKind, Flags, ServerConfig, Source, TraceConfig, or_cores,
};

/// Every key that exists. Anything else in the file or the environment is warned of.
pub(crate) const KEYS: &[&str] = &[
    "server.grpc",
    "server.http",
    "server.models",
    "server.max_samples",
    "server.max_bytes",
    "server.max_requests",
    "server.max_inflight_bytes",
    "server.max_connections",
    "server.http_idle_seconds",
    "server.max_streams",
    "server.drain_seconds",
    "batcher.max_samples",
    "batcher.max_delay_us",
    "batcher.queue_samples",
    "batcher.queue_bytes",
    "batcher.workers",
    "cache.mode",
    "cache.bytes",
    "cache.fraction",
    "cache.staging_bytes",
    "cache.admission",
    "cache.admission_probability",
    "cache.admission_misses",
    "cache.eviction",
    "cache.counts",
    "cache.key_bits",
    "cache.pointers",
    "cache.high_watermark",
    "cache.low_watermark",
    "cache.warm",
    "cache.save_seconds",
    "trace.rate",
    "trace.max_bytes",
    "device.kind",
    "device.kernel_cache",
    "threads.compute",
    "threads.io",
    "log.level",
];

/// The prefix of our variables, and the one among them that only tests read.
const PREFIX: &str = "FLECHETTE_";
const TEST_VARIABLES: &[&str] = &["FLECHETTE_DATA"];

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The winning text of every key, with its source.
#[derive(Default)]
pub(crate) struct Layers {
    given: BTreeMap<&'static str, Given>,
    /// `$XDG_CACHE_HOME` and `$HOME`, where they are absolute paths.
    cache_home: Option<PathBuf>,
    home: Option<PathBuf>,
    /// Names that nobody knows, one sentence each.
    pub(crate) warnings: Vec<String>,
}

struct Given {
    text: String,
    source: Source,
}

impl Layers {
    pub(crate) fn add_file(&mut self, path: PathBuf, text: &str) -> Result<(), ConfigError> {
        let table = toml::Table::from_str(text)
            .map_err(|error| ConfigError::Toml { path: path.clone(), error: Box::new(error) })?;
        for (section, value) in &table {
            let toml::Value::Table(section_table) = value else {
                self.warnings.push(format!("file {}: unknown key {section}", path.display()));
                continue;
            };
            for (key, value) in section_table {
                let name = format!("{section}.{key}");
                let Some(key) = KEYS.iter().find(|k| **k == name) else {
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
                // A path that is not absolute is to be ignored, says the XDG specification.
                let path = Some(PathBuf::from(&value)).filter(|path| path.is_absolute());
                *(if name == "HOME" { &mut self.home } else { &mut self.cache_home }) = path;
                continue;
            }
            let Some(name) = name.to_str().filter(|n| n.starts_with(PREFIX)) else { continue };
            if TEST_VARIABLES.contains(&name) {
                continue;
            }
            let Some(key) = KEYS.iter().find(|k| variable(k) == name) else {
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
        for (key, flag, text) in flags.given() {
            self.given.insert(key, Given { text: text.to_owned(), source: Source::Flag(flag) });
        }
    }

    pub(crate) fn server(&self) -> Result<ServerConfig, ConfigError> {
        let max_bytes = self.bytes("server.max_bytes", 1024, GIB)?.unwrap_or(16 * MIB);
        // Less would refuse one largest message for ever.
        let inflight = self.bytes("server.max_inflight_bytes", max_bytes, 1024 * GIB)?;
        let idle_seconds = self.whole("server.http_idle_seconds", 1, 86_400)?.unwrap_or(75);
        Ok(ServerConfig {
            grpc: self.address("server.grpc")?.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 8001))),
            http: self.address("server.http")?.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 8002))),
            models: self.given.get("server.models").map(|g| PathBuf::from(&g.text)),
            max_samples: self.whole("server.max_samples", 1, 1 << 20)?.unwrap_or(4096) as usize,
            max_bytes: max_bytes as usize,
            max_requests: self.whole("server.max_requests", 1, 1 << 20)?.unwrap_or(8192) as usize,
            max_inflight_bytes: inflight.unwrap_or(GIB.max(16 * max_bytes)) as usize,
            max_connections: self.whole("server.max_connections", 1, 1 << 20)?.unwrap_or(4096) as usize,
            http_idle: Duration::from_secs(idle_seconds),
            max_streams: self.whole("server.max_streams", 1, 1 << 20)?.unwrap_or(1024) as u32,
            drain: Duration::from_secs(self.whole("server.drain_seconds", 0, 86_400)?.unwrap_or(30)),
        })
    }

    pub(crate) fn batcher(&self, server: &ServerConfig) -> Result<BatcherConfig, ConfigError> {
        // A queue that cannot hold one largest request would refuse it for ever.
        let least = server.max_samples as u64;
        let queue_samples = self.whole("batcher.queue_samples", least, 1 << 30)?;
        let delay_us = self.whole("batcher.max_delay_us", 0, 60_000_000)?.unwrap_or(500);
        let queue_bytes = self.bytes("batcher.queue_bytes", MIB, 1024 * GIB)?.unwrap_or(256 * MIB);
        Ok(BatcherConfig {
            max_samples: self.whole("batcher.max_samples", 1, 1 << 20)?.unwrap_or(4096) as usize,
            max_delay: Duration::from_micros(delay_us),
            queue_samples: queue_samples.unwrap_or(65_536.max(4 * least)) as usize,
            queue_bytes: queue_bytes as usize,
            workers: or_cores(self.whole("batcher.workers", 0, 1024)?),
        })
    }

    pub(crate) fn trace(&self) -> Result<TraceConfig, ConfigError> {
        let rate = self.fraction("trace.rate")?;
        let max_bytes = self.bytes("trace.max_bytes", MIB, 1024 * GIB)?;
        Ok(TraceConfig { rate: rate.unwrap_or(0.0), max_bytes: max_bytes.unwrap_or(64 * MIB) })
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
        Ok(DeviceConfig {
            kind: self.choice("device.kind", kinds)?.unwrap_or(DeviceKind::Auto),
            kernel_cache,
        })
    }

    /// Where a key's value stands, if it is given.
    pub(crate) fn source(&self, key: &str) -> Option<&Source> {
        self.given.get(key).map(|given| &given.source)
    }

    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.given.get(key).map(|given| given.text.trim())
    }

    /// Reads one key with `read`; `None` from it is an error that says what was expected.
    fn parse<T>(
        &self,
        key: &'static str,
        expected: impl FnOnce() -> String,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(given) = self.given.get(key) else { return Ok(None) };
        match read(given.text.trim()) {
            Some(value) => Ok(Some(value)),
            None => Err(ConfigError::Value {
                key,
                source_of: given.source.clone(),
                expected: expected(),
                got: format!("{:?}", given.text),
            }),
        }
    }

    pub(crate) fn whole(&self, key: &'static str, least: u64, most: u64) -> Result<Option<u64>, ConfigError> {
        let expected = || format!("a whole number from {least} to {most}");
        self.parse(key, expected, |text| {
            text.replace('_', "").parse().ok().filter(|n| (least..=most).contains(n))
        })
    }

    pub(crate) fn bytes(&self, key: &'static str, least: u64, most: u64) -> Result<Option<u64>, ConfigError> {
        let expected = || format!("bytes from {least} to {most}, {BYTES_FORM}");
        self.parse(key, expected, |text| parse_bytes(text).filter(|n| (least..=most).contains(n)))
    }

    /// A share that may be nothing.
    pub(crate) fn fraction(&self, key: &'static str) -> Result<Option<f64>, ConfigError> {
        let expected = || "a number from 0 to 1".to_owned();
        self.parse(key, expected, |text| text.parse().ok().filter(|f| (0.0..=1.0).contains(f)))
    }

    /// A number above one bound and at most the other.
    pub(crate) fn within(
        &self,
        key: &'static str,
        above: f64,
        most: f64,
    ) -> Result<Option<f64>, ConfigError> {
        let expected = || format!("a number above {above} and at most {most}");
        self.parse(key, expected, |text| text.parse().ok().filter(|f| *f > above && *f <= most))
    }

    fn address(&self, key: &'static str) -> Result<Option<SocketAddr>, ConfigError> {
        let expected = || "host:port, such as 127.0.0.1:8001".to_owned();
        self.parse(key, expected, |text| text.to_socket_addrs().ok()?.next())
    }

    pub(crate) fn choice<T: Copy>(
        &self,
        key: &'static str,
        choices: &[(&str, T)],
    ) -> Result<Option<T>, ConfigError> {
        let expected = || choices.iter().map(|c| c.0).collect::<Vec<_>>().join(", ");
        self.parse(key, expected, |text| choices.iter().find(|c| c.0 == text).map(|c| c.1))
    }
}

/// The environment's name of a key.
pub(crate) fn variable(key: &str) -> String {
    format!("{PREFIX}{}", key.replace('.', "_").to_uppercase())
}

/// How bytes may be written, to be told where they are not.
pub(crate) const BYTES_FORM: &str = "plain or with K, M, G, T, Ki, Mi, Gi or Ti";

/// Bytes as every setting takes them: `512`, `64K` (thousands), `16Mi` (1,024s), `1.5G`; a trailing `B` is
/// allowed. None where they are not of this form.
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
    // Above 2^63 the rounding of f64 is no size anyone has.
    (0.0..9.2e18).contains(&bytes).then_some(bytes.round() as u64)
}
