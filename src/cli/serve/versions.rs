//! Which versions of a model are loaded, and which of them its main engine has.
//!
//! Wanted are the versions of the policy (`models.NAME.versions`), those that labels name, and that of the
//! shadow (`plan`). [`Versions::settle`] loads what is wanted, moves the main engine to the version that
//! `stable` names, gives every other wanted version an engine of its own, and unloads the rest. A version is
//! opened once, and shared if it moves from one engine to another.
//!
//! The main engine leaves a version that stays wanted in two steps: first that version gets its own engine,
//! and the server waits for the requests that have found the main engine for it. Then the main engine
//! switches.
//!
//! A switch may fail, because a batch does not end. Then the version is refused, as if it were bad, and is
//! opened again after [`AGAIN`]. A version that requests have used through an engine of its own keeps that.
//!
//! New versions are opened and taken over by threads that run only when a processor is free. What a client
//! asks for with a label, and the versions of a model that is loaded, do not wait for that.

mod plan;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::add::{Stamp, stamp, version_folder};
use super::loader::Refused;
use super::shadow::Background;
use super::{LoadedModel, Loader};
use crate::cli::background;
use crate::config::{Sticky, TrafficConfig};
use crate::engine::switch::{Changes, NextVersion, Taken};
use crate::engine::{BesideParts, Engine, LoadedVersion};
use crate::metrics::{EventKind, Metrics};
use crate::predict::Predict;
use crate::server::{Loaded, NotChanged, Registry};
use crate::types::{Follow, Version};
use plan::Plan;

/// How often a model is looked at again when its labels are set at the same time.
const TRIES: usize = 5;

/// When a version is tried again that the main engine could not take over. Trying it costs its opening.
const AGAIN: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 60 });

/// What is known about the versions of a model.
#[derive(Default)]
struct Known {
    /// Versions that were refused.
    refused: BTreeMap<Version, Refusal>,
    /// Whether its directory could not be read at the last look.
    unreadable: bool,
    /// The loaded versions that were not on disk at the last look.
    gone: BTreeSet<Version>,
    /// The engines of the versions that the main engine does not have.
    beside: BTreeMap<Version, Arc<Engine>>,
    shadow: Option<(Version, Arc<dyn Predict>)>,
    /// What the server was told last.
    told: Option<Told>,
    /// Whether it is told again, because it may have kept versions for labels that were set meanwhile.
    again: bool,
}

impl Known {
    fn at_load(model: &LoadedModel) -> Self {
        let refused = model.refused.iter().map(|Refused { version, stamp, reason }| {
            (*version, Refusal { stamp: stamp.clone(), reason: refusal(*version, reason), again: None })
        });
        Self { refused: refused.collect(), ..Self::default() }
    }
}

/// A version that was refused.
struct Refusal {
    /// Its files as they were then. It is tried again when they change.
    stamp: Stamp,
    reason: String,
    /// When it is tried again even if they do not change.
    again: Option<Instant>,
}

impl Refusal {
    fn stays(&self) -> bool {
        self.again.is_none_or(|again| Instant::now() < again)
    }
}

/// What became of a plan.
enum Applied {
    Settled,
    /// The main engine could not take its version over, for this reason. Another plan is needed.
    Refused(String),
}

#[derive(PartialEq)]
struct Told {
    beside: Vec<Version>,
    main: Version,
    latest: Version,
    shadow: Option<Version>,
    traffic: TrafficConfig,
    missing: Vec<String>,
    newer: BTreeMap<Version, String>,
}

/// The sentence about a refused version.
fn refusal(version: Version, reason: &str) -> String {
    format!("version {version} is refused: {reason}")
}

/// What to look for.
#[derive(Clone, Copy)]
pub(crate) struct Look<'l> {
    /// Whether versions that are not loaded are looked for, besides those that labels name.
    pub new: bool,
    /// A label that will be set if its version can be loaded. The main engine keeps its version.
    pub label: Option<(&'l str, Option<Follow>)>,
    /// Whether somebody waits for it. Otherwise versions are opened and taken over when a processor is free.
    pub urgent: bool,
}

impl Look<'_> {
    /// For new versions.
    pub(crate) const NEW: Self = Self { new: true, label: None, urgent: false };
    /// For all versions of a model that was loaded.
    pub(crate) const FIRST: Self = Self { new: true, label: None, urgent: true };
    /// After labels were set.
    pub(crate) const LABELS: Self = Self { new: false, label: None, urgent: true };
}

/// The versions of all models.
pub(crate) struct Versions {
    loader: Arc<Loader>,
    registry: Registry,
    known: HashMap<String, Known>,
    /// Threads that open versions when a processor is free.
    opening: rayon::ThreadPool,
}

