//! The models that are served. Models are added and removed while calls run.
//!
//! Calls find their model in a concurrent map: its shards are locked only for the copy of a reference, so a
//! call does not wait for a model that is being added, whose batcher is started before. To remove a model, it
//! is first taken out of the map and then its batchers are closed, so that calls which have found it are
//! still answered. To remove one version, a new [`Model`] without it replaces the old one (`versions`); the
//! batcher of the version is closed when no call uses the old one any more.

mod versions;

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;

use super::labels::Keeping;
use super::learn_log::LearnLog;
use super::model::{Model, ModelParts, UseToken};
use super::pressure::Pressure;
use super::retired::RetiredEngines;
use super::serving_engine::ServingEngine;
use super::traffic::{LabelChange, LabelError, Labels};
use super::{Learning, ServerError};
use crate::batcher::Batcher;
use crate::config::{BatcherConfig, Batchers, LearnConfig, TrafficConfig};
use crate::learnlog::{self, LearnerOptions};
use crate::metrics::{EventKind, Metrics, ModelMetrics};
use crate::predict::Predict;
use crate::sync::{EvenPoisoned, wait_until};
use crate::types::{Version, VersionSelector};
pub(crate) use versions::{LoadedVersions, MissingVersion, RefusedVersions};

/// How long the removal of a model or a version waits for calls in flight, before its batcher refuses what
/// they queue, and then for the end of its threads.
const MAX_WAIT: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 10 });

