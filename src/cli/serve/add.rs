//! Adds models to the server, at the start and while it runs.
//!
//! A model that cannot be loaded is refused: the log, `/readyz` and the status page say why, and the other
//! models are served. It is tried again only if its files have changed, so a version that is copied into
//! place slowly is served when it is complete.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use super::stamps::{Stamper, Stamps};
use super::versions::{SettleOptions, Versions};
use super::watch::WatchCommand;
use super::{LoadedModels, Loader};
use crate::cli::error_line;
use crate::server::Registry;
use crate::store;

/// Loads models, and adds them to a server.
pub(crate) struct Adder {
    pub loader: Arc<Loader>,
    pub served: LoadedModels,
    pub registry: Registry,
    pub versions: Versions,
    /// Models that were refused, as they were then.
    refused: HashMap<String, Stamps>,
}

impl Adder {
    /// # Errors
    /// When the system cannot start a thread.
    pub(crate) fn new(
        loader: &Arc<Loader>,
        served: &LoadedModels,
        registry: Registry,
        wake: SyncSender<WatchCommand>,
    ) -> anyhow::Result<Self> {
        let versions = Versions::new(loader, &registry, wake)?;
        let (loader, served) = (loader.clone(), served.clone());
        Ok(Self { loader, served, registry, versions, refused: HashMap::new() })
    }

    /// Loads a model and serves it, with all versions that are wanted. Returns `false`, and does nothing, if
    /// the model was refused and has not changed since.
    ///
    /// # Errors
    /// When the model cannot be loaded. That is logged and shown already.
    pub(crate) fn add(&mut self, name: &str) -> anyhow::Result<bool> {
        let versions = store::versions(&self.loader.models, name).unwrap_or_default();
        // Read before the model is opened, so that later changes are noticed.
        let now = Stamper::new(&self.loader.models, name).of(&versions);
        if self.refused.get(name) == Some(&now) {
            return Ok(false);
        }
        let added = self.loader.load(name).and_then(|model| {
            self.registry.add(model.engine.clone())?;
            self.served.add(model.clone());
            // The reason is in the log.
            let _ = self.versions.settle(&model, SettleOptions::FIRST);
            self.registry.loaded(name);
            Ok(())
        });
        match added {
            Ok(()) => {
                self.refused.remove(name);
                Ok(true)
            }
            Err(error) => {
                let line = error_line(error.as_ref());
                // Whoever shows the reason names the model.
                let reason = line.strip_prefix(&format!("model {name:?}: ")).unwrap_or(&line).to_owned();
                tracing::warn!(model = name, %reason, "model refused; it is tried again if its files change");
                self.registry.refuse(name, reason);
                self.refused.insert(name.to_owned(), now);
                Err(error)
            }
        }
    }

    /// Tries a model again that was refused, even if it has not changed.
    pub(crate) fn forget_refused(&mut self, name: &str) {
        self.refused.remove(name);
    }

    /// Tries all refused models again.
    pub(crate) fn forget_all_refused(&mut self) {
        self.refused.clear();
    }

    /// Forgets the refused models that are not in the directory any more, also those that were to be tried
    /// again.
    pub(crate) fn retain(&mut self, names: &[String]) {
        self.refused.retain(|name, _| names.contains(name));
        self.registry.retain(names);
    }
}
