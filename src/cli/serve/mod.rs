//! `flechette serve`: loads every model of a directory and serves them over gRPC until SIGTERM or SIGINT.
//!
//! - `cache`: the lookup tier of a model;
//! - `warm`: hot rows, saved and loaded;
//! - `watch`: new versions and new models, while the server runs;
//! - `changes`: models that clients load and unload.

mod cache;
mod changes;
mod warm;
mod watch;

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use anyhow::{Context, anyhow};

use crate::cli::InputError;
use crate::cli::train::beside::{Beside, BesideFlags, OptionalBeside};
use crate::cli::train::run::ToServer;
use crate::cli::training::compute_threads;
use crate::config::{Config, DeviceKind, Flags, TraceConfig};
use crate::device::cuda::Nvidia;
use crate::device::{self, Choice, cuda};
use crate::engine::{Engine, EngineParts, read_weights};
use crate::metrics::{Metrics, ModelMetrics};
use crate::model::Model;
use crate::predict::Predict;
use crate::schema::Schema;
use crate::server::{Learning, Server, ServerParts, terminated};
use crate::store::hot_rows::STATE;
use crate::store::{self, Opened, Purpose};
use crate::trace::recorder::{Recorder, RecorderOptions};
use cache::{BuiltTier, RowMemory, TierBuilder};

pub(crate) use warm::Saving;
use watch::Wakes;
pub(crate) use watch::{Ask, Watching};

/// Flags of `serve`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub settings: Flags,
    #[command(flatten)]
    training: OptionalBeside,
}

/// Serves until SIGTERM or SIGINT, then drains.
///
/// # Errors
/// When a setting, the directory, a model or a port cannot be used; and at the end, if training has failed.
pub(crate) fn run(args: Args, config: &Config) -> anyhow::Result<()> {
    let models = config.server.models.clone();
    let models = models.ok_or_else(|| InputError(anyhow!("server.models: missing: give --models DIR")))?;
    let (metrics, wakes) = (Arc::new(Metrics::new().context("metrics")?), Wakes::new());
    let prepare = |flags: BesideFlags| {
        let server = ToServer { training: metrics.training(flags.name()), wake: wakes.wake.clone() };
        Beside::prepare(flags, config, &models, server)
    };
    let learns = args.training.0.as_ref().and_then(BesideFlags::learns);
    let mut training = args.training.0.map(prepare).transpose()?;
    let serving = Serving::load_with(config, &models, metrics)?;
    runtime(config)?.block_on(async {
        let terminated = terminated().context("signals")?;
        let server = serving.bind_learning(config, learns.into_iter().collect()).await?;
        tracing::info!(grpc = %server.grpc_addr(), http = %server.http_addr(), "serving");
        let saving = serving.save_hot_rows(config, &models)?;
        let watching = serving.watch_with(&server, wakes)?;
        training.as_mut().map_or(Ok(()), Beside::begin)?;
        let drained = server.run(terminated).await;
        drop(watching);
        // Blocks, which is fine because no call is in flight.
        let trained = training.map_or(Ok(()), Beside::end);
        let drained = drained?;
        // The drop saves the hot rows a last time. It blocks, which is fine because no call is in flight.
        drop(saving);
        tracing::info!(unfinished = drained.unfinished, "stopped");
        trained
    })
}

/// The runtime that serves the network.
///
/// # Errors
/// When the system cannot start a thread.
pub fn runtime(config: &Config) -> anyhow::Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(config.threads.io).enable_all().build().context("threads.io")
}

/// Loaded models, ready to be served.
pub struct Serving {
    models: LoadedModels,
    loader: Arc<Loader>,
}

/// A loaded model.
#[derive(Clone)]
pub(crate) struct LoadedModel {
    engine: Arc<Engine>,
    memory: RowMemory,
}

/// All loaded models. Models are added and removed while the server runs.
#[derive(Clone, Default)]
pub(crate) struct LoadedModels(Arc<RwLock<Vec<LoadedModel>>>);

impl LoadedModels {
    fn all(&self) -> Vec<LoadedModel> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn engines(&self) -> Vec<Arc<Engine>> {
        self.all().into_iter().map(|model| model.engine).collect()
    }

    fn add(&self, model: LoadedModel) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).push(model);
    }

    fn find(&self, name: &str) -> Option<LoadedModel> {
        self.all().into_iter().find(|model| model.engine.describe().model == name)
    }

    fn remove(&self, name: &str) -> Option<LoadedModel> {
        let mut models = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let at = models.iter().position(|model| model.engine.describe().model == name)?;
        Some(models.remove(at))
    }
}

impl Serving {
    /// Loads the highest good version of every model in the directory.
    ///
    /// # Errors
    /// When the directory has no models, a model has no good version, or a cache cannot be built.
    pub fn load(config: &Config, models: &Path) -> anyhow::Result<Self> {
        Self::load_with(config, models, Arc::new(Metrics::new().context("metrics")?))
    }

    /// [`Self::load`] with the metrics of the process.
    fn load_with(config: &Config, models: &Path, metrics: Arc<Metrics>) -> anyhow::Result<Self> {
        let config = Arc::new(config.clone());
        let loader = Loader {
            models: models.to_owned(),
            tiers: TierBuilder {
                device: choose_device(&config)?,
                counts: cache::counts(&config.cache)?,
                config: config.clone(),
            },
            threads: Arc::new(compute_threads(&config)?),
            metrics,
            config,
        };
        let names = store::models(models).map_err(|e| InputError(e.into())).context("server.models")?;
        if names.is_empty() {
            return Err(InputError(anyhow!("server.models: no model in {}", models.display())).into());
        }
        let models = LoadedModels::default();
        for name in &names {
            models.add(loader.load(name).with_context(|| format!("model {name:?}"))?);
        }
        Ok(Self { models, loader: Arc::new(loader) })
    }

