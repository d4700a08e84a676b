//! A served model: its engines, and which of them scores a request.
//!
//! A [`Model`] is immutable. To load a version or set a label, a new one replaces it in the map
//! (`models.rs`). An engine that only the old one has is shut down when the last request that uses the old
//! one has ended. So a request sees one consistent set of engines and labels, and takes no lock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use super::convert::{Inputs, clip};
use super::models::Missing;
use super::pressure::Pressure;
use super::serving_engine::{LabelledRequest, NotQueued, Queued, ServingEngine};
use super::shadow::Shadowing;
use super::status::CallError;
use super::traffic::{Labels, RequestOptions, Split};
use crate::config::{CANARY, STABLE, TrafficConfig};
use crate::metrics::{LabelMetrics, Metrics};
use crate::types::{Batch, LabelTarget, Scores, Version};

/// A served model.
pub(crate) struct Model {
    name: String,
    /// The first is the main one, whose version changes.
    engines: Vec<Arc<ServingEngine>>,
    /// The calls of all versions.
    pressure: Arc<Pressure>,
    /// The version of the main engine, or the one that it takes over.
    main: Version,
    /// What [`LabelTarget::Latest`] means.
    latest: Version,
    /// `None` until the labels that clients have set were read.
    labels: Option<Labels>,
    traffic: TrafficConfig,
    named: Vec<Named>,
    /// The engine of `stable`.
    stable: usize,
    /// The engine of `canary` and its share, if some requests are for it.
    canary: Option<(usize, Split)>,
    shadow: Option<Arc<Shadowing>>,
    missing: Vec<Missing>,
    /// Versions that are newer than `latest` and are refused: why.
    newer: BTreeMap<Version, String>,
    held: Held,
}

/// A token shared by the successive values of one served model. Its count shows whether a call still uses one
/// of them. After a wait for such calls, the next value gets a new token.
#[derive(Clone, Default)]
pub(crate) struct Held(Arc<()>);

