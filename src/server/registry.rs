//! The handle by which the rest of the process changes a running server: which models it serves, and their
//! queues.

use std::sync::Arc;
use std::time::Duration;

use super::not_served::Reason;
use super::security::Asker;
use super::{LabelChange, Labels, LoadedVersions, NotChanged, Repository, ServerError, ServerState};
use crate::config::{Batchers, TrafficConfig};
use crate::metrics::EventKind;
use crate::predict::Predict;
use crate::types::Version;

/// Adds models to a server that runs, and says which ones it cannot serve.
#[derive(Clone)]
pub(crate) struct Registry(Arc<ServerState>);

/// A model that loads. Dropping this ends that, even after a panic.
pub(crate) struct LoadingModel {
    registry: Registry,
    model: String,
}

impl Drop for LoadingModel {
    fn drop(&mut self) {
        self.registry.0.not_served.end(&self.model);
    }
}

impl Registry {
    pub(super) fn new(state: Arc<ServerState>) -> Self {
        Self(state)
    }

    /// Serves a model from now on. The server is not ready before [`Self::loaded`] is called.
    ///
    /// # Errors
    /// As [`super::models::Models::add`].
    pub(crate) fn add(&self, model: Arc<dyn Predict>) -> Result<(), ServerError> {
        let name = model.describe().model;
        self.0.models.add(model)?;
        self.0.not_served.serves(&name);
        Ok(())
    }

    /// All wanted versions of a model that was added were tried.
    pub(crate) fn loaded(&self, model: &str) {
        self.0.not_served.remove(model);
    }

    /// The labels of a model; `None` if it is not served, or [`Self::set_labels`] was not called yet.
    pub(crate) fn labels(&self, model: &str) -> Option<Labels> {
        self.0.models.get(model)?.labels().cloned()
    }

    /// As [`super::models::Models::set_labels`].
    pub(crate) fn set_labels(&self, model: &str, labels: Labels) {
        self.0.models.set_labels(model, labels);
    }

    /// As [`super::models::Models::set_label`].
    ///
    /// # Errors
    /// As [`super::models::Models::set_label`].
    pub(crate) fn set_label(
        &self,
        model: &str,
        change: LabelChange<'_>,
    ) -> Result<Option<Version>, NotChanged> {
        self.0.models.set_label(model, change)
    }

    /// As [`super::labels::Keeping::hold`].
    pub(crate) fn hold_label_writes(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.0.models.keeping.hold()
    }

    /// As [`super::models::Models::retry_learn_logs`].
    pub(crate) fn retry_learn_logs(&self) {
        self.0.models.retry_learn_logs();
    }

    /// As [`super::models::Models::set_versions`].
    ///
    /// # Errors
    /// As [`super::models::Models::set_versions`].
    pub(crate) fn set_versions(&self, model: &str, loaded: LoadedVersions) -> Result<(), NotChanged> {
        self.0.models.set_versions(model, loaded)
    }

    /// As [`super::models::Models::set_traffic`], for all models.
    pub(crate) fn set_traffic(&self, of: impl Fn(&str) -> TrafficConfig) {
        for model in self.0.models.all() {
            self.0.models.set_traffic(model.name(), &of(model.name()));
        }
    }

    /// As [`super::models::Models::remove`]. The model does not count as one that could not be served.
    pub(crate) fn remove(&self, model: &str) -> bool {
        self.0.models.remove(model)
    }

    /// Lets clients load and unload models. Only the first repository counts. It must not own a registry,
    /// which would keep the server's memory for ever.
    pub(crate) fn set_repository(&self, repository: Arc<dyn Repository>) {
        let _ = self.0.repository.set(repository);
    }

    /// The server is not ready before this model was added or refused, or [`Self::tried_all`] is called.
    pub(crate) fn will_load(&self, model: &str) {
        self.0.not_served.set(model, Reason::Loading { at_start: true });
    }

    /// The model loads until it was added or refused, or what is returned is dropped. The server stays ready.
    pub(crate) fn loads(&self, model: &str) -> LoadingModel {
        self.0.not_served.begin(model);
        LoadingModel { registry: self.clone(), model: model.to_owned() }
    }

    /// Shows why a model is not served. The other models do not wait for it.
    pub(crate) fn refuse(&self, model: &str, reason: String) {
        self.0.metrics.events.record(EventKind::Refused, model, format!("not served: {reason}"));
        self.0.not_served.set(model, Reason::Refused(reason));
    }

    /// Whether a model could not be loaded.
    pub(crate) fn has_refused(&self, model: &str) -> bool {
        matches!(self.0.not_served.get(model), Some(Reason::Refused(_)))
    }

    /// The model has left the directory before it could be served.
    pub(crate) fn forget(&self, model: &str) {
        self.0.not_served.remove(model);
    }

    /// Forgets why models are not served, except these.
    pub(crate) fn retain(&self, models: &[String]) {
        self.0.not_served.retain(models);
    }

    /// Changes the queues of all models, also of those that are added later: their limits and their delay.
    pub(crate) fn set_batchers(&self, batchers: Batchers) {
        self.0.models.set_batchers(batchers);
    }

    /// Changes when a request is logged as slow; `None`: none is.
    pub(crate) fn set_slow(&self, limit: Option<Duration>) {
        self.0.slow.set(limit);
    }

    /// Reads the files of certificates and tokens again. An operator waits for the result, in the log.
    pub(crate) fn check_files(&self) {
        self.0.security.check(Asker::Operator);
    }

    /// Every model of the directory was tried that was in it at the start.
    pub(crate) fn tried_all(&self) {
        self.0.not_served.remove_loading();
    }
}