    /// One engine for each model.
    #[must_use]
    pub fn engines(&self) -> Vec<Arc<Engine>> {
        self.models.engines()
    }

    /// Until the result is dropped: takes over new versions, and serves new models, every
    /// `models.watch_seconds` unless that is 0; loads and unloads models for clients.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub fn watch(&self, server: &Server) -> anyhow::Result<Watching> {
        self.watch_with(server, Wakes::new())
    }

    /// [`Self::watch`], which also takes over a version when it is named.
    fn watch_with(&self, server: &Server, wakes: Wakes) -> anyhow::Result<Watching> {
        let every = self.loader.config.watch;
        let watching = Watching::start(&self.loader, &self.models, server.registry(), (every, wakes));
        watching.context("models.watch_seconds: thread")
    }

    /// Saves the hot rows of the caches every `cache.save_seconds`, and a last time when the result is
    /// dropped. Does nothing if `cache.warm` is off.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub fn save_hot_rows(&self, config: &Config, models: &Path) -> anyhow::Result<Option<Saving>> {
        let saving = config.cache.warm.then(|| Saving::start(&self.models, models, config.cache.save));
        saving.transpose().context("cache.save_seconds: thread")
    }

    /// Binds both ports.
    ///
    /// # Errors
    /// When a port cannot be bound.
    pub async fn bind(&self, config: &Config) -> anyhow::Result<Server> {
        self.bind_learning(config, Vec::new()).await
    }

    /// As [`Self::bind`]. Also takes Learn calls for these models.
    async fn bind_learning(&self, config: &Config, only: Vec<String>) -> anyhow::Result<Server> {
        let models = self.engines().into_iter().map(|engine| engine as Arc<dyn Predict>).collect();
        let (server, batcher) = (config.server.clone(), config.batcher.clone());
        let learning = Learning { models: self.loader.models.clone(), config: config.learn, only };
        let metrics = self.loader.metrics.clone();
        Ok(Server::bind(ServerParts { models, metrics, server, batcher, learning: Some(learning) }).await?)
    }
}

/// The GPU to use, or `None` for the host.
fn choose_device(config: &Config) -> anyhow::Result<Option<Arc<Nvidia>>> {
    let open = || cuda::open(0, config.device.kernel_cache.as_deref());
    let device = device::choose(config.device.kind, open).map_err(|e| InputError(e.into()))?;
    if device.is_fallback() {
        tracing::warn!("{device}");
    } else {
        tracing::info!("{device}");
    }
    Ok(match device {
        Choice::Host { .. } => None,
        Choice::Cuda(device) => Some(Arc::new(device)),
    })
}

/// Loads models. All models share these fields.
pub(crate) struct Loader {
    config: Arc<Config>,
    models: PathBuf,
    tiers: TierBuilder,
    threads: Arc<rayon::ThreadPool>,
    metrics: Arc<Metrics>,
}

impl Loader {
    /// The engine of a model's highest good version. Fills its cache, unless `cache.warm` is off.
    fn load(&self, name: &str) -> anyhow::Result<LoadedModel> {
        let Self { config, models, .. } = self;
        let mut opened = store::open_latest(models, name, Purpose::Serve, check_weights)?.opened;
        let BuiltTier { tier, memory, ranked } = self.tiers.build(&mut opened)?;
        memory.prepare(&mut opened);
        let metrics = self.metrics.model(name, &opened.schema);
        let recorder = recorder_of(&config.trace, &opened.schema, &models.join(name), &metrics)?;
        let parts = EngineParts {
            name: name.to_owned(),
            lookup_tier: tier,
            metrics,
            threads: self.threads.clone(),
            max_samples: cache::max_samples(config),
        };
        let table_bytes = opened.store.row_bytes();
        let engine = Engine::new(opened, parts)?.with_pointers();
        match engine.self_test() {
            Err(error) if config.device.kind == DeviceKind::Cuda => return Err(error.into()),
            // With `auto` the engine has logged the failure, and computes scores on the host.
            Err(_) | Ok(()) => {}
        }
        let cache_bytes = engine.cache_stats().map(|stats| stats.total_bytes);
        let version = engine.version();
        tracing::info!(model = name, %version, table_bytes, cache_bytes = cache_bytes.unwrap_or(0), "loaded");
        if config.cache.warm && cache_bytes.is_some() {
            warm::fill(&engine, models, ranked);
        }
        let engine = Arc::new(match recorder {
            Some(recorder) => engine.with_recorder(recorder),
            None => engine,
        });
        Ok(LoadedModel { engine, memory })
    }
}

/// Checks that a version has the dense tensors of its architecture.
fn check_weights(opened: &Opened) -> Result<(), String> {
    let model = Model::new(&opened.schema);
    read_weights(&model, opened).map(|_| ()).map_err(|e| e.to_string())
}

/// Starts recording a model's accesses, if `trace.rate` is not 0. `folder` is the model's directory.
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
    let failed = || format!("trace.rate: cannot record in {}", options.folder.display());
    Ok(Some(recorder.with_context(failed)?))
}
