//! Configuration: flags, environment and file become validated values. Nothing else reads the environment.
//!
//! Every key has one name, `section.key` (`settings.rs`). A flag wins over the environment variable
//! (`FLECHETTE_<SECTION>_<KEY>`), which wins over the TOML file. A layer keeps plain texts with their sources
//! (`layers.rs`). One place parses them (`values.rs`), so every error names the key, its source, what was
//! expected and what was found. Unknown names are errors (`unknown.rs`).

mod cache;
mod effective;
mod layers;
mod models;
mod reload;
mod sections;
mod security;
mod server;
pub(crate) mod settings;
mod traffic;
mod unknown;
mod values;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use settings::help;

pub(crate) use cache::{CacheAdmission, CacheConfig, CacheEviction, CacheMode, CacheSize};
pub(crate) use layers::Layers;
pub use models::Batchers;
pub(crate) use reload::Reloaded;
pub use sections::{BatcherConfig, LearnConfig, OtelConfig, TableMemory};
pub(crate) use sections::{
    DeviceConfig, DeviceKind, LogConfig, LogFormat, ThreadsConfig, TraceConfig, VersionsConfig,
};
pub use security::{AuthConfig, TlsConfig};
pub use server::ServerConfig;
#[cfg(test)]
pub(crate) use server::message_bytes;
pub(crate) use traffic::{
    CANARY, LABEL_FORM, MAX_LABELS, STABLE, Shadow, Sticky, TrafficConfig, VersionPolicy, is_label,
};
pub(crate) use values::{BYTES_FORM, parse_address, parse_bytes};

/// The texts of the flags that set a key; `None` if a flag is not given. `serve` has all of them.
#[allow(missing_docs)] // settings/ has the meaning of each key
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Flags {
    /// The TOML file.
    #[arg(skip)]
    pub config: Option<PathBuf>,
    #[arg(long, value_name = "DIR", help = help("server.models"))]
    pub models: Option<String>,
    #[arg(long, value_name = "ADDRESS", help = help("server.grpc"))]
    pub grpc: Option<String>,
    #[arg(long, value_name = "ADDRESS", help = help("server.http"))]
    pub http: Option<String>,
    #[arg(long, value_name = "KIND", help = help("device.kind"))]
    pub device: Option<String>,
    #[arg(long, value_name = "N", help = help("threads.compute"))]
    pub threads: Option<String>,
    #[arg(long, value_name = "MEMORY", help = help("store.memory"))]
    pub store_memory: Option<String>,
    #[arg(long, value_name = "MODE", help = help("cache.mode"))]
    pub cache_mode: Option<String>,
    #[arg(long, value_name = "BYTES", help = help("cache.bytes"))]
    pub cache_bytes: Option<String>,
    #[arg(long, value_name = "SHARE", help = help("cache.fraction"))]
    pub cache_fraction: Option<String>,
}

impl Flags {
    /// Key and text of every flag that is given.
    fn given(&self) -> impl Iterator<Item = (&'static str, &str)> {
        [
            ("server.grpc", &self.grpc),
            ("server.http", &self.http),
            ("server.models", &self.models),
            ("threads.compute", &self.threads),
            ("device.kind", &self.device),
            ("store.memory", &self.store_memory),
            ("cache.mode", &self.cache_mode),
            ("cache.bytes", &self.cache_bytes),
            ("cache.fraction", &self.cache_fraction),
        ]
        .into_iter()
        .filter_map(|(key, text)| Some((key, text.as_deref()?)))
    }
}

/// Why spans cannot be configured.
pub(crate) const NO_OTEL: &str = "this program was built without the cargo feature otel";

/// All settings, validated.
#[allow(missing_docs)] // settings/ has the meaning of each key
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub server: ServerConfig,
    pub tls: Option<TlsConfig>,
    pub auth: AuthConfig,
    /// How often the models' directory is read for new versions; `None`: only at start.
    pub(crate) watch: Option<Duration>,
    /// By the name of the model.
    pub(crate) traffic: BTreeMap<String, TrafficConfig>,
    pub(crate) batchers: Batchers,
    /// Where the tables of served versions are.
    pub(crate) memory: TableMemory,
    pub(crate) cache: CacheConfig,
    pub(crate) trace: TraceConfig,
    pub(crate) learn: LearnConfig,
    pub(crate) versions: VersionsConfig,
    pub(crate) device: DeviceConfig,
    pub(crate) threads: ThreadsConfig,
    pub(crate) log: LogConfig,
    /// `None`: no spans.
    pub(crate) otel: Option<OtelConfig>,
    /// Keys without effect, one sentence each, to be logged.
    pub(crate) warnings: Vec<String>,
}

/// The layer that gives a value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum SettingSource {
    Flag(&'static str),
    /// The name of the variable.
    Environment(String),
    File {
        path: PathBuf,
        line: usize,
    },
    /// No layer gives the value.
    Default,
}

impl fmt::Display for SettingSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(name) => write!(f, "flag {name}"),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::File { path, line } => write!(f, "file {}:{line}", path.display()),
            Self::Default => f.write_str("default"),
        }
    }
}

