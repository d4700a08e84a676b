//! A served model: its engines, and which of them scores a request (`routing`).
//!
//! A [`Model`] is immutable. To load a version or set a label, a new one replaces it in the map
//! (`models.rs`). An engine that only the old one has is shut down when the last request that uses the old
//! one has ended. So a request sees one consistent set of engines and labels, and takes no lock.

mod routing;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::models::{MissingVersion, RefusedVersions};
use super::pressure::Pressure;
use super::serving_engine::ServingEngine;
use super::shadow::Shadowing;
use super::status::CallError;
use super::traffic::{Labels, Split};
use crate::config::{CANARY, STABLE, TrafficConfig};
use crate::metrics::{LabelMetrics, Metrics};
use crate::types::{Version, VersionSelector};

/// A served model.
pub(crate) struct Model {
    name: String,
    parts: ModelParts,
    named: Vec<LabelledVersion>,
    /// The engine of `stable`.
    stable: EngineIndex,
    /// `None` if no requests are for it.
    canary: Option<Canary>,
}

/// The parts of a model that change together. The rest of a model follows from them.
#[derive(Clone)]
pub(crate) struct ModelParts {
    /// The first is the main one, whose version changes.
    pub engines: Vec<Arc<ServingEngine>>,
    /// The calls of all versions.
    pub pressure: Arc<Pressure>,
    /// The version of the main engine, or the one that it takes over.
    pub main: Version,
    /// What [`VersionSelector::Latest`] means.
    pub latest: Version,
    /// `None` until the labels that clients have set were read.
    pub labels: Option<Labels>,
    pub traffic: TrafficConfig,
    pub shadow: Option<Arc<Shadowing>>,
    pub refused: RefusedVersions,
    pub use_token: UseToken,
}

/// A token shared by the successive values of one served model. Its count shows whether a call still uses one
/// of them. After a wait for such calls, the next value gets a new token.
#[derive(Clone, Default)]
pub(crate) struct UseToken(Arc<()>);

impl UseToken {
    /// Whether a call, or another value of the model, has it too.
    pub(crate) fn is_used_elsewhere(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

/// The place of an engine among those of its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EngineIndex(usize);

impl EngineIndex {
    /// The main engine.
    pub(crate) const MAIN: Self = Self(0);
}

/// A label.
struct LabelledVersion {
    label: String,
    target: VersionSelector,
    /// `None` if its version is not loaded.
    engine: Option<EngineIndex>,
    metrics: Arc<LabelMetrics>,
}

/// The engine of `canary`, and the requests that it gets.
struct Canary {
    engine: EngineIndex,
    split: Split,
}

/// A label as it is shown.
pub(crate) struct ShownLabel<'m> {
    pub label: &'m str,
    pub target: VersionSelector,
    /// `None` if its version is not loaded.
    pub version: Option<Version>,
}

/// A loaded version, and an engine that has it.
pub(crate) struct VersionEngine<'m> {
    pub version: Version,
    pub engine: &'m Arc<ServingEngine>,
}

impl Model {
    pub(crate) fn new(name: &str, parts: ModelParts, metrics: &Metrics) -> Self {
        let all = parts.labels.clone().unwrap_or_default().all();
        let name = name.to_owned();
        let mut model = Self { name, parts, named: Vec::new(), stable: EngineIndex::MAIN, canary: None };
        let named = all.into_iter().map(|(label, target)| {
            let metrics = Arc::new(metrics.label(&model.name, &label));
            let engine = model.engine_of(target);
            let version = engine.map_or(0.0, |engine| model.version_of(engine).0 as f64);
            metrics.version.set(version);
            LabelledVersion { label, target, engine, metrics }
        });
        model.named = named.collect();
        let engine = |label| model.named.iter().find(|named| named.label == label)?.engine;
        // `stable` is only missing if the settings name a version that cannot be loaded.
        model.stable = engine(STABLE).unwrap_or(EngineIndex::MAIN);
        let canary = engine(CANARY).filter(|canary| *canary != model.stable);
        let TrafficConfig { canary_share, sticky, .. } = &model.parts.traffic;
        model.canary = canary.filter(|_| *canary_share > 0.0).map(|engine| {
            let schema = &model.main().predict.describe().schema;
            let split = Split::new(*canary_share, sticky, schema, &model.name);
            Canary { engine, split }
        });
        model
    }

    /// Exports 0 for the labels that the next model in its place does not have.
    pub(crate) fn clear_labels_not_in(&self, next: &Self) {
        let stays = |label: &str| next.named.iter().any(|named| named.label == label);
        let gone = self.named.iter().filter(|named| !stays(&named.label));
        gone.for_each(|named| named.metrics.version.set(0.0));
    }

