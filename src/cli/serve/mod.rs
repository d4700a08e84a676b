//! `flechette serve`: loads every model of a directory and answers over gRPC until told to stop.

mod cache;
mod warm;

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, anyhow};

use crate::cli::InputError;
use crate::config::{Config, DeviceKind, Flags, TraceConfig};
use crate::device::{self, Choice, cuda};
use crate::engine::{Engine, EngineParts, LookupTier, read_weights};
use crate::metrics::{Metrics, ModelMetrics};
use crate::model::Model;
use crate::predict::Predict;
use crate::schema::Schema;
use crate::server::{Server, ServerParts, terminated};
use crate::store::hot_rows::STATE;
use crate::store::{self, Opened};
use crate::trace::recorder::{Recorder, RecorderOptions};
use cache::{Fronted, Fronts};

pub(crate) use warm::Saving;

/// Flags of `serve`. Every one wins over the environment and the file.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Directory of models
    #[arg(long, value_name = "DIR")]
    pub models: Option<String>,
    /// Where gRPC listens [default: 127.0.0.1:8001]
    #[arg(long, value_name = "ADDRESS")]
    pub grpc: Option<String>,
    /// Where metrics, health and status listen [default: 127.0.0.1:8002]
    #[arg(long, value_name = "ADDRESS")]
    pub http: Option<String>,
    /// auto, host or cuda
    #[arg(long, value_name = "KIND")]
    pub device: Option<String>,
    /// Threads that compute; all cores when 0
    #[arg(long, value_name = "N")]
    pub threads: Option<String>,
    /// auto, on or off
    #[arg(long, value_name = "MODE")]
    pub cache_mode: Option<String>,
    /// Bytes of the cache, index and rows: 512MiB, 4G, ...
    #[arg(long, value_name = "BYTES")]
    pub cache_bytes: Option<String>,
    /// Room for this share of a model's rows: 0.1
    #[arg(long, value_name = "SHARE")]
    pub cache_fraction: Option<String>,
}

impl Args {
    pub(crate) fn flags(&self) -> Flags {
        Flags {
            grpc: self.grpc.clone(),
            http: self.http.clone(),
            models: self.models.clone(),
            threads: self.threads.clone(),
            device: self.device.clone(),
            cache_mode: self.cache_mode.clone(),
            cache_bytes: self.cache_bytes.clone(),
            cache_fraction: self.cache_fraction.clone(),
            ..Flags::default()
        }
    }
}

/// Serves until SIGTERM or SIGINT, then drains.
///
/// # Errors
/// A setting, a directory, a model or a port that cannot be used.
pub(crate) fn run(config: &Config) -> anyhow::Result<()> {
    let models = config.server.models.clone();
    let models = models.ok_or_else(|| InputError(anyhow!("server.models: missing: give --models DIR")))?;
    let serving = Serving::load(config, &models)?;
    runtime(config)?.block_on(async {
        let terminated = terminated().context("signals")?;
        let server = serving.bind(config).await?;
        tracing::info!(grpc = %server.grpc_addr(), http = %server.http_addr(), "serving");
        let saving = serving.save_hot_rows(config, &models)?;
        let drained = server.run(terminated).await?;
        // Saves for the last time. No call waits for this thread any more.
        drop(saving);
        tracing::info!(given_up = drained.given_up, "stopped");
        Ok(())
    })
}

/// The runtime that speaks the network.
///
/// # Errors
/// When the system gives no threads.
pub fn runtime(config: &Config) -> anyhow::Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(config.threads.io).enable_all().build().context("threads.io")
}

/// Loaded models, ready to be served.
pub struct Serving {
    /// One engine a model.
    pub engines: Vec<Arc<Engine>>,
    metrics: Arc<Metrics>,
}