#[allow(missing_docs)] // the error texts document the variants
#[derive(Clone, Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("config file {}: {error}", path.display())]
    Read { path: PathBuf, error: Arc<std::io::Error> },
    #[error("config file {}: line {line}: {reason}", path.display())]
    Toml { path: PathBuf, line: usize, reason: String },
    #[error("{place}: unknown {what} {name}{}", did_you_mean(nearest.as_deref()))]
    Unknown { place: String, what: &'static str, name: String, nearest: Option<String> },
    #[error("{key} ({source_of}): expected {expected}, got {got}")]
    Value { key: String, source_of: SettingSource, expected: String, got: String },
    #[error("{key}: missing, but needed by {wanted_by} = {got} ({source_of})")]
    Missing { key: &'static str, wanted_by: &'static str, got: String, source_of: SettingSource },
    #[error(
        "{error}; the file is valid after a restart, which also applies the new values of {}", stay.join(", ")
    )]
    NeedsRestart { error: Box<Self>, stay: Vec<String> },
    #[error("{first} ({first_source}) and {second} ({second_source}): give one of the two, not both")]
    Both {
        first: &'static str,
        first_source: SettingSource,
        second: &'static str,
        second_source: SettingSource,
    },
}

fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |nearest| format!("; did you mean {nearest}?"))
}

impl Config {
    /// The settings of these flags, of an environment and of the text of a file.
    ///
    /// # Errors
    /// [`ConfigError`], which names the key and the source of its value.
    pub fn resolve(
        flags: &Flags,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
        file: Option<&str>,
    ) -> Result<Self, ConfigError> {
        Layers::read(flags, environment, file).config()
    }
}

/// Whether the environment limits the arenas of glibc's allocator (`mem/arenas.rs`). glibc reads it itself.
pub(crate) fn arenas_are_given() -> bool {
    std::env::var_os("MALLOC_ARENA_MAX").is_some()
}

impl Layers {
    /// Reads the file that the flags name, and the environment.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(crate) fn load(flags: &Flags) -> Result<Self, ConfigError> {
        let read = |path: &PathBuf| {
            let text = std::fs::read_to_string(path);
            text.map_err(|error| ConfigError::Read { path: path.clone(), error: error.into() })
        };
        let text = flags.config.as_ref().map(read).transpose()?;
        Ok(Self::read(flags, std::env::vars_os(), text.as_deref()))
    }

    fn read(
        flags: &Flags,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
        file: Option<&str>,
    ) -> Self {
        let mut layers = Self::default();
        if let Some(text) = file {
            layers.add_file(flags.config.as_deref().unwrap_or(Path::new("")), text);
        }
        layers.add_environment(environment);
        layers.add_flags(flags);
        layers
    }

    /// Validates everything.
    ///
    /// # Errors
    /// The first of [`Self::problems`].
    pub(crate) fn config(self) -> Result<Config, ConfigError> {
        self.build().map_err(|mut problems| problems.swap_remove(0))
    }

    /// Everything that is wrong: every unknown name, and the first wrong value of each section.
    pub(crate) fn problems(self) -> Vec<ConfigError> {
        self.build().err().unwrap_or_default()
    }

    /// Validates everything; the errors are not empty.
    fn build(mut self) -> Result<Config, Vec<ConfigError>> {
        let mut problems = Problems(std::mem::take(&mut self.errors));
        let server = problems.keep(self.server());
        let tls = problems.keep(self.tls());
        let auth = problems.keep(self.auth());
        if let (Some(server), Some(tls)) = (&server, &tls) {
            self.warn_of_tokens(server, tls.as_ref());
        }
        let batchers = server.as_ref().and_then(|server| problems.keep(self.batchers(server)));
        let watch = problems.keep(self.watch());
        let traffic = problems.keep(self.traffic());
        let memory = problems.keep(self.memory());
        let cache = problems.keep(self.cache());
        let trace = problems.keep(self.trace());
        let learn = problems.keep(self.learn());
        let versions = problems.keep(self.versions());
        let device = problems.keep(self.device());
        let threads = problems.keep(self.threads());
        let log = problems.keep(self.log());
        let otel = problems.keep(self.otel());
        // `None` after an error of a section.
        let config = || {
            Some(Config {
                server: server?,
                tls: tls?,
                auth: auth?,
                watch: watch?,
                traffic: traffic?,
                batchers: batchers?,
                memory: memory?,
                cache: cache?,
                trace: trace?,
                learn: learn?,
                versions: versions?,
                device: device?,
                threads: threads?,
                log: log?,
                otel: otel?,
                warnings: self.warnings,
            })
        };
        match config() {
            Some(config) if problems.0.is_empty() => Ok(config),
            _ => Err(problems.0),
        }
    }
}

/// What is wrong with the layers, in the order in which they are validated.
struct Problems(Vec<ConfigError>);

impl Problems {
    /// The value of a section, or its error is kept.
    fn keep<T>(&mut self, section: Result<T, ConfigError>) -> Option<T> {
        section.map_err(|error| self.0.push(error)).ok()
    }
}

#[cfg(test)]
mod tests;