    pub(crate) fn parts(&self) -> &ModelParts {
        &self.parts
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn pressure(&self) -> &Arc<Pressure> {
        &self.parts.pressure
    }

    /// The engine whose version changes.
    pub(crate) fn main(&self) -> &Arc<ServingEngine> {
        &self.parts.engines[0]
    }

    /// The engine of requests without a version and without a label. The canary gets its share of them.
    pub(crate) fn stable(&self) -> &Arc<ServingEngine> {
        self.engine(self.stable)
    }

    pub(crate) fn engine(&self, index: EngineIndex) -> &Arc<ServingEngine> {
        &self.parts.engines[index.0]
    }

    /// All engines, the main one first.
    pub(crate) fn engines(&self) -> &[Arc<ServingEngine>] {
        &self.parts.engines
    }

    pub(crate) fn shadow(&self) -> Option<&Arc<Shadowing>> {
        self.parts.shadow.as_ref()
    }

    pub(crate) fn labels(&self) -> Option<&Labels> {
        self.parts.labels.as_ref()
    }

    pub(crate) fn missing(&self) -> &[MissingVersion] {
        &self.parts.refused.missing
    }

    /// Why versions are refused that are newer, or that settings or labels name.
    pub(crate) fn refused_versions(&self) -> BTreeMap<Version, String> {
        let RefusedVersions { missing, newer } = &self.parts.refused;
        let mut refused = newer.clone();
        let numbered = missing.iter().filter_map(|missing| Some((missing.version?, &missing.text)));
        for (version, text) in numbered {
            let reasons = refused.entry(version).or_default();
            *reasons += if reasons.is_empty() { "" } else { "; " };
            *reasons += text;
        }
        refused
    }

    /// The versions whose workers are in calls that do not end.
    pub(crate) fn stuck_versions(&self) -> BTreeSet<Version> {
        let stuck = self.parts.engines.iter().filter(|engine| engine.batcher.is_stuck());
        stuck.map(|engine| engine.predict.describe().version).collect()
    }

    /// Why an older version is served: the newer ones are refused.
    pub(crate) fn newer_refused(&self) -> &BTreeMap<Version, String> {
        &self.parts.refused.newer
    }

    /// The version of the main engine, or the one that it takes over.
    pub(crate) fn main_version(&self) -> Version {
        self.parts.main
    }

    /// The version of requests without a version and without a label. The canary gets its share of them.
    pub(crate) fn stable_version(&self) -> Version {
        self.stable().predict.describe().version
    }

    fn version_of(&self, index: EngineIndex) -> Version {
        self.engine(index).version.unwrap_or(self.parts.main)
    }

    /// The engine, besides the main one, that has this version.
    fn secondary(&self, version: Version) -> Option<EngineIndex> {
        self.parts.engines.iter().position(|engine| engine.version == Some(version)).map(EngineIndex)
    }

    /// The engine of the version that a label names.
    pub(crate) fn engine_of(&self, target: VersionSelector) -> Option<EngineIndex> {
        let version = target.version(self.parts.latest);
        // While the main engine takes over a version that has an engine, that one is used.
        self.secondary(version).or_else(|| (version == self.parts.main).then_some(EngineIndex::MAIN))
    }

    /// The version that a label would name, if it is loaded and its engine is not taking over another one.
    pub(crate) fn settled(&self, target: VersionSelector) -> Option<Version> {
        let version = self.version_of(self.engine_of(target)?);
        self.parts
            .engines
            .iter()
            .any(|engine| engine.predict.describe().version == version)
            .then_some(version)
    }

    /// The loaded versions, ascending.
    pub(crate) fn versions(&self) -> Vec<VersionEngine<'_>> {
        let engines = self.parts.engines.iter();
        let mut all: Vec<_> = engines
            .map(|engine| VersionEngine { version: engine.predict.describe().version, engine })
            .collect();
        all.sort_by_key(|loaded| loaded.version);
        // During a switch two engines may have the same version.
        all.dedup_by_key(|loaded| loaded.version);
        all
    }

    /// All labels.
    pub(crate) fn shown_labels(&self) -> impl Iterator<Item = ShownLabel<'_>> {
        self.named.iter().map(|named| ShownLabel {
            label: &named.label,
            target: named.target,
            version: named.engine.map(|engine| self.engine(engine).predict.describe().version),
        })
    }

    /// The engine that has this version loaded.
    ///
    /// # Errors
    /// [`CallError::NoVersion`].
    pub(crate) fn find(&self, requested: Version) -> Result<EngineIndex, CallError> {
        let main = || (self.main().predict.describe().version == requested).then_some(EngineIndex::MAIN);
        self.secondary(requested).or_else(main).ok_or_else(|| self.no_version(requested))
    }

    fn no_version(&self, requested: Version) -> CallError {
        let loaded: Vec<String> = self.versions().iter().map(|loaded| loaded.version.to_string()).collect();
        CallError::NoVersion { model: self.name.clone(), loaded: loaded.join(", "), requested }
    }
}
