//! The models of the directory that are not served, and the reason that `/readyz` and the status page show.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use crate::sync::EvenPoisoned;

/// Why a model is not served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    Loading {
        /// Whether it is one of those that are loaded at the start, without which the server is not ready.
        at_start: bool,
    },
    /// It could not be loaded.
    Refused(String),
}

/// Reasons by the name of the model. A served model is listed only while further versions of it load.
#[derive(Default)]
pub(crate) struct NotServed(Mutex<BTreeMap<String, Reason>>);

impl NotServed {
    fn locked(&self) -> MutexGuard<'_, BTreeMap<String, Reason>> {
        self.0.lock().even_poisoned()
    }

    pub(crate) fn set(&self, model: &str, reason: Reason) {
        self.locked().insert(model.to_owned(), reason);
    }

    /// A model begins to load. One that could not be loaded before keeps its reason until it is served.
    pub(crate) fn begin(&self, model: &str) {
        self.locked().entry(model.to_owned()).or_insert(Reason::Loading { at_start: false });
    }

    /// A model is served from now on, but further versions of it load.
    pub(crate) fn serves(&self, model: &str) {
        if let Some(reason @ Reason::Refused(_)) = self.locked().get_mut(model) {
            *reason = Reason::Loading { at_start: false };
        }
    }

    /// A model that has begun to load does so no more.
    pub(crate) fn end(&self, model: &str) {
        let mut reasons = self.locked();
        if reasons.get(model) == Some(&Reason::Loading { at_start: false }) {
            reasons.remove(model);
        }
    }

    /// Whether a model loads, or further versions of it do.
    pub(crate) fn is_loading(&self, model: &str) -> bool {
        matches!(self.locked().get(model), Some(Reason::Loading { .. }))
    }

    pub(crate) fn remove(&self, model: &str) {
        self.locked().remove(model);
    }

    /// Removes the models that were to be loaded at the start. They have left the directory before they were
    /// tried.
    pub(crate) fn remove_loading(&self) {
        self.locked().retain(|_, reason| *reason != Reason::Loading { at_start: true });
    }

    /// Removes all models but these.
    pub(crate) fn retain(&self, models: &[String]) {
        self.locked().retain(|model, _| models.contains(model));
    }

    pub(crate) fn get(&self, model: &str) -> Option<Reason> {
        self.locked().get(model).cloned()
    }

    /// The models that could not be loaded, with the reasons, by ascending name.
    pub(crate) fn refused(&self) -> Vec<(String, String)> {
        let refused = |(model, reason)| match reason {
            Reason::Refused(reason) => Some((model, reason)),
            Reason::Loading { .. } => None,
        };
        self.all().into_iter().filter_map(refused).collect()
    }

    /// All reasons, by ascending name.
    pub(crate) fn all(&self) -> Vec<(String, Reason)> {
        self.locked().iter().map(|(model, reason)| (model.clone(), reason.clone())).collect()
    }
}