impl Serving {
    /// Loads the highest good version of every model in the directory.
    ///
    /// # Errors
    /// A directory without models, a model without a good version, a cache that cannot be made.
    pub fn load(config: &Config, models: &Path) -> anyhow::Result<Self> {
        let open = || cuda::open(0, config.device.kernel_cache.as_deref());
        let device = device::choose(config.device.kind, open).map_err(|e| InputError(e.into()))?;
        if device.is_fallback() {
            tracing::warn!("{device}");
        } else {
            tracing::info!("{device}");
        }
        let device = match device {
            Choice::Host { .. } => None,
            Choice::Cuda(device) => Some(Arc::new(device)),
        };
        let threads = rayon::ThreadPoolBuilder::new().num_threads(config.threads.compute).build();
        let threads = Arc::new(threads.context("threads.compute")?);
        let metrics = Arc::new(Metrics::new().context("metrics")?);
        let names = store::models(models).map_err(|e| InputError(e.into()))?;
        if names.is_empty() {
            return Err(InputError(anyhow!("server.models: no model in {}", models.display())).into());
        }
        let fronts = Fronts { config, device, counts: cache::counts(&config.cache)? };
        let engine = |name: &String| -> anyhow::Result<Arc<Engine>> {
            let mut latest = store::open_latest_with(models, name, check_weights)?;
            let Fronted { front, ranked } = fronts.make(&mut latest.opened)?;
            match &front {
                LookupTier::Store => latest.opened.store.prefault(),
                // What the cache misses is mostly cold, and a page of it is enough.
                _ if !cache::fits_ram(&latest.opened) => latest.opened.store.expect_disk(),
                _ => {}
            }
            let metrics = metrics.model(name, &latest.opened.schema);
            let recorder = recorder_of(&config.trace, &latest.opened.schema, &models.join(name), &metrics)?;
            let parts = EngineParts {
                name: name.clone(),
                lookup_tier: front,
                metrics,
                threads: threads.clone(),
                max_samples: cache::max_samples(config),
            };
            let table_bytes = latest.opened.store.row_bytes();
            let engine = Engine::new(latest.opened, parts)?.with_pointers();
            match engine.self_test() {
                Err(error) if config.device.kind == DeviceKind::Cuda => return Err(error.into()),
                // `auto`: the engine has said so, and scores from the store.
                Err(_) | Ok(()) => {}
            }
            let cache_bytes = engine.cache_stats().map(|stats| stats.total_bytes);
            let version = engine.version();
            tracing::info!(model = name, %version, table_bytes, cache_bytes = cache_bytes.unwrap_or(0), "loaded");
            if config.cache.warm && cache_bytes.is_some() {
                warm::fill(&engine, models, ranked);
            }
            Ok(Arc::new(match recorder {
                Some(recorder) => engine.with_recorder(recorder),
                None => engine,
            }))
        };
        let engines = names.iter().map(|name| engine(name).with_context(|| format!("model {name:?}")));
        let engines = engines.collect::<Result<_, _>>()?;
        Ok(Self { engines, metrics })
    }

    /// Saves the hot rows of the caches now and then, and once more when what it gives is dropped; nothing where
    /// `cache.warm` is off.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn save_hot_rows(&self, config: &Config, models: &Path) -> anyhow::Result<Option<Saving>> {
        let saving = config.cache.warm.then(|| Saving::start(&self.engines, models, config.cache.save));
        saving.transpose().context("cache.save_seconds: thread")
    }

    /// Binds both ports.
    ///
    /// # Errors
    /// A port that cannot be had.
    pub async fn bind(&self, config: &Config) -> anyhow::Result<Server> {
        let models = self.engines.iter().map(|engine| engine.clone() as Arc<dyn Predict>).collect();
        let (server, batcher) = (config.server.clone(), config.batcher.clone());
        Ok(Server::bind(ServerParts { models, metrics: self.metrics.clone(), server, batcher }).await?)
    }
}

/// Whether a version's dense tensors are its architecture's.
fn check_weights(opened: &Opened) -> Result<(), String> {
    let model = Model::new(&opened.schema);
    read_weights(&model, opened).map(|_| ()).map_err(|e| e.to_string())
}

/// The recorder of a model's accesses, if there is to be one. `folder` is the model's.
fn recorder_of(
    config: &TraceConfig,
    schema: &Schema,
    folder: &Path,
    metrics: &Arc<ModelMetrics>,
) -> anyhow::Result<Option<Recorder>> {
    if config.rate == 0.0 {
        return Ok(None);
    }
    let folder = folder.join(STATE);
    let options = RecorderOptions { folder, rate: config.rate, max_bytes: config.max_bytes };
    let recorder = Recorder::start(schema, &options, metrics.clone());
    let told = || format!("trace.rate: {}: cannot record", options.folder.display());
    Ok(Some(recorder.with_context(told)?))
}
