//! Flags, environment and file to validated objects; the only reader of the environment.
//!
//! Every key has one name, `section.key`. It is read from three layers: a flag wins over the
//! environment (`FLECHETTE_<SECTION>_<KEY>`), the environment over the TOML file. A layer holds
//! plain text with the place it came from, and text becomes a value in one function a type, so a
//! bad value is always reported as key, place, what was expected and what was got. Names that
//! nobody knows are warnings, so that a newer file does not stop an older program.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Every key that exists. Anything else in the file or the environment is warned of.
const KEYS: &[&str] = &[
    "server.grpc",
    "server.http",
    "server.models",
    "server.max_samples",
    "server.max_bytes",
    "server.max_requests",
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
    "device.kind",
    "threads.compute",
    "threads.io",
];

/// The prefix of our variables, and the one among them that only tests read.
const PREFIX: &str = "FLECHETTE_";
const TEST_VARIABLES: &[&str] = &["FLECHETTE_DATA"];

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// What the command line gave, untouched; `None` where a flag was left out.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// `--config`: the TOML file.
    pub config: Option<PathBuf>,
    /// `--grpc`: address of the gRPC port.
    pub grpc: Option<String>,
    /// `--http`: address of the HTTP port.
    pub http: Option<String>,
    /// `--models`: directory of the models.
    pub models: Option<String>,
    /// `--threads`: threads that compute.
    pub threads: Option<String>,
    /// `--device`: `auto`, `host` or `cuda`.
    pub device: Option<String>,
    /// `--cache-mode`: `auto`, `on` or `off`.
    pub cache_mode: Option<String>,
    /// `--cache-bytes`: room of index and pool together.
    pub cache_bytes: Option<String>,
    /// `--cache-fraction`: room as a share of the model's rows.
    pub cache_fraction: Option<String>,
}

impl Flags {
    /// Key, flag and text of every flag that was given.
    fn given(&self) -> impl Iterator<Item = (&'static str, &'static str, &str)> {
        [
            ("server.grpc", "--grpc", &self.grpc),
            ("server.http", "--http", &self.http),
            ("server.models", "--models", &self.models),
            ("threads.compute", "--threads", &self.threads),
            ("device.kind", "--device", &self.device),
            ("cache.mode", "--cache-mode", &self.cache_mode),
            ("cache.bytes", "--cache-bytes", &self.cache_bytes),
            ("cache.fraction", "--cache-fraction", &self.cache_fraction),
        ]
        .into_iter()
        .filter_map(|(key, flag, text)| text.as_deref().map(|text| (key, flag, text)))
    }
}

/// Everything that can be configured, validated.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The two ports and the limits of a request.
    pub server: ServerConfig,
    /// How requests become batches.
    pub batcher: BatcherConfig,
    /// The embedding cache.
    pub cache: CacheConfig,
    /// Which device tier.
    pub device: DeviceKind,
    /// Thread counts.
    pub threads: ThreadsConfig,
    /// Names that nobody knows, one sentence each, to be logged.
    pub warnings: Vec<String>,
}

/// Section `server`.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    /// `server.grpc`: where gRPC listens; port 0 takes a free one.
    pub grpc: SocketAddr,
    /// `server.http`: where metrics, health and the status page listen.
    pub http: SocketAddr,
    /// `server.models`: the directory of the models.
    pub models: Option<PathBuf>,
    /// `server.max_samples`: most samples a request.
    pub max_samples: usize,
    /// `server.max_bytes`: most bytes a request message.
    pub max_bytes: usize,
    /// `server.max_requests`: most Ctr calls in flight over all connections.
    pub max_requests: usize,
    /// `server.max_streams`: most concurrent HTTP/2 streams a connection.
    pub max_streams: u32,
    /// `server.drain_seconds`: how long calls in flight may take to finish after SIGTERM.
    pub drain: Duration,
}

/// Section `batcher`; a batcher serves one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatcherConfig {
    /// `batcher.max_samples`: most samples in a merged batch; a larger request goes alone.
    pub max_samples: usize,
    /// `batcher.max_delay_us`: how long a batch may wait to fill while the model computes another.
    pub max_delay: Duration,
    /// `batcher.queue_samples`: most samples waiting.
    pub queue_samples: usize,
    /// `batcher.queue_bytes`: most bytes of converted samples waiting.
    pub queue_bytes: usize,
    /// `batcher.workers`: threads that call the model; at least 1.
    pub workers: usize,
}

