//! SIGHUP: a running server reads its settings again, and its files of certificates and tokens.
//!
//! The values that can change while it runs are used from now on. The others are named, and keep their old
//! values until a restart. If anything is wrong, no setting changes, but the files are read all the same.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use signal_hook::consts::SIGHUP;
use signal_hook::flag::register;
use tokio::signal::unix::Signal;

use super::start::models_not_there;
use super::watch::{Wake, WatchCommand};
use crate::cli::logging;
use crate::config::{Config, Layers, Reloaded, TrafficConfig};
use crate::server::Registry;
use crate::store;
use crate::sync::EvenPoisoned;

/// How often the log says that a reload takes long.
const SAID_EVERY: Duration = Duration::from_secs(10);

/// Values that the threads beside the server read whenever they need them.
pub(crate) struct LiveSettings {
    switch_bytes: AtomicU64,
    watch: Mutex<Option<Duration>>,
    traffic: Mutex<BTreeMap<String, TrafficConfig>>,
}

impl LiveSettings {
    pub(crate) fn new(config: &Config) -> Arc<Self> {
        let live =
            Self { switch_bytes: AtomicU64::default(), watch: Mutex::default(), traffic: Mutex::default() };
        live.set(config);
        Arc::new(live)
    }

    /// Returns whether other versions may be wanted now, or requests are shared out in another way.
    fn set(&self, config: &Config) -> bool {
        self.switch_bytes.store(config.cache.switch_bytes, Ordering::Relaxed);
        *self.watch.lock().even_poisoned() = config.watch;
        let mut traffic = self.traffic.lock().even_poisoned();
        std::mem::replace(&mut *traffic, config.traffic.clone()) != config.traffic
    }

    /// The settings `models.NAME.*` of a model.
    pub(crate) fn traffic(&self, model: &str) -> TrafficConfig {
        let traffic = self.traffic.lock().even_poisoned();
        traffic.get(model).cloned().unwrap_or_default()
    }

    /// `cache.switch_bytes`.
    pub(crate) fn switch_bytes(&self) -> u64 {
        self.switch_bytes.load(Ordering::Relaxed)
    }

    /// `models.watch_seconds`; `None` if it is 0.
    pub(crate) fn watch(&self) -> Option<Duration> {
        *self.watch.lock().even_poisoned()
    }
}

/// Whether SIGHUP has come before the server could reload. Without a handler, it would end the process.
#[derive(Default)]
pub(crate) struct EarlyHangup(Arc<AtomicBool>);

impl EarlyHangup {
    /// SIGHUP does not end the process from now on.
    ///
    /// # Errors
    /// When the system refuses the handler.
    pub(crate) fn catch() -> anyhow::Result<Self> {
        let early = Self::default();
        register(SIGHUP, early.0.clone()).context("signals")?;
        Ok(early)
    }
}

/// Changes the settings of a running server.
pub(crate) struct Reloader {
    /// The settings in use.
    pub layers: Layers,
    pub live: Arc<LiveSettings>,
    pub registry: Registry,
    /// Wakes the thread that watches the models, so that it waits for its new interval.
    pub wake: Wake,
}

impl Reloader {
    /// Reloads at every SIGHUP, and first if one came before.
    pub(crate) async fn run(mut self, mut hangup: Signal, EarlyHangup(early): EarlyHangup) {
        let mut early = early.load(Ordering::Relaxed);
        while std::mem::take(&mut early) || hangup.recv().await.is_some() {
            // It reads files, and a thread of the network must not wait for a disk.
            let mut reloading = tokio::task::spawn_blocking(move || {
                self.reload();
                self
            });
            let reloaded = loop {
                match tokio::time::timeout(SAID_EVERY, &mut reloading).await {
                    Ok(reloaded) => break reloaded,
                    Err(_) => tracing::warn!("SIGHUP: the files are not read yet: the disk is slow"),
                }
            };
            match reloaded {
                Ok(reloader) => self = reloader,
                Err(error) => return tracing::error!(%error, "SIGHUP: settings are no longer read"),
            }
        }
    }

    fn reload(&mut self) {
        self.registry.check_files();
        let Reloaded { layers, config, changed, restart } = match self.layers.reload() {
            Ok(reloaded) => reloaded,
            Err(error) => {
                tracing::error!(%error, "SIGHUP: the settings are wrong, so nothing changes");
                return;
            }
        };
        self.layers = layers;
        let traffic = self.live.set(&config);
        if traffic {
            // Who takes the requests from a bad version does not wait until others are opened.
            self.registry.set_traffic(|model| self.live.traffic(model));
        }
        self.registry.set_batchers(config.batchers.clone());
        self.registry.set_slow(config.log.slow);
        // Without room, all models are looked at, and the settings used then.
        let _ = self.wake.send(if traffic { WatchCommand::Traffic } else { WatchCommand::Interval });
        let say = || match changed.as_slice() {
            [] => tracing::info!("SIGHUP: no setting that can change while the server runs has changed"),
            changed => tracing::info!(changed = changed.join(", "), "SIGHUP: settings changed"),
        };
        // The level may hide it before or after.
        let now = tracing::enabled!(tracing::Level::INFO);
        if now {
            say();
        }
        // The configuration has checked the level.
        let _ = logging::set_level(&config.log.level);
        if !now {
            say();
        }
        if let Some(Ok(names)) = config.server.models.as_deref().map(store::models) {
            models_not_there(&config, &names).iter().for_each(|warning| tracing::warn!("SIGHUP: {warning}"));
        }
        if !restart.is_empty() {
            let settings = restart.join(", ");
            tracing::warn!(settings, "SIGHUP: these settings changed too, but only a restart applies them");
        }
    }
}