impl Held {
    /// Whether another model or call has it.
    pub(crate) fn by_others(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

/// A label.
struct Named {
    label: String,
    target: LabelTarget,
    /// `None` if its version is not loaded.
    engine: Option<usize>,
    metrics: Option<Arc<LabelMetrics>>,
}

/// The parts of a model that change together.
pub(crate) struct Parts {
    /// All engines, the main one first.
    pub engines: Vec<Arc<ServingEngine>>,
    pub pressure: Arc<Pressure>,
    pub main: Version,
    pub latest: Version,
    pub labels: Option<Labels>,
    pub traffic: TrafficConfig,
    pub shadow: Option<Arc<Shadowing>>,
    pub missing: Vec<Missing>,
    pub newer: BTreeMap<Version, String>,
    pub held: Held,
}

/// Which engine scores a request.
struct Choice {
    engine: usize,
    /// The version that must compute the scores.
    version: Option<u64>,
}

impl Model {
    pub(crate) fn new(name: &str, parts: Parts, metrics: &Metrics) -> Self {
        let Parts { engines, pressure, main, latest, labels, traffic, shadow, missing, newer, held } = parts;
        let mut model = Self {
            name: name.to_owned(),
            engines,
            pressure,
            main,
            latest,
            labels,
            traffic,
            named: Vec::new(),
            stable: 0,
            canary: None,
            shadow,
            missing,
            newer,
            held,
        };
        let all = model.labels.clone().unwrap_or_default().all();
        // A model without labels needs no series of them.
        let shown = all.len() > 1 || all.get(STABLE) != Some(&LabelTarget::Latest);
        let named = all.into_iter().map(|(label, target)| {
            let metrics = shown.then(|| Arc::new(metrics.label(name, &label)));
            let engine = model.engine_of(target);
            let version = engine.map_or(0.0, |engine| model.version_of(engine).0 as f64);
            metrics.iter().for_each(|metrics| metrics.version.set(version));
            Named { label, target, engine, metrics }
        });
        model.named = named.collect();
        let engine = |label| model.named.iter().find(|named| named.label == label)?.engine;
        // `stable` is only missing if the settings name a version that cannot be loaded.
        model.stable = engine(STABLE).unwrap_or(0);
        let canary = engine(CANARY).filter(|canary| *canary != model.stable);
        model.canary = canary.filter(|_| model.traffic.canary_share > 0.0).map(|engine| {
            let schema = &model.main().predict.describe().schema;
            (engine, Split::new(model.traffic.canary_share, &model.traffic.sticky, schema, name))
        });
        model
    }

    /// Exports 0 for the labels that the next model in its place does not show.
    pub(crate) fn clear_labels_not_in(&self, next: &Self) {
        let shown = |label| next.named.iter().any(|named| named.label == label && named.metrics.is_some());
        let gone = self.named.iter().filter(|named| !shown(named.label.as_str()));
        gone.filter_map(|named| named.metrics.as_ref()).for_each(|metrics| metrics.version.set(0.0));
    }

    /// The parts, for the next model in its place.
    pub(crate) fn parts(&self) -> Parts {
        Parts {
            engines: self.engines.clone(),
            pressure: self.pressure.clone(),
            main: self.main,
            latest: self.latest,
            labels: self.labels.clone(),
            traffic: self.traffic.clone(),
            shadow: self.shadow.clone(),
            missing: self.missing.clone(),
            newer: self.newer.clone(),
            held: self.held.clone(),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn pressure(&self) -> &Arc<Pressure> {
        &self.pressure
    }

    /// The engine whose version changes.
    pub(crate) fn main(&self) -> &Arc<ServingEngine> {
        &self.engines[0]
    }

    /// The engine of requests that name neither a version nor a label, but for the canary's share.
    pub(crate) fn stable(&self) -> &Arc<ServingEngine> {
        &self.engines[self.stable]
    }

    pub(crate) fn engine(&self, engine: usize) -> &Arc<ServingEngine> {
        &self.engines[engine]
    }

    /// All engines, the main one first.
    pub(crate) fn engines(&self) -> &[Arc<ServingEngine>] {
        &self.engines
    }

    pub(crate) fn shadow(&self) -> Option<&Arc<Shadowing>> {
        self.shadow.as_ref()
    }

    pub(crate) fn labels(&self) -> Option<&Labels> {
        self.labels.as_ref()
    }

    pub(crate) fn missing(&self) -> &[Missing] {
        &self.missing
    }

    /// Why versions are refused that are newer, or that settings or labels name.
    pub(crate) fn refused_versions(&self) -> BTreeMap<Version, String> {
        let mut refused = self.newer.clone();
        for Missing { version, text } in &self.missing {
            let reasons = refused.entry(*version).or_default();
            *reasons += if reasons.is_empty() { "" } else { "; " };
            *reasons += text;
        }
        refused
    }

    /// The versions whose workers are in calls that do not end.
    pub(crate) fn stuck_versions(&self) -> BTreeSet<Version> {
        let stuck = self.engines.iter().filter(|served| served.batcher.is_stuck());
        stuck.map(|served| served.predict.describe().version).collect()
    }

    /// Why an older version is served: the newer ones are refused.
    pub(crate) fn newer_refused(&self) -> &BTreeMap<Version, String> {
        &self.newer
    }

    /// The version of the main engine, or the one that it takes over.
    pub(crate) fn main_version(&self) -> Version {
        self.main
    }

    /// The version of requests that name neither a version nor a label, but for the canary's share.
    pub(crate) fn stable_version(&self) -> Version {
        self.stable().predict.describe().version
    }

    fn version_of(&self, engine: usize) -> Version {
        self.engines[engine].version.unwrap_or(self.main)
    }

    /// The engine of the version that a label names.
    pub(crate) fn engine_of(&self, target: LabelTarget) -> Option<usize> {
        let version = target.version(self.latest);
        // While the main engine takes over a version that has an engine, that one is used.
        let secondary = self.engines.iter().position(|served| served.version == Some(version));
        secondary.or_else(|| (version == self.main).then_some(0))
    }

    /// The version that a label would name, if it is loaded and its engine is not taking over another one.
    pub(crate) fn settled(&self, target: LabelTarget) -> Option<Version> {
        let version = self.version_of(self.engine_of(target)?);
        self.engines.iter().any(|served| served.predict.describe().version == version).then_some(version)
    }

    /// The loaded versions, ascending, each with its engine.
    pub(crate) fn versions(&self) -> Vec<(u64, &Arc<ServingEngine>)> {
        let mut all: Vec<_> =
            self.engines.iter().map(|served| (served.predict.describe().version.0, served)).collect();
        all.sort_by_key(|(version, _)| *version);
        // During a switch two engines may have the same version.
        all.dedup_by_key(|(version, _)| *version);
        all
    }

    /// Each label with what it names, and with its version if that is loaded.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&str, LabelTarget, Option<u64>)> {
        self.named.iter().map(|named| {
            let version = named.engine.map(|engine| self.engines[engine].predict.describe().version.0);
            (named.label.as_str(), named.target, version)
        })
    }

    /// The engine that has this version loaded.
    ///
    /// # Errors
    /// [`CallError::NoVersion`].
    pub(crate) fn find(&self, requested: u64) -> Result<usize, CallError> {
        let secondary = self.engines.iter().position(|served| served.version == Some(Version(requested)));
        let main = || (self.main().predict.describe().version.0 == requested).then_some(0);
        secondary.or_else(main).ok_or_else(|| self.no_version(requested))
    }

    fn no_version(&self, requested: u64) -> CallError {
        let loaded: Vec<String> = self.versions().iter().map(|(version, _)| version.to_string()).collect();
        CallError::NoVersion { model: self.name.clone(), loaded: loaded.join(", "), requested }
    }

    /// Queues the batch that `encode` writes at the engine that should score it.
    ///
    /// # Errors
    /// When the version or the label is not there, the request cannot be converted, or the queue is full.
    pub(crate) fn queue(
        &self,
        options: &RequestOptions<'_>,
        encode: impl FnOnce(&Inputs, &mut Batch) -> Result<(), CallError>,
    ) -> Result<Queued, NotQueued> {
        let split = self.canary.as_ref().filter(|_| options.version.is_none() && options.label.is_empty());
        let by_samples = split.filter(|(_, split)| split.by_samples());
        let Choice { mut engine, version } = match split {
            Some(_) if by_samples.is_some() => Choice { engine: self.stable, version: None },
            Some((canary, split)) if split.takes(options.id) => Choice { engine: *canary, version: None },
            _ => self.choose(options)?,
        };
        let served = &self.engines[engine];
        let description = served.predict.describe();
        let inputs = served.inputs(&description.schema);
        let started = Instant::now();
        let mut batch = served.batcher.spare();
        encode(&inputs, &mut batch).map_err(NotQueued::at(engine))?;
        batch.logits = options.logits;
        if let Some((canary, split)) = by_samples
            && split.takes_batch(&batch)
        {
            engine = *canary;
        }
        let served = &self.engines[engine];
        served.metrics.statistics.input.add(1, started.elapsed());
        let shadow = self.shadow.as_ref().and_then(|shadow| shadow.copy(served, &batch));
        let (samples, answer_bytes) = (batch.samples, Scores::most_bytes(&batch));
        let label = self.counted(options, engine).map(|metrics| LabelledRequest::begin(metrics, started));
        let ticket = served.batcher.submit(batch, options.terms);
        let ticket = ticket.inspect_err(|_| label.iter().for_each(LabelledRequest::failed));
        let ticket = ticket.map_err(NotQueued::at(engine))?;
        let shadow = shadow.and_then(|(shadow, batch)| shadow.submit(batch));
        Ok(Queued { ticket, samples, answer_bytes, inputs, engine, version, shadow, label })
    }

    fn choose(&self, options: &RequestOptions<'_>) -> Result<Choice, CallError> {
        match (options.version, options.label.as_str()) {
            (None, "") => Ok(Choice { engine: self.stable, version: None }),
            (Some(version), "") => Ok(Choice { engine: self.find(version)?, version: Some(version) }),
            (None, label) => self.choose_label(label),
            (Some(_), label) => Err(CallError::Both { label: clip(label.to_owned()) }),
        }
    }

    fn choose_label(&self, label: &str) -> Result<Choice, CallError> {
        let Some(named) = self.named.iter().find(|named| named.label == label) else {
            let labels: Vec<&str> = self.named.iter().map(|named| named.label.as_str()).collect();
            let (model, labels) = (self.name.clone(), labels.join(", "));
            return Err(CallError::NoLabel { model, labels, got: clip(label.to_owned()) });
        };
        match (named.engine, named.target) {
            // The main engine may take over another version meanwhile.
            (Some(0), LabelTarget::Version(version)) if label != STABLE => {
                Ok(Choice { engine: 0, version: Some(version.0) })
            }
            (Some(engine), _) => Ok(Choice { engine, version: None }),
            (None, LabelTarget::Version(version)) => Err(self.no_version(version.0)),
            (None, LabelTarget::Latest) => Err(self.no_version(self.latest.0)),
        }
    }

    /// The series of the label for which a request is counted.
    fn counted(&self, options: &RequestOptions<'_>, engine: usize) -> Option<&Arc<LabelMetrics>> {
        if options.version.is_some() || self.named.len() <= 1 {
            return None;
        }
        let label = match options.label.as_str() {
            "" if self.canary.as_ref().is_some_and(|(canary, _)| *canary == engine) => CANARY,
            "" => STABLE,
            label => label,
        };
        self.named.iter().find(|named| named.label == label)?.metrics.as_ref()
    }

    /// Awaits the scores of a queued request.
    ///
    /// # Errors
    /// When the batch failed, or another version than the requested one has computed it.
    pub(crate) async fn scores(&self, queued: Queued) -> Result<(Scores, Arc<Inputs>), CallError> {
        let Queued { ticket, inputs, version, shadow, label, .. } = queued;
        let scores = ticket.await;
        label.iter().for_each(|label| label.ended(scores.is_ok()));
        let scores = scores?;
        // The version may have changed while the request was queued.
        if let Some(requested) = version.filter(|requested| *requested != scores.version.0) {
            return Err(self.no_version(requested));
        }
        if let Some(shadow) = shadow {
            shadow.with(scores.probabilities.clone());
        }
        Ok((scores, inputs))
    }
}
