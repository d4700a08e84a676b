//! Versions whose workers are stuck: each is logged once, and once more when it computes again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::model::Model;
use crate::types::Version;

/// The versions of each model that were stuck at the last look.
#[derive(Default)]
pub(crate) struct Stuck(BTreeMap<String, BTreeSet<Version>>);

impl Stuck {
    /// Forgets models that are not served any more.
    pub(crate) fn retain(&mut self, served: &[Arc<Model>]) {
        self.0.retain(|name, _| served.iter().any(|model| model.name() == name));
    }

    pub(crate) fn look(&mut self, model: &Model) {
        let name = model.name();
        let now = model.stuck_versions();
        let before = self.0.remove(name).unwrap_or_default();
        let seconds = model.stable().batcher.patience().as_secs_f64();
        for version in now.difference(&before) {
            tracing::error!(
                model = name,
                %version,
                "a call of the version does not end for {seconds} s"
            );
        }
        for version in before.difference(&now) {
            tracing::info!(model = name, %version, "no call of the version is stuck any more");
        }
        if !now.is_empty() {
            self.0.insert(name.to_owned(), now);
        }
    }
}
