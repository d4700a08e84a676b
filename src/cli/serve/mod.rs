//! `flechette serve`: serves every model of a directory over gRPC until SIGTERM or SIGINT.
//!
//! The ports are bound first, so a port in use is reported at once, and `/healthz` and `/readyz` answer while
//! a thread loads the models (`start`). If a model cannot be loaded, the others are served.
//!
//! - `start`: what happens between the binding of the ports and the last model that is loaded;
//! - `loader`: loads a model; `cache`: the lookup tier of a model;
//! - `add`: adds models to the server, and remembers those that could not be loaded; `stamps`: whether files
//!   have changed since;
//! - `warm`: hot rows, saved and loaded;
//! - `versions`: which versions of a model are loaded; `shadow`: the engine of a shadow;
//! - `watch`: new versions and new models, while the server runs; `reload`: new settings at SIGHUP;
//! - `changes`: models that clients load and unload, and labels that they set.

mod add;
mod cache;
mod changes;
mod loader;
mod reload;
mod shadow;
mod stamps;
mod start;
mod versions;
mod warm;
mod watch;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use anyhow::{Context, anyhow};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use crate::batcher::CORES;
use crate::cli::train::interrupt::OnSignal;
use crate::cli::train::serve_flags::{OptionalServeTrain, ServeTrainFlags};
use crate::cli::train::serve_train::ServeTrain;
use crate::cli::{InputError, runtime};
use crate::config::{Config, Flags, Layers};
use crate::engine::Engine;
use crate::metrics::Metrics;
use crate::predict::Predict;
use crate::server::{Drained, Learning, Server, ServerError, ServerParts, terminated};
use crate::store::{self, StoreError};
use crate::sync::EvenPoisoned;
use crate::types::Version;
use add::Adder;
use cache::RowMemory;
use loader::Loader;
pub(crate) use reload::EarlyHangup;
use reload::{LiveSettings, Reloader};
pub(crate) use start::models_not_there;
use start::{Start, Started};
use versions::VersionRefusal;
pub(crate) use warm::Saving;
use watch::WatchChannel;
pub(crate) use watch::{Wake, WatchCommand, Watching};

/// How long the end of the server waits for blocking tasks.
const RUNTIME_WAIT: Duration = Duration::from_secs(1);

/// Flags of `serve`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub settings: Flags,
    #[command(flatten)]
    training: OptionalServeTrain,
}

/// Serves until SIGTERM or SIGINT, then drains. A second signal ends the process at once. SIGHUP reads the
/// settings again; `settings` are those of `config`. `early` has a SIGHUP that came before.
///
/// # Errors
/// When a setting, the directory or a port cannot be used; and at the end, if training has failed.
pub(crate) fn run(args: Args, config: &Config, settings: Layers, early: EarlyHangup) -> anyhow::Result<()> {
    config.open_administration().iter().for_each(|warning| tracing::warn!("{warning}"));
    let training = args.training.0;
    let models = models_dir(config, training.is_some())?;
    let metrics = if config.server.metrics { Metrics::new() } else { Metrics::disabled() };
    let metrics = Arc::new(metrics.context("metrics")?);
    let learns = training.as_ref().and_then(ServeTrainFlags::learns);
    let signalled = Arc::default();
    let _second_signal = OnSignal::set_flag(&signalled)?;
    let runtime = runtime(config)?;
    let ended = runtime.block_on(async {
        let terminated = unless_signalled(signalled, terminated().context("signals")?);
        let hangup = signal(SignalKind::hangup()).context("signals")?;
        let learning =
            Learning { models: models.clone(), config: config.learn, only: learns.into_iter().collect() };
        let server = bind(config, Vec::new(), metrics.clone(), learning).await?;
        tracing::info!("listening on {} for gRPC and on {} for HTTP", server.grpc_addr(), server.http_addr());
        let (live, channel, registry) = (LiveSettings::new(config), WatchChannel::new(), server.registry());
        let (wake, layers) = (channel.wake.clone(), settings);
        let reloader = Reloader { layers, live: live.clone(), registry: registry.clone(), wake };
        tokio::spawn(reloader.run(hangup, early));
        let config = config.clone();
        let starting = Start { config, models, metrics, training, registry, live, channel }.begin()?;
        run_server(server, starting, terminated).await
    });
    // A blocking task may wait for a disk that does not answer. The end of the process ends it.
    runtime.shutdown_timeout(RUNTIME_WAIT);
    ended
}

/// The directory of the models. Training creates it.
///
/// # Errors
/// When it is not set; and when it cannot be read, unless the server trains.
fn models_dir(config: &Config, trains: bool) -> anyhow::Result<PathBuf> {
    let models = config.server.models.clone();
    let models = models.ok_or_else(|| InputError(anyhow!("server.models: missing: give --models DIR")))?;
    if !trains {
        model_names(&models)?;
    }
    Ok(models)
}

/// The models of the directory.
///
/// # Errors
/// When the directory cannot be read. That is a wrong setting, unless the disk has failed: then a restart may
/// help.
fn model_names(models: &Path) -> anyhow::Result<Vec<String>> {
    let error = |error| match error {
        StoreError::Io { .. } => anyhow::Error::from(error),
        _ => InputError(error.into()).into(),
    };
    store::models(models).map_err(error).context("server.models")
}

