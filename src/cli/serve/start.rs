//! What `serve` does after its ports are bound: prepares training, loads the models, and starts the threads
//! that work beside the server.
//!
//! A thread does this, so that the server answers meanwhile. It is not waited for if the server is stopped.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::sync::oneshot;

use super::add::Adder;
use super::watch::{WatchChannel, Watching};
use super::{LiveSettings, Loader, Saving, Serving, model_names};
use crate::cli::train::run::RunMetrics;
use crate::cli::train::serve_flags::ServeTrainFlags;
use crate::cli::train::serve_train::ServeTrain;
use crate::config::{Config, TableMemory};
use crate::metrics::Metrics;
use crate::server::Registry;
use crate::store::{self, StoreError};

/// How long all models wait for the one that is trained.
const PREPARE_WAIT: Duration = Duration::from_secs(5);

/// How often the log says that the model that is trained cannot be served yet.
const SAID_EVERY: Duration = Duration::from_secs(60);

/// What the thread needs.
pub(crate) struct Start {
    pub config: Config,
    /// The directory of the models.
    pub models: PathBuf,
    pub metrics: Arc<Metrics>,
    pub training: Option<ServeTrainFlags>,
    pub registry: Registry,
    pub live: Arc<LiveSettings>,
    pub channel: WatchChannel,
}

/// What runs beside the server.
pub(crate) struct Started {
    /// How many models are served.
    pub served: usize,
    pub watching: Watching,
    pub saving: Option<Saving>,
    pub training: Option<ServeTrain>,
}

impl Start {
    /// Starts the thread, which sends its result. From now on the server is not ready before all models were
    /// tried.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub(crate) fn begin(self) -> anyhow::Result<oneshot::Receiver<anyhow::Result<Started>>> {
        let trained = self.training.as_ref().map(|training| training.name().to_owned());
        let names = store::models(&self.models).unwrap_or_default();
        names.into_iter().chain(trained).for_each(|name| self.registry.will_load(&name));
        // What clients ask for is done when all models were tried.
        self.channel.open(&self.registry, &self.models);
        let (send, result) = oneshot::channel();
        let thread = std::thread::Builder::new().name("load-models".into());
        let run = move || {
            // Without a receiver the server has ended.
            let _ = send.send(self.run());
        };
        thread.spawn(run).context("the thread that loads the models")?;
        Ok(result)
    }

    fn run(self) -> anyhow::Result<Started> {
        let Self { mut config, models, metrics, training, registry, live, channel } = self;
        let prepare = |flags: ServeTrainFlags| {
            let metrics = RunMetrics::beside_server(metrics.training(flags.name()), channel.wake.clone());
            ServeTrain::start(flags, &config, &models, metrics)
        };
        let mut training = training.map(prepare).transpose()?;
        if let Some(training) = &mut training {
            // Most errors are found by then. Otherwise the other models do not wait for it.
            training.is_prepared_within(PREPARE_WAIT)?;
        }
        if training.is_some() && config.memory == TableMemory::Auto {
            // Training has its own copy of the rows, and publishes a full version every so often.
            tracing::info!(
                "store.memory is auto: tables are mapped, because a model is trained in this process"
            );
            config.memory = TableMemory::Mapped;
        }
        let serving = Serving::new(Loader::new(&config, &models, metrics.clone(), live)?);
        let wake = channel.wake.clone();
        let mut adder = Adder::new(&serving.loader, &serving.models, registry.clone(), wake)?;
        load_all(&mut adder, training.as_mut())?;
        if let Ok(names) = store::models(&models) {
            models_not_there(&config, &names).iter().for_each(|warning| tracing::warn!("{warning}"));
        }
        registry.tried_all();
        let served = serving.engines().len();
        if served == 0 {
            tracing::warn!(models = %models.display(), "no model is served yet: waiting for a good version");
        }
        let saving = serving.save_hot_rows(&config, &models)?;
        let watching = Serving::watch_with(adder, channel)?;
        training.as_mut().map_or(Ok(()), ServeTrain::begin)?;
        Ok(Started { served, watching, saving, training })
    }
}

/// Warnings of settings for models that are not among those of the directory. They may be added later.
pub(crate) fn models_not_there(config: &Config, names: &[String]) -> Vec<String> {
    let with_settings: BTreeSet<&String> =
        config.traffic.keys().chain(config.batchers.models.keys()).collect();
    let missing = with_settings.into_iter().filter(|model| !names.contains(model));
    missing.map(|model| format!("models.{model}: there is no model {model:?} in server.models yet")).collect()
}

/// Waits until the model that is trained can be served.
///
/// # Errors
/// As [`ServeTrain::is_prepared_within`].
fn wait_until_prepared(training: &mut ServeTrain) -> anyhow::Result<()> {
    while !training.is_prepared_within(SAID_EVERY)? {
        tracing::warn!(
            model = training.name,
            "training is still being prepared; the other models are served"
        );
    }
    Ok(())
}

/// Tries every model of the directory, last the one that is trained, when it is prepared. A model whose
/// versions are all bad waits for a good one.
///
/// # Errors
/// When the directory cannot be read; or when no model is served, and either the one that is trained cannot
/// be prepared, or the reason is not its versions: then a setting or the machine is at fault, and waiting
/// does not help.
fn load_all(adder: &mut Adder, training: Option<&mut ServeTrain>) -> anyhow::Result<()> {
    let models = &adder.loader.models;
    // Training makes the directory.
    let names = if training.is_some() && !models.exists() { Vec::new() } else { model_names(models)? };
    let trained = training.as_ref().map(|training| training.name.clone());
    let mut fault = None;
    let mut add = |adder: &mut Adder, name: &str| {
        let Err(error) = adder.add(name) else { return };
        if !error.chain().any(|cause| cause.is::<StoreError>()) {
            fault = fault.take().or(Some(error.context(format!("model {name:?}"))));
        }
    };
    names.iter().filter(|&name| Some(name) != trained.as_ref()).for_each(|name| add(adder, name));
    if let Some(training) = training {
        match wait_until_prepared(training) {
            // The others are served for a while already. Training reports its error itself when it begins.
            Err(_) if !adder.served.all().is_empty() => {}
            prepared => prepared?,
        }
        add(adder, &training.name);
    }
    match fault {
        Some(error) if adder.served.all().is_empty() => Err(error),
        _ => Ok(()),
    }
}
