//! Flags, environment and file to validated objects; the only reader of the environment.
//!
//! Every key has one name, `section.key`. It is read from three layers: a flag wins over the
//! environment (`FLECHETTE_<SECTION>_<KEY>`), the environment over the TOML file. A layer holds
//! plain text with the place it came from, and text becomes a value in one function a type, so a
//! bad value is always reported as key, place, what was expected and what was got. Names that
//! nobody knows are warnings, so that a newer file does not stop an older program.

mod cache;
mod layers;

use std::ffi::OsString;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use layers::Layers;

pub(crate) use cache::{CacheAdmission, CacheConfig, CacheEviction, CacheMode, CacheSize};
pub(crate) use layers::{BYTES_FORM, parse_bytes};

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
    /// The recording of accesses.
    pub trace: TraceConfig,
    /// Which device tier, and what it keeps.
    pub device: DeviceConfig,
    /// Thread counts.
    pub threads: ThreadsConfig,
    /// `log.level`: what is logged: a level or filter directives, `warn,flechette::server=debug`.
    pub log_level: String,
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
    /// `server.max_inflight_bytes`: most memory that the messages of all Ctr calls in flight may
    /// take, as they come and decoded. At least `server.max_bytes`.
    pub max_inflight_bytes: usize,
    /// `server.max_connections`: most connections a port; more are closed at once.
    pub max_connections: usize,
    /// `server.http_idle_seconds`: an HTTP connection is closed when it has got no answer for so
    /// long: since it came, or since its last answer.
    pub http_idle: Duration,
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

/// Section `trace`: the recording of a server's accesses, for `flechette plan`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TraceConfig {
    /// `trace.rate`: the share of all rows whose accesses are recorded, 0 to 1; 0 records nothing.
    pub rate: f64,
    /// `trace.max_bytes`: most bytes of a model's recordings; the oldest are removed.
    pub max_bytes: u64,
}

/// Section `device`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// `device.kind`.
    pub kind: DeviceKind,
    /// `device.kernel_cache`: the folder where compiled kernels are kept, `off` for none. Unless given:
    /// `flechette/kernels` in `$XDG_CACHE_HOME` or `$HOME/.cache`, none where both are missing.
    pub kernel_cache: Option<PathBuf>,
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
    /// A key that another key's value asks for.
    #[error("{key}: missing: {wanted_by} = {got} ({source_of}) needs it")]
    Missing {
        /// The key that is missing.
        key: &'static str,
        /// The key that asks for it.
        wanted_by: &'static str,
        /// That key's value.
        got: String,
        /// Where that stands.
        source_of: Source,
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
        Ok(Self {
            batcher,
            server,
            cache: layers.cache()?,
            trace: layers.trace()?,
            device: layers.device()?,
            threads: ThreadsConfig {
                compute: or_cores(layers.whole("threads.compute", 0, 4096)?),
                io: or_cores(layers.whole("threads.io", 0, 4096)?),
            },
            log_level: layers.text("log.level").unwrap_or("info").to_owned(),
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

#[cfg(test)]
mod tests;