/// Why the versions or labels of a model cannot be changed.
#[allow(missing_docs)] // the error texts document the variants
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotChanged {
    #[error("the model is not served")]
    NotServed,
    #[error("a label names a version that is not loaded")]
    NotLoaded,
    #[error("the settings were read again meanwhile")]
    OldSettings,
    #[error(transparent)]
    Label(#[from] LabelError),
    #[error(transparent)]
    Failed(#[from] ServerError),
}

/// The served models by name.
pub(crate) struct Models {
    served: DashMap<String, Arc<Model>>,
    /// Held while a model takes the place of another one, and never while waiting for a disk.
    changing: Mutex<()>,
    pub keeping: Keeping,
    metrics: Arc<Metrics>,
    /// Held while engines are added, so that they get the present settings.
    batchers: Mutex<Batchers>,
    /// `server.max_samples`.
    max_samples: usize,
    /// Where samples are stored, if any model takes samples.
    learning: Option<Learning>,
}

impl Models {
    pub(crate) fn new(
        metrics: Arc<Metrics>,
        batchers: Batchers,
        max_samples: usize,
        learning: Option<Learning>,
    ) -> Self {
        let (served, batchers) = (DashMap::new(), Mutex::new(batchers));
        let (changing, keeping) = (Mutex::default(), Keeping::default());
        Self { served, changing, keeping, metrics, batchers, max_samples, learning }
    }

    /// Opens the log of a model, if the model takes samples.
    fn learn_log(&self, name: &str, metrics: &Arc<ModelMetrics>) -> Option<LearnLog> {
        let learning = self.learning.as_ref().filter(|learning| learning.takes(name))?;
        let LearnConfig { max_bytes, segment_bytes, .. } = learning.config;
        let options =
            LearnerOptions { dir: learnlog::folder(&learning.models, name), max_bytes, segment_bytes };
        Some(LearnLog::open(name, options, metrics.clone()))
    }

    /// Tries to open the logs of learned samples that could not be opened before. Waits for the disk.
    pub(crate) fn retry_learn_logs(&self) {
        for model in self.all() {
            model.main().learn_log.iter().for_each(|log| log.retry());
        }
    }

    /// Starts the batcher of a model and serves it from now on.
    ///
    /// # Errors
    /// When a model of this name is served, or a thread cannot be started.
    pub(crate) fn add(&self, predict: Arc<dyn Predict>) -> Result<(), ServerError> {
        let description = predict.describe();
        let name = description.model;
        if self.served.contains_key(&name) {
            return Err(ServerError::DuplicateModel(name));
        }
        let metrics = self.metrics.model(&name, &description.schema);
        let learn_log = self.learn_log(&name, &metrics);
        let batchers = self.batchers();
        let engine = self.start(predict, metrics, batchers.of(&name))?.with_learn_log(learn_log);
        let parts = ModelParts {
            engines: vec![Arc::new(engine)],
            main: description.version,
            latest: description.version,
            pressure: Arc::new(Pressure::new()),
            labels: None,
            traffic: TrafficConfig::default(),
            shadow: None,
            refused: RefusedVersions::default(),
            use_token: UseToken::default(),
        };
        let model = Arc::new(Model::new(&name, parts, &self.metrics));
        match self.served.entry(name) {
            Entry::Occupied(taken) => Err(ServerError::DuplicateModel(taken.key().clone())),
            Entry::Vacant(free) => {
                let text = format!("version {} is served", description.version);
                self.metrics.events.record(EventKind::Loaded, free.key(), text);
                free.insert(model);
                Ok(())
            }
        }
    }

    /// Starts the batcher of an engine.
    fn start(
        &self,
        predict: Arc<dyn Predict>,
        metrics: Arc<ModelMetrics>,
        config: &BatcherConfig,
    ) -> Result<ServingEngine, ServerError> {
        let batcher = Batcher::start(predict.clone(), metrics.clone(), config);
        let batcher = batcher.map_err(ServerError::Thread)?;
        Ok(ServingEngine::new(predict, batcher, metrics, self.max_samples))
    }

    /// Changes the limits and the delay of every queue.
    pub(crate) fn set_batchers(&self, batchers: Batchers) {
        *self.batchers() = batchers.clone();
        // No lock is held while this waits for those of the queues.
        let served: Vec<_> = self
            .served
            .iter()
            .map(|model| (batchers.of(model.key()).clone(), model.value().clone()))
            .collect();
        for (config, model) in served {
            model.engines().iter().for_each(|engine| engine.batcher.set_queue(&config));
            model.shadow().iter().for_each(|shadow| shadow.set_queue(&config));
        }
    }

    fn batchers(&self) -> MutexGuard<'_, Batchers> {
        self.batchers.lock().even_poisoned()
    }

    /// Tells which labels clients have set, when a model was loaded.
    pub(crate) fn set_labels(&self, name: &str, labels: Labels) {
        let _changing = self.changing.lock().even_poisoned();
        if let Some(old) = self.get(name) {
            self.replace(name, ModelParts { labels: Some(labels), ..old.parts().clone() });
        }
    }

    /// Sets or forgets a label for all later requests. It is lost at a restart before [`Self::keep_labels`].
    ///
    /// # Errors
    /// [`NotChanged`]. Then nothing changes.
    pub(crate) fn set_label(
        &self,
        name: &str,
        change: LabelChange<'_>,
    ) -> Result<Option<Version>, NotChanged> {
        let _changing = self.changing.lock().even_poisoned();
        let old = self.get(name).ok_or(NotChanged::NotServed)?;
        // Without them, the model was loaded just now.
        let labels = old.labels().ok_or(NotChanged::NotLoaded)?.changed(change)?;
        let label = change.label;
        let version = match labels.all().get(label) {
            None => None,
            Some(target) => Some(old.settled(*target).ok_or(NotChanged::NotLoaded)?),
        };
        self.replace(name, ModelParts { labels: Some(labels), ..old.parts().clone() });
        let text = match version {
            None => format!("label {label} was removed"),
            Some(version) => format!("label {label} names version {version}"),
        };
        self.metrics.events.record(EventKind::Label, name, text);
        Ok(version)
    }

    /// Shares out the requests of a model as new settings say, without a wait: the share of the canary, and
    /// the labels of the settings if the versions are loaded that changed ones name.
    /// [`Self::set_versions`] does the rest.
    pub(crate) fn set_traffic(&self, name: &str, traffic: &TrafficConfig) {
        let _changing = self.changing.lock().even_poisoned();
        let Some(old) = self.get(name) else { return };
        let mut parts = old.parts().clone();
        let TrafficConfig { canary_share, sticky, labels, .. } = traffic;
        (parts.traffic.canary_share, parts.traffic.sticky) = (*canary_share, sticky.clone());
        if let Some(of_model) = &mut parts.labels {
            let new = Labels { settings: labels.clone(), set: of_model.set.clone() };
            let before = of_model.all();
            let changed = |(label, target): &(String, VersionSelector)| before.get(label) != Some(target);
            if new.all().into_iter().filter(changed).all(|(_, target)| old.settled(target).is_some()) {
                (*of_model, parts.traffic.labels) = (new, labels.clone());
            }
        }
        if parts.traffic != old.parts().traffic {
            self.replace(name, parts);
        }
    }

    /// What tells a model whose labels can be set from one that is loaded later under its name.
    pub(crate) fn labelled(&self, name: &str) -> Option<Arc<Pressure>> {
        let model = self.get(name)?;
        model.labels().is_some().then(|| model.pressure().clone())
    }

    /// Makes the labels of a model durable that clients have set, one call after the other (`labels.rs`). If
    /// `keep` fails, they still hold until a restart: whoever rolls a version back needs that now. Waits for
    /// the disk. Returns whose labels they were, as [`Self::labelled`].
    ///
    /// # Errors
    /// Why they are lost at a restart.
    pub(crate) fn keep_labels(
        &self,
        name: &str,
        keep: impl FnOnce(&Labels) -> Result<(), String>,
    ) -> Result<Option<Arc<Pressure>>, String> {
        let Some(model) = self.get(name) else { return Ok(None) };
        let (Some(labels), of) = (model.labels().cloned(), model.pressure().clone()) else { return Ok(None) };
        // Who unloads it does not wait for the disk.
        drop(model);
        let kept = keep(&labels).inspect_err(|reason| {
            tracing::warn!(model = name, reason, "labels that clients have set are lost at a restart");
        });
        kept.map(|()| Some(of))
    }

    /// Puts a model in the place of another one.
    fn replace(&self, name: &str, parts: ModelParts) {
        let model = Arc::new(Model::new(name, parts, &self.metrics));
        if let Some(mut place) = self.served.get_mut(name) {
            place.clear_labels_not_in(&model);
            *place = model;
        }
    }

    /// Ends serving a model. Returns when its calls are answered and its threads have ended, or after some
    /// time if one is stuck; `false` if no model of this name is served. Blocks, so it must not be called in
    /// an async task.
    pub(crate) fn remove(&self, name: &str) -> bool {
        let changing = self.changing.lock().even_poisoned();
        let removed = self.served.remove(name);
        drop(changing);
        let Some((_, model)) = removed else { return false };
        let ModelParts { engines, shadow, use_token, .. } = model.parts().clone();
        let labels: Vec<String> = model.shown_labels().map(|shown| shown.label.to_owned()).collect();
        drop(model);
        wait_for_calls(name, &use_token);
        let ended = RetiredEngines { engines, shadow }.join(name, MAX_WAIT);
        for label in labels {
            self.metrics.label(name, &label).version.set(0.0);
        }
        self.metrics.forget(name);
        let text =
            if ended { "its calls are answered" } else { "but its memory may not be free: the log says why" };
        self.metrics.events.record(EventKind::Unloaded, name, text);
        true
    }

    pub(crate) fn get(&self, name: &str) -> Option<Arc<Model>> {
        self.served.get(name).map(|model| model.value().clone())
    }

    /// Whether there is more than one model.
    pub(crate) fn are_several(&self) -> bool {
        self.served.len() > 1
    }

    /// All models, by ascending name.
    pub(crate) fn all(&self) -> Vec<Arc<Model>> {
        let mut all: Vec<_> = self.served.iter().map(|model| model.value().clone()).collect();
        all.sort_by(|a, b| a.name().cmp(b.name()));
        all
    }
}

/// Waits until no call uses a model with this token, at most [`MAX_WAIT`].
fn wait_for_calls(model: &str, use_token: &UseToken) {
    if !wait_until(MAX_WAIT, || !use_token.is_used_elsewhere()) {
        let seconds = MAX_WAIT.as_secs();
        tracing::warn!(model, "calls that began before a change have not ended after {seconds} s");
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
