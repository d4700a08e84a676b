//! Replaces the loaded versions of a model: starts the engines that are new, and ends those that are not used
//! any more.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{MAX_WAIT, Models, NotChanged, wait_for_calls};
use crate::config::{BatcherConfig, TrafficConfig};
use crate::predict::Predict;
use crate::server::ServerError;
use crate::server::model::{EngineIndex, Model, ModelParts};
use crate::server::retired::RetiredEngines;
use crate::server::serving_engine::ServingEngine;
use crate::server::shadow::{ShadowOptions, Shadowing};
use crate::sync::EvenPoisoned;
use crate::types::{Version, VersionSelector};

/// A version that is wanted and cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MissingVersion {
    /// `None` if it is named by a label that the model does not have.
    pub version: Option<Version>,
    /// Who wants it, and why it is refused.
    pub text: String,
}

/// Why versions of a model are not served.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RefusedVersions {
    /// Those that settings or labels name.
    pub missing: Vec<MissingVersion>,
    /// Those above [`VersionSelector::Latest`].
    pub newer: BTreeMap<Version, String>,
}

/// What is loaded of a model besides its main engine, and how its requests are shared out.
pub(crate) struct LoadedVersions {
    /// An engine for each further version.
    pub secondary: Vec<Arc<dyn Predict>>,
    /// The version that the main engine has, or takes over next.
    pub main: Version,
    /// What [`VersionSelector::Latest`] means.
    pub latest: Version,
    pub traffic: TrafficConfig,
    pub shadow: Option<Arc<dyn Predict>>,
    pub refused: RefusedVersions,
}

impl Models {
    /// Serves these versions from now on. Engines that are not among them end when their calls are answered,
    /// and are released. Also waits for calls that have found the main engine for a version that it leaves to
    /// another engine. Blocks, so it must not be called in an async task.
    ///
    /// # Errors
    /// [`NotChanged::NotLoaded`] if a label that was set meanwhile names a version that would not be loaded;
    /// and if a thread cannot be started.
    pub(crate) fn set_versions(&self, name: &str, loaded: LoadedVersions) -> Result<(), NotChanged> {
        let changing = self.changing.lock().even_poisoned();
        let old = self.get(name).ok_or(NotChanged::NotServed)?;
        let batchers = self.batchers();
        let replacing = Replacing { models: self, name, batcher: batchers.of(name), old: &old };
        let mut parts = replacing.parts(loaded)?;
        let retired = replacing.retired(&parts);
        let waits = replacing.leaves_main_version(&parts) || !retired.engines.is_empty();
        let old_token = waits.then(|| std::mem::take(&mut parts.use_token));
        self.replace(name, parts);
        drop((batchers, changing, old));
        old_token.iter().for_each(|token| wait_for_calls(name, token));
        retired.join(name, MAX_WAIT);
        Ok(())
    }
}

/// A model whose versions are being replaced.
struct Replacing<'m> {
    models: &'m Models,
    name: &'m str,
    batcher: &'m BatcherConfig,
    old: &'m Model,
}

impl Replacing<'_> {
    /// The parts of the next model.
    fn parts(&self, loaded: LoadedVersions) -> Result<ModelParts, NotChanged> {
        let LoadedVersions { secondary, main, latest, traffic, shadow, refused } = loaded;
        let mut parts = ModelParts { main, latest, traffic, refused, ..self.old.parts().clone() };
        parts.engines.truncate(1);
        for predict in secondary {
            parts.engines.push(self.secondary(predict)?);
        }
        self.keep_labelled(&mut parts)?;
        parts.shadow = shadow.map(|predict| self.shadow(predict, parts.traffic.shadow_share)).transpose()?;
        Ok(parts)
    }

    /// Keeps the engines of labels that were set since the caller has read the labels.
    fn keep_labelled(&self, parts: &mut ModelParts) -> Result<(), NotChanged> {
        let Some(labels) = &mut parts.labels else { return Ok(()) };
        labels.settings.clone_from(&parts.traffic.labels);
        let named = labels.all();
        for (_, target) in named.iter().filter(|(label, _)| labels.set.contains_key(*label)) {
            let VersionSelector::Version(version) = *target else { continue };
            if version == parts.main || parts.engines.iter().any(|engine| engine.version == Some(version)) {
                continue;
            }
            match self.old.engine_of(*target) {
                Some(EngineIndex::MAIN) => return Err(NotChanged::NotLoaded),
                Some(engine) => parts.engines.push(self.old.engine(engine).clone()),
                None => {}
            }
        }
        Ok(())
    }

    /// The engine of a further version: the one that serves it already, or a new one.
    fn secondary(&self, predict: Arc<dyn Predict>) -> Result<Arc<ServingEngine>, ServerError> {
        let known = self.old.engines().iter().find(|engine| Arc::ptr_eq(&engine.predict, &predict));
        if let Some(known) = known {
            return Ok(known.clone());
        }
        let metrics = self.models.metrics.secondary(self.name, &predict.describe().schema);
        Ok(Arc::new(self.models.start(predict, metrics, self.batcher)?.fixed()))
    }

    /// The shadow: the one that runs already, or a new one.
    fn shadow(&self, predict: Arc<dyn Predict>, share: f64) -> Result<Arc<Shadowing>, ServerError> {
        if let Some(same) = self.old.shadow().filter(|shadow| shadow.is(&predict, share)) {
            return Ok(same.clone());
        }
        let options = ShadowOptions { share, max_samples: self.models.max_samples };
        Shadowing::start(predict, options, self.batcher, &self.models.metrics).map(Arc::new)
    }

    /// What the next model does not use any more.
    fn retired(&self, next: &ModelParts) -> RetiredEngines {
        let ends =
            |engine: &&Arc<ServingEngine>| !next.engines.iter().any(|other| Arc::ptr_eq(other, engine));
        let engines = self.old.engines().iter().filter(ends).cloned().collect();
        let ends = |shadow: &&Arc<Shadowing>| !next.shadow.iter().any(|other| Arc::ptr_eq(other, shadow));
        RetiredEngines { engines, shadow: self.old.shadow().filter(ends).cloned() }
    }

    /// Whether the main engine leaves its version to another engine of the next model.
    fn leaves_main_version(&self, next: &ModelParts) -> bool {
        let left = self.old.main_version();
        left != next.main && next.engines.iter().any(|engine| engine.version == Some(left))
    }
}