/// Section `cache`.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheConfig {
    /// `cache.mode`.
    pub mode: CacheMode,
    /// `cache.bytes` or `cache.fraction`; neither is given when the mode is `off`.
    pub size: Option<CacheSize>,
    /// `cache.staging_bytes`; room for one maximum batch when absent.
    pub staging_bytes: Option<u64>,
}

/// Whether there is a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMode {
    /// Off where the tables fit in RAM on the host device, on elsewhere.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// How large the cache is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CacheSize {
    /// Bytes of index and pool together.
    Bytes(u64),
    /// Room for this share of the model's rows, above 0 and at most 1.
    Fraction(f64),
}

/// Which device tier to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// `cuda` where it works, `host` elsewhere.
    Auto,
    /// Plain RAM and processor.
    Host,
    /// A GPU, or an error.
    Cuda,
}

/// Section `threads`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadsConfig {
    /// `threads.compute`: threads that compute; all cores when 0 was given.
    pub compute: usize,
    /// `threads.io`: threads that speak the network; all cores when 0 was given.
    pub io: usize,
}

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A flag, by its name.
    Flag(&'static str),
    /// An environment variable, by its name.
    Environment(String),
    /// The TOML file.
    File(PathBuf),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(name) => write!(f, "flag {name}"),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::File(path) => write!(f, "file {}", path.display()),
        }
    }
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("config file {}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// The file is not TOML.
    #[error("config file {}: {error}", path.display())]
    Toml {
        /// The file.
        path: PathBuf,
        /// Line and reason.
        error: Box<toml::de::Error>,
    },
    /// A value that its key does not take.
    #[error("{key} ({source_of}): expected {expected}, got {got}")]
    Value {
        /// The key.
        key: &'static str,
        /// Where it stands.
        source_of: Source,
        /// What the key takes.
        expected: String,
        /// What came.
        got: String,
    },
    /// Two keys that exclude each other.
    #[error("{first} ({first_source}) and {second} ({second_source}): give one of the two, not both")]
    Both {
        /// The one key.
        first: &'static str,
        /// Where it stands.
        first_source: Source,
        /// The other.
        second: &'static str,
        /// Where it stands.
        second_source: Source,
    },
}

impl Config {
    /// Reads the file that the flags name and the environment, and validates everything.
    ///
    /// # Errors
    /// [`ConfigError`], naming the key and where its value came from.
    pub fn load(flags: &Flags) -> Result<Self, ConfigError> {
        let text = match &flags.config {
            None => None,
            Some(path) => Some(
                std::fs::read_to_string(path)
                    .map_err(|error| ConfigError::Read { path: path.clone(), error })?,
            ),
        };
        Self::resolve(flags, std::env::vars_os(), text.as_deref())
    }

    /// [`Config::load`] with the environment and the file's text given: no input but the arguments.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn resolve(
        flags: &Flags,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
        file: Option<&str>,
    ) -> Result<Self, ConfigError> {
        let mut layers = Layers::default();
        if let Some(text) = file {
            layers.add_file(flags.config.clone().unwrap_or_default(), text)?;
        }
        layers.add_environment(environment)?;
        layers.add_flags(flags);

        let server = layers.server()?;
        let batcher = layers.batcher(&server)?;
        let kinds = &[("auto", DeviceKind::Auto), ("host", DeviceKind::Host), ("cuda", DeviceKind::Cuda)];
        Ok(Self {
            batcher,
            server,
            cache: layers.cache()?,
            device: layers.choice("device.kind", kinds)?.unwrap_or(DeviceKind::Auto),
            threads: ThreadsConfig {
                compute: or_cores(layers.whole("threads.compute", 0, 4096)?),
                io: or_cores(layers.whole("threads.io", 0, 4096)?),
            },
            warnings: layers.warnings,
        })
    }
}

/// 0 and absent both mean: as many as there are cores.
fn or_cores(count: Option<u64>) -> usize {
    match count {
        None | Some(0) => std::thread::available_parallelism().map_or(1, usize::from),
        Some(count) => count as usize,
    }
}

/// The winning text of every key, with its source.
#[derive(Default)]
struct Layers {
    given: BTreeMap<&'static str, Given>,
    warnings: Vec<String>,
}

struct Given {
    text: String,
    source: Source,
}