impl Versions {
    /// # Errors
    /// When the system cannot start a thread.
    pub(crate) fn new(loader: &Arc<Loader>, registry: &Registry) -> anyhow::Result<Self> {
        let opening = background::idle_pool("open")?;
        Ok(Self { loader: loader.clone(), registry: registry.clone(), known: HashMap::new(), opening })
    }

    /// Forgets which versions of a model were refused, so that they are tried again.
    pub(crate) fn forget_refused(&mut self, name: &str) {
        self.known.entry(name.to_owned()).or_default().refused.clear();
    }

    /// Releases the versions of a model that is not served any more.
    pub(crate) fn remove(&mut self, name: &str) {
        self.known.remove(name);
    }

    /// Loads what is wanted of a served model, and unloads the rest.
    ///
    /// # Errors
    /// Why the highest version that was tried now is refused, or why the version of `look.label` is.
    pub(crate) fn settle(&mut self, model: &LoadedModel, look: Look<'_>) -> Result<(), String> {
        let name = model.engine.describe().model;
        let mut known = self.known.remove(&name).unwrap_or_else(|| Known::at_load(model));
        known.again |= !look.new;
        let settled = self.settle_known(model, &name, look, &mut known);
        self.known.insert(name, known);
        settled
    }

    fn settle_known(
        &self,
        model: &LoadedModel,
        name: &str,
        look: Look<'_>,
        known: &mut Known,
    ) -> Result<(), String> {
        let mut failed = None;
        for _ in 0..TRIES {
            // After a failed switch, no other version is opened in vain: its switch would wait as long.
            let look = Look { new: look.new && failed.is_none(), ..look };
            let plan = self.plan(model, name, look, known)?;
            let (refused, latest) = (plan.refused.clone(), plan.latest);
            match self.apply(model, name, look, (plan, known)) {
                Ok(Applied::Settled) => {
                    let newer = known.refused.keys().filter(|version| **version > latest);
                    model.engine.set_refused_now(newer.count());
                    return failed.or(refused).map_or(Ok(()), Err);
                }
                Ok(Applied::Refused(reason)) => failed = Some(reason),
                // A label was set meanwhile.
                Err(NotChanged::NotLoaded) => {}
                Err(error) => {
                    tracing::warn!(model = name, %error, "the loaded versions stay as they are");
                    return Err(error.to_string());
                }
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Tells the server what is loaded, and lets the main engine switch.
    fn apply(
        &self,
        model: &LoadedModel,
        name: &str,
        look: Look<'_>,
        (plan, known): (Plan, &mut Known),
    ) -> Result<Applied, NotChanged> {
        let (main, target) = (model.engine.version(), plan.stable);
        let waits = known.refused.get(&target).is_some_and(Refusal::stays);
        if look.label.is_none() && target != main && !waits {
            let next = self.next(model, (target, plan.wanted.contains(&main)), known);
            // Requests for its number or another label use its own engine until the switch has ended.
            let own = known.told.as_ref().is_some_and(|told| told.beside.contains(&target));
            let own = own || plan.pinned.contains(&target);
            let beside = plan.wanted.iter().copied().filter(|version| *version != target || own).collect();
            // What was said of refused versions holds until the switch has ended.
            let told = known.told.as_ref();
            let shown = told.map(|told| (told.missing.clone(), told.newer.clone())).unwrap_or_default();
            self.tell(model, name, (&plan, known), (target, beside), shown)?;
            if let Err(error) = self.switch(model, name, (look, next)) {
                model.engine.count_refused();
                tracing::warn!(model = name, version = target.0, serving = main.0, %error, "version refused");
                let text = format!("version {target}: {error}");
                self.loader.metrics.events.record(EventKind::Refused, name, text);
                let now = stamp([version_folder(&self.loader, name, target)]);
                let reason = refusal(target, &error.to_string());
                let again = Some(Instant::now() + AGAIN);
                known.refused.insert(target, Refusal { stamp: now, reason: reason.clone(), again });
                if !own {
                    known.beside.remove(&target);
                }
                return Ok(Applied::Refused(reason));
            }
            known.refused.remove(&target);
        }
        let main = model.engine.version();
        let mut wanted = plan.wanted.clone();
        if look.label.is_some() {
            // The labels of before still count.
            wanted.extend(known.beside.keys());
        }
        let beside: Vec<Version> = wanted.into_iter().filter(|version| *version != main).collect();
        let missing = plan.missing.iter().map(|missing| missing.text.clone()).collect();
        let shown = (missing, Self::newer(known, &plan));
        self.tell(model, name, (&plan, known), (main, beside.clone()), shown)?;
        known.beside.retain(|version, _| beside.contains(version));
        Ok(Applied::Settled)
    }

    /// Why the versions above the latest one are refused, unless `missing` says it already.
    fn newer(known: &Known, plan: &Plan) -> BTreeMap<Version, String> {
        let missing = |version| plan.missing.iter().any(|missing| missing.version == version);
        let newer =
            known.refused.iter().filter(|(version, _)| **version > plan.latest && !missing(**version));
        newer.map(|(version, refusal)| (*version, refusal.reason.clone())).collect()
    }

    /// The switch of the main engine to a loaded version.
    fn next(
        &self,
        model: &LoadedModel,
        (target, old_stays): (Version, bool),
        known: &Known,
    ) -> Option<NextVersion> {
        let (old, version) = (model.engine.served(), known.beside.get(&target)?.served());
        let (newer, older) = if target > old.version() { (&version, &old) } else { (&old, &version) };
        let changes = match newer.store.changed_since(&older.store) {
            Some(rows) => Changes::Rows(rows),
            None => Changes::Unknown,
        };
        Some(NextVersion { version, changes, switch_bytes: self.loader.live.switch_bytes(), old_stays })
    }

    fn switch(
        &self,
        model: &LoadedModel,
        name: &str,
        (look, next): (Look<'_>, Option<NextVersion>),
    ) -> anyhow::Result<()> {
        // The target was loaded when the plan was made.
        let Some(next) = next else { return Ok(()) };
        let switch = || model.engine.switch(next);
        let taken = if look.urgent { switch() } else { self.opening.install(switch) };
        let Taken { from, to, carried, dropped } = taken?;
        tracing::info!(model = name, from = from.0, version = to.0, carried, dropped, "version taken over");
        let text = format!("version {to} after {from}; {carried} cached rows updated, {dropped} dropped");
        self.loader.metrics.events.record(EventKind::Switched, name, text);
        Ok(())
    }

    /// Tells the server which versions have an engine of their own, unless it knows that.
    fn tell(
        &self,
        model: &LoadedModel,
        name: &str,
        (plan, known): (&Plan, &mut Known),
        (main, beside): (Version, Vec<Version>),
        (missing, newer): (Vec<String>, BTreeMap<Version, String>),
    ) -> Result<(), NotChanged> {
        let Plan { latest, shadow, traffic, .. } = plan;
        let told = Told {
            beside,
            main,
            latest: *latest,
            shadow: *shadow,
            traffic: traffic.clone(),
            missing: missing.clone(),
            newer: newer.clone(),
        };
        if known.told.as_ref() == Some(&told) && !known.again {
            return Ok(());
        }
        let schema = model.engine.describe().schema;
        if let Sticky::Feature(feature) = &traffic.sticky
            && !schema.features.iter().any(|known| known.name == *feature)
        {
            let effect = "the model has no such feature, so request ids are used";
            tracing::warn!(model = name, feature, "models.{name}.sticky: {effect}");
        }
        let engines = told.beside.iter().map(|version| {
            let engine = known.beside.entry(*version).or_insert_with(|| {
                // The main engine still has a version that it leaves.
                let served = model.engine.served();
                debug_assert_eq!(served.version(), *version, "an engine has another version than its number");
                self.beside(model, name, served)
            });
            engine.clone() as Arc<dyn Predict>
        });
        let engines = engines.collect();
        self.set_shadow(model, name, *shadow, known);
        let loaded = Loaded {
            beside: engines,
            main,
            latest: *latest,
            traffic: traffic.clone(),
            shadow: known.shadow.as_ref().map(|(_, shadow)| shadow.clone()),
            missing,
            newer,
        };
        self.registry.set_versions(name, loaded)?;
        (known.told, known.again) = (Some(told), false);
        Ok(())
    }

    /// An engine of a version that the main engine does not have.
    fn beside(&self, model: &LoadedModel, name: &str, version: LoadedVersion) -> Arc<Engine> {
        let metrics = self.loader.metrics.beside(name, &model.engine.describe().schema);
        Arc::new(model.engine.beside(version, BesideParts { metrics, threads: self.loader.threads.clone() }))
    }

    fn set_shadow(&self, model: &LoadedModel, name: &str, version: Option<Version>, known: &mut Known) {
        if known.shadow.as_ref().map(|(version, _)| *version) == version {
            return;
        }
        known.shadow = version.and_then(|version| {
            let beside = known.beside.get(&version).map(|engine| engine.served());
            let loaded = beside.unwrap_or_else(|| model.engine.served());
            let metrics = Metrics::hidden(name, &model.engine.describe().schema);
            let threads = self.loader.shadow_threads()?;
            let engine = model.engine.beside(loaded, BesideParts { metrics, threads });
            Some((version, Arc::new(Background(engine)) as Arc<dyn Predict>))
        });
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