/// Serves until `terminated`, and ends what `starting` has started by then.
///
/// # Errors
/// When the models cannot be loaded, and those of [`stop`].
async fn run_server(
    server: Server,
    mut starting: oneshot::Receiver<anyhow::Result<Started>>,
    terminated: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let (grpc, http) = (server.grpc_addr(), server.http_addr());
    let mut started = None;
    let terminated = async {
        terminated.await;
        tracing::info!("SIGTERM or SIGINT: the server drains; a second signal ends it");
    };
    let drained = server.run(async {
        tokio::pin!(terminated);
        tokio::select! {
            () = &mut terminated => return,
            result = &mut starting => started = Some(ended(result)),
        }
        if let Some(Ok(Started { served, .. })) = &started {
            tracing::info!(%grpc, %http, models = served, "serving");
            terminated.await;
        }
    });
    let drained = drained.await;
    // It may have started since the signal.
    match started.or_else(|| starting.try_recv().ok()).transpose()? {
        Some(started) => stop(started, drained),
        None => {
            drained?;
            tracing::info!("stopped before all models were loaded");
            Ok(())
        }
    }
}

/// Ends with `terminated`, or at once if the flag was set before: by a signal that came while nothing waited
/// for one yet.
async fn unless_signalled(signalled: Arc<AtomicBool>, terminated: impl Future<Output = ()>) {
    if !signalled.load(Ordering::SeqCst) {
        terminated.await;
    }
}

/// Ends what runs beside the server. Blocks, which is fine because no call is in flight.
///
/// # Errors
/// When the server has failed, or training has.
fn stop(started: Started, drained: Result<Drained, ServerError>) -> anyhow::Result<()> {
    let Started { watching, saving, training, .. } = started;
    drop(watching);
    let trained = training.map_or(Ok(()), ServeTrain::end);
    let drained = drained?;
    // Saves the hot rows a last time.
    drop(saving);
    tracing::info!(unfinished = drained.unfinished, "stopped");
    trained
}

/// The result of the thread that loads the models.
fn ended(result: Result<anyhow::Result<Started>, oneshot::error::RecvError>) -> anyhow::Result<Started> {
    result.unwrap_or_else(|_| Err(anyhow!("the thread that loads the models panicked")))
}

/// Binds both ports.
async fn bind(
    config: &Config,
    models: Vec<Arc<dyn Predict>>,
    metrics: Arc<Metrics>,
    learning: Learning,
) -> anyhow::Result<Server> {
    let parts = ServerParts {
        models,
        metrics,
        server: config.server.clone(),
        tls: config.tls.clone(),
        auth: config.auth.clone(),
        batchers: config.batchers.clone(),
        learning: Some(learning),
        slow: config.log.slow,
        otel: config.otel.clone(),
    };
    Server::bind(parts).await.map_err(|error| match error {
        ServerError::File(error) => InputError(error.into()).into(),
        error => error.into(),
    })
}

/// The runtime that serves the network.
///
/// # Errors
/// When the system cannot start a thread.
pub fn runtime(config: &Config) -> anyhow::Result<tokio::runtime::Runtime> {
    let before_sleep = || {
        CORES.wait_for_one();
    };
    runtime::with_threads(config.threads.io, before_sleep).context("threads.io")
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
    /// The versions that were refused when it was loaded.
    refused: Arc<BTreeMap<Version, VersionRefusal>>,
}

/// All loaded models. Models are added and removed while the server runs.
#[derive(Clone, Default)]
pub(crate) struct LoadedModels(Arc<RwLock<Vec<LoadedModel>>>);

impl LoadedModels {
    fn all(&self) -> Vec<LoadedModel> {
        self.0.read().even_poisoned().clone()
    }

    fn engines(&self) -> Vec<Arc<Engine>> {
        self.all().into_iter().map(|model| model.engine).collect()
    }

    fn add(&self, model: LoadedModel) {
        self.0.write().even_poisoned().push(model);
    }

    fn find(&self, name: &str) -> Option<LoadedModel> {
        self.all().into_iter().find(|model| model.engine.describe().model == name)
    }

    fn remove(&self, name: &str) -> Option<LoadedModel> {
        let mut models = self.0.write().even_poisoned();
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
        let metrics = Arc::new(Metrics::new().context("metrics")?);
        let serving = Self::new(Loader::new(config, models, metrics, LiveSettings::new(config))?);
        let names = model_names(models)?;
        if names.is_empty() {
            return Err(InputError(anyhow!("server.models: no model in {}", models.display())).into());
        }
        for name in &names {
            let model = serving.loader.load(name).with_context(|| format!("model {name:?}"))?;
            serving.models.add(model);
        }
        Ok(serving)
    }

    /// No model yet.
    fn new(loader: Loader) -> Self {
        Self { models: LoadedModels::default(), loader: Arc::new(loader) }
    }

    /// One engine for each model.
    #[must_use]
    pub fn engines(&self) -> Vec<Arc<Engine>> {
        self.models.engines()
    }

    /// Until the result is dropped: takes over new versions, and serves new models, every
    /// `models.watch_seconds` unless that is 0; loads and unloads models for clients. (`serve` lets clients
    /// in before the models are loaded: `start`.)
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub fn watch(&self, server: &Server) -> anyhow::Result<Watching> {
        let channel = WatchChannel::new();
        let adder = Adder::new(&self.loader, &self.models, server.registry(), channel.wake.clone());
        let adder = adder.context("models: threads")?;
        channel.open(&server.registry(), &self.loader.models);
        Self::watch_with(adder, channel)
    }

    /// Starts the thread of [`Self::watch`] for the models of `adder`. What was sent through `channel` before
    /// waits for it.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    fn watch_with(adder: Adder, channel: WatchChannel) -> anyhow::Result<Watching> {
        Watching::start(adder, channel).context("models.watch_seconds: thread")
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
        let models = self.engines().into_iter().map(|engine| engine as Arc<dyn Predict>).collect();
        let learning =
            Learning { models: self.loader.models.clone(), config: config.learn, only: Vec::new() };
        bind(config, models, self.loader.metrics.clone(), learning).await
    }
}