impl Layers {
    fn add_file(&mut self, path: PathBuf, text: &str) -> Result<(), ConfigError> {
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

    fn add_environment(
        &mut self,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<(), ConfigError> {
        for (name, value) in environment {
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

    fn add_flags(&mut self, flags: &Flags) {
        for (key, flag, text) in flags.given() {
            self.given.insert(key, Given { text: text.to_owned(), source: Source::Flag(flag) });
        }
    }

    fn server(&self) -> Result<ServerConfig, ConfigError> {
        Ok(ServerConfig {
            grpc: self.address("server.grpc")?.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 8001))),
            http: self.address("server.http")?.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 8002))),
            models: self.given.get("server.models").map(|g| PathBuf::from(&g.text)),
            max_samples: self.whole("server.max_samples", 1, 1 << 20)?.unwrap_or(4096) as usize,
            max_bytes: self.bytes("server.max_bytes", 1024, GIB)?.unwrap_or(16 * MIB) as usize,
            max_requests: self.whole("server.max_requests", 1, 1 << 20)?.unwrap_or(8192) as usize,
            max_streams: self.whole("server.max_streams", 1, 1 << 20)?.unwrap_or(1024) as u32,
            drain: Duration::from_secs(self.whole("server.drain_seconds", 0, 86_400)?.unwrap_or(30)),
        })
    }

    fn batcher(&self, server: &ServerConfig) -> Result<BatcherConfig, ConfigError> {
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

    fn cache(&self) -> Result<CacheConfig, ConfigError> {
        let modes = &[("auto", CacheMode::Auto), ("on", CacheMode::On), ("off", CacheMode::Off)];
        let mode = self.choice("cache.mode", modes)?.unwrap_or(CacheMode::Auto);
        if mode == CacheMode::Off {
            return Ok(CacheConfig { mode, size: None, staging_bytes: None });
        }
        if let (Some(bytes), Some(fraction)) =
            (self.given.get("cache.bytes"), self.given.get("cache.fraction"))
        {
            return Err(ConfigError::Both {
                first: "cache.bytes",
                first_source: bytes.source.clone(),
                second: "cache.fraction",
                second_source: fraction.source.clone(),
            });
        }
        let bytes = self.bytes("cache.bytes", 1, u64::MAX)?.map(CacheSize::Bytes);
        let fraction = self.share("cache.fraction")?.map(CacheSize::Fraction);
        let staging_bytes = self.bytes("cache.staging_bytes", 1, u64::MAX)?;
        Ok(CacheConfig { mode, size: bytes.or(fraction), staging_bytes })
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

    fn whole(&self, key: &'static str, least: u64, most: u64) -> Result<Option<u64>, ConfigError> {
        let expected = || format!("a whole number from {least} to {most}");
        self.parse(key, expected, |text| {
            text.replace('_', "").parse().ok().filter(|n| (least..=most).contains(n))
        })
    }

    fn bytes(&self, key: &'static str, least: u64, most: u64) -> Result<Option<u64>, ConfigError> {
        let expected = || format!("bytes from {least} to {most}, plain or with K, M, G, T, Ki, Mi, Gi or Ti");
        self.parse(key, expected, |text| parse_bytes(text).filter(|n| (least..=most).contains(n)))
    }

    fn share(&self, key: &'static str) -> Result<Option<f64>, ConfigError> {
        let expected = || "a number above 0 and at most 1".to_owned();
        self.parse(key, expected, |text| text.parse().ok().filter(|f| *f > 0.0 && *f <= 1.0))
    }

    fn address(&self, key: &'static str) -> Result<Option<SocketAddr>, ConfigError> {
        let expected = || "host:port, such as 127.0.0.1:8001".to_owned();
        self.parse(key, expected, |text| text.to_socket_addrs().ok()?.next())
    }

    fn choice<T: Copy>(&self, key: &'static str, choices: &[(&str, T)]) -> Result<Option<T>, ConfigError> {
        let expected = || choices.iter().map(|c| c.0).collect::<Vec<_>>().join(", ");
        self.parse(key, expected, |text| choices.iter().find(|c| c.0 == text).map(|c| c.1))
    }
}

/// The environment's name of a key.
fn variable(key: &str) -> String {
    format!("{PREFIX}{}", key.replace('.', "_").to_uppercase())
}

/// `512`, `64K` (thousands), `16Mi` (1,024s), `1.5G`; a trailing `B` is allowed.
fn parse_bytes(text: &str) -> Option<u64> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(flags: &Flags, env: &[(&str, &str)], file: &str) -> Result<Config, ConfigError> {
        Config::resolve(flags, env.iter().map(|(k, v)| (k.into(), v.into())), Some(file))
    }

    fn refusal(env: &[(&str, &str)], file: &str) -> String {
        resolve(&Flags::default(), env, file).unwrap_err().to_string()
    }

    #[test]
    fn flags_win_over_environment_and_environment_over_file() {
        let file = "[server]\ngrpc = \"127.0.0.1:1\"\nhttp = \"127.0.0.1:2\"\nmax_samples = 5\n";
        let env = [("FLECHETTE_SERVER_GRPC", "127.0.0.1:3"), ("FLECHETTE_SERVER_HTTP", "127.0.0.1:4")];
        let flags = Flags { grpc: Some("127.0.0.1:5".to_owned()), ..Flags::default() };
        let config = resolve(&flags, &env, file).unwrap();
        assert_eq!(config.server.grpc.port(), 5);
        assert_eq!(config.server.http.port(), 4);
        assert_eq!(config.server.max_samples, 5);
        assert!(config.warnings.is_empty());
    }

    #[test]
    fn defaults_are_the_documented_limits() {
        let config = resolve(&Flags::default(), &[], "").unwrap();
        assert_eq!(config.server.max_samples, 4096);
        assert_eq!(config.server.max_bytes, 16 << 20);
        assert_eq!(config.server.grpc.to_string(), "127.0.0.1:8001");
        assert_eq!(config.server.http.to_string(), "127.0.0.1:8002");
        assert_eq!(config.cache, CacheConfig { mode: CacheMode::Auto, size: None, staging_bytes: None });
    }

    #[test]
    fn a_bad_value_names_the_key_the_source_and_what_came() {
        let text = refusal(&[("FLECHETTE_SERVER_MAX_SAMPLES", "many")], "");
        assert_eq!(
            text,
            "server.max_samples (environment FLECHETTE_SERVER_MAX_SAMPLES): \
             expected a whole number from 1 to 1048576, got \"many\""
        );
        assert!(refusal(&[], "[cache]\nmode = \"maybe\"").contains("cache.mode"));
        assert!(refusal(&[], "[cache]\nmode = true").contains("expected a string or a number"));
        assert!(refusal(&[("FLECHETTE_SERVER_GRPC", "nowhere")], "").contains("host:port"));
        assert!(refusal(&[("FLECHETTE_CACHE_FRACTION", "NaN")], "").contains("cache.fraction"));
        assert!(refusal(&[], "[server\n").contains("config file"));
    }

    #[test]
    fn every_key_can_be_set_from_the_environment() {
        for key in KEYS {
            let text = refusal_or_ok(&variable(key));
            assert!(!text.contains("unknown"), "{key}: {text}");
        }
    }

    fn refusal_or_ok(variable: &str) -> String {
        match resolve(&Flags::default(), &[(variable, "1")], "") {
            Ok(config) => config.warnings.join(" "),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn unknown_names_are_warned_of_and_the_tests_own_is_not() {
        let env = [("FLECHETTE_CACHE_SIZE", "1"), ("FLECHETTE_DATA", "/x"), ("PATH", "/bin")];
        let config = resolve(&Flags::default(), &env, "loose = 1\n[server]\nporto = 1\n").unwrap();
        assert_eq!(config.warnings.len(), 3, "{:?}", config.warnings);
        assert!(config.warnings.iter().any(|w| w.contains("server.porto")));
        assert!(config.warnings.iter().any(|w| w.contains("FLECHETTE_CACHE_SIZE")));
    }

    #[test]
    fn bytes_and_fraction_exclude_each_other_unless_the_cache_is_off() {
        let env = [("FLECHETTE_CACHE_BYTES", "64Mi"), ("FLECHETTE_CACHE_FRACTION", "0.1")];
        let text = refusal(&env, "");
        assert!(text.contains("cache.bytes") && text.contains("cache.fraction"), "{text}");
        let config = resolve(&Flags::default(), &env, "[cache]\nmode = \"off\"").unwrap();
        assert_eq!(config.cache.size, None);
    }

    #[test]
    fn bytes_take_suffixes() {
        let cases =
            [("512", 512), ("64K", 64_000), ("1.5Ki", 1536), ("2 GB", 2_000_000_000), ("1GiB", 1 << 30)];
        for (text, bytes) in cases {
            assert_eq!(parse_bytes(text), Some(bytes), "{text}");
        }
        for text in ["", "K", "-1", "-1K", "1X", "inf K", "1e30G"] {
            assert_eq!(parse_bytes(text), None, "{text}");
        }
    }

    #[test]
    fn a_queue_smaller_than_one_request_is_refused() {
        let text = refusal(&[("FLECHETTE_BATCHER_QUEUE_SAMPLES", "100")], "");
        assert!(text.contains("batcher.queue_samples") && text.contains("4096"), "{text}");
    }
}
