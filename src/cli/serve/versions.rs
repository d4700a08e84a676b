//! Which versions of a model are loaded, and which of them its main engine has.
//!
//! Wanted are the versions of the policy (`models.NAME.versions`), those that labels name, and that of the
//! shadow (`plan`). [`ServedVersions::settle`] loads what is wanted, moves the main engine to the version
//! that `stable` names, gives every other wanted version an engine of its own, and unloads the rest. A
//! version is opened once, and shared if it moves from one engine to another.
//!
//! The main engine leaves a version that stays wanted in two steps: first that version gets its own engine,
//! and the server waits for the requests that have found the main engine for it. Then the main engine
//! switches.
//!
//! A switch runs on a thread of its own (`switching`), because it waits for batches, and one of them may not
//! end. If it fails, which is mostly for that reason, the version is refused as if it were bad, and is opened
//! again after [`RETRY_AFTER`]. If requests have used that version through an engine of its own, this
//! engine stays.
//!
//! New versions are opened and taken over by threads of low priority. What a client asks for with a label,
//! and the first versions of a model, have the priority of requests.

mod known;
mod plan;
mod switching;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::shadow::Background;
use super::stamps::Stamper;
use super::watch::Wake;
use super::{LoadedModel, Loader};
use crate::cli::background;
use crate::config::Sticky;
use crate::engine::switch::{Changes, NextVersion};
use crate::engine::{Engine, SharedVersion};
use crate::metrics::Metrics;
use crate::predict::Predict;
use crate::server::{LabelChange, LoadedVersions, NotChanged, RefusedVersions, Registry};
use crate::types::Version;
use known::{KnownVersions, Reported};
pub(crate) use known::{VersionRefusal, refusal};
use plan::VersionPlan;
use switching::{SwitchOutcome, SwitchTarget, WAIT};

/// How often a model is looked at again when its labels or settings change at the same time.
const TRIES: usize = 5;

/// How long to wait before a version is tried again, if the main engine could not take it over or the reason
/// of its refusal may have passed. Each try opens the version.
const RETRY_AFTER: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 60 });

/// Why the versions of a model are not those that are wanted. The reason is in the log.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotSettled {
    #[error("{0}")]
    Refused(String),
    /// The main engine still takes over a version.
    #[error("{0}")]
    Switching(String),
}

impl From<String> for NotSettled {
    fn from(reason: String) -> Self {
        Self::Refused(reason)
    }
}

/// What to look for.
#[derive(Clone, Copy)]
pub(crate) struct SettleOptions<'l> {
    /// Whether versions above the loaded ones are looked for, besides those that labels name.
    pub new: bool,
    /// A label that will be set if its version can be loaded. The main engine keeps its version.
    pub label: Option<LabelChange<'l>>,
    /// Opens and takes over versions at the priority of requests, not at the low one.
    pub urgent: bool,
    /// Whether a client waits for a switch.
    pub asked: bool,
}

impl SettleOptions<'_> {
    /// For new versions.
    pub(crate) const NEW: Self = Self { new: true, label: None, urgent: false, asked: false };
    /// For no new versions.
    pub(crate) const LOADED: Self = Self { new: false, ..Self::NEW };
    /// For new versions, when a client wants the newest one.
    pub(crate) const LOAD: Self = Self { asked: true, ..Self::NEW };
    /// For all versions of a model that was loaded.
    pub(crate) const FIRST: Self = Self { urgent: true, ..Self::NEW };
    /// After labels were set.
    pub(crate) const LABELS: Self = Self { new: false, ..Self::FIRST };
}

/// The versions of all models.
pub(crate) struct ServedVersions {
    context: LookContext,
    known: HashMap<String, KnownVersions>,
}

/// What every look at the versions of a model needs.
struct LookContext {
    loader: Arc<Loader>,
    registry: Registry,
    /// Wakes the thread that makes all changes when a switch has ended.
    wake: Wake,
    /// Background threads that open versions.
    opening: rayon::ThreadPool,
}

impl ServedVersions {
    /// # Errors
    /// When the system cannot start a thread.
    pub(crate) fn new(loader: &Arc<Loader>, registry: &Registry, wake: Wake) -> anyhow::Result<Self> {
        let opening = background::background_pool("open")?;
        let context = LookContext { loader: loader.clone(), registry: registry.clone(), wake, opening };
        Ok(Self { context, known: HashMap::new() })
    }

    /// Whether the main engine of a model takes over a version.
    pub(crate) fn is_switching(&self, name: &str) -> bool {
        self.known.get(name).is_some_and(|known| known.switching.is_some())
    }

    /// Forgets which versions of a model were refused, so that they are tried again.
    pub(crate) fn forget_refused(&mut self, name: &str) {
        // A model that is not served gets what its load finds out.
        if let Some(known) = self.known.get_mut(name) {
            known.refused.clear();
        }
    }

    /// Reports to the server again what is loaded: it has changed what it knew, for new settings.
    pub(crate) fn report_again(&mut self) {
        self.known.values_mut().for_each(|known| known.report_again = true);
    }

    /// Waits for a switch of a model that is to be unloaded, because it holds memory until it ends, but not
    /// longer than a client waits. What it has done is of no use any more.
    pub(crate) fn wait_for_switch(&mut self, name: &str) {
        let switching = self.known.get_mut(name).and_then(|known| known.switching.take());
        if switching.is_some_and(|switching| !switching.wait_for_end()) {
            let effect = "the model's memory stays until it ends";
            tracing::warn!(model = name, "a version is still being taken over: {effect}");
        }
    }

    /// Releases the versions of a model that is not served any more.
    pub(crate) fn remove(&mut self, name: &str) {
        self.known.remove(name);
    }

    /// Loads what is wanted of a served model, and unloads the rest.
    ///
    /// # Errors
    /// Why the highest version that was tried now is refused, or why the version of `options.label` is; or
    /// that a version is still being taken over.
    pub(crate) fn settle(
        &mut self,
        model: &LoadedModel,
        options: SettleOptions<'_>,
    ) -> Result<(), NotSettled> {
        let name = model.engine.describe().model;
        let Self { context, known } = self;
        let known = known.entry(name.clone()).or_insert_with(|| KnownVersions::at_load(model));
        known.report_again |= !options.new;
        let stamper = Stamper::new(&context.loader.models, &name);
        Settling { context, model, name: &name, options, known, stamper, last_try: false }.settle()
    }
}

/// One look at the versions of a served model.
struct Settling<'s> {
    context: &'s LookContext,
    model: &'s LoadedModel,
    name: &'s str,
    options: SettleOptions<'s>,
    known: &'s mut KnownVersions,
    /// The files as the present plan has found them.
    stamper: Stamper<'s>,
    /// Whether the present plan is applied even if it is of old settings.
    last_try: bool,
}

impl Settling<'_> {
    fn settle(mut self) -> Result<(), NotSettled> {
        let (mut failed, mut refused) = (None, None);
        match self.end_switch(Duration::ZERO) {
            SwitchOutcome::Done => {}
            SwitchOutcome::Refused(reason) => failed = Some(reason),
            SwitchOutcome::Running(reason) => {
                self.known.new_later |= self.options.new;
                return Err(NotSettled::Switching(reason));
            }
        }
        self.options.new |= std::mem::take(&mut self.known.new_later);
        for tries_left in (0..TRIES).rev() {
            // After a failed switch, no other version is opened in vain: its switch would wait as long.
            self.options.new &= failed.is_none();
            self.last_try = tries_left == 0;
            let plan = self.plan()?;
            let latest = plan.latest;
            refused = plan.refused.clone().or(refused);
            match self.apply(plan) {
                Ok(SwitchOutcome::Done) => {
                    let newer = self.known.refused.keys().filter(|version| **version > latest);
                    self.model.engine.set_refused_now(newer.count());
                    return failed.or(refused).map_or(Ok(()), |reason| Err(reason.into()));
                }
                Ok(SwitchOutcome::Refused(reason)) => failed = Some(reason),
                Ok(SwitchOutcome::Running(reason)) => {
                    tracing::debug!(model = self.name, "{reason}");
                    return Err(NotSettled::Switching(reason));
                }
                // A label was set meanwhile, or the settings were read again.
                Err(NotChanged::NotLoaded | NotChanged::OldSettings) => {}
                Err(error) => {
                    tracing::warn!(model = self.name, %error, "the loaded versions stay as they are");
                    return Err(error.to_string().into());
                }
            }
        }
        failed.or(refused).map_or(Ok(()), |reason| Err(reason.into()))
    }

    /// Tells the server what is loaded, and lets the main engine switch. After a switch that fails another
    /// plan is needed.
    fn apply(&mut self, plan: VersionPlan) -> Result<SwitchOutcome, NotChanged> {
        let (main, target) = (self.model.engine.version(), plan.stable);
        let waits = self.known.refused.get(&target).is_some_and(VersionRefusal::stays);
        if self.options.label.is_none() && target != main && !waits {
            let next = self.next(target, plan.wanted.contains(&main));
            // Requests for its number or another label use its own engine until the switch has ended.
            let reported = self.known.reported.as_ref();
            let own = reported.is_some_and(|reported| reported.secondary.contains(&target));
            let own = own || plan.pinned.contains(&target);
            let secondary = plan.wanted.iter().copied().filter(|version| *version != target || own).collect();
            // What was reported as refused holds until the switch has ended.
            let refused = reported.map(|reported| reported.refused.clone()).unwrap_or_default();
            self.tell(Reported::of(&plan, target, secondary, refused))?;
            // The target was loaded when the plan was made.
            let begin = |next| self.begin_switch(SwitchTarget { version: target, own, next });
            self.known.switching = next.map(begin);
            match self.end_switch(WAIT) {
                SwitchOutcome::Done => {}
                other => return Ok(other),
            }
        }
        let main = self.model.engine.version();
        let mut wanted = plan.wanted.clone();
        if self.options.label.is_some() {
            // The labels of before still count.
            wanted.extend(self.known.secondary.keys());
        }
        let secondary: Vec<Version> = wanted.into_iter().filter(|version| *version != main).collect();
        let refused = RefusedVersions { missing: plan.missing.clone(), newer: self.newer(&plan) };
        self.tell(Reported::of(&plan, main, secondary.clone(), refused))?;
        self.known.secondary.retain(|version, _| secondary.contains(version));
        Ok(SwitchOutcome::Done)
    }

    /// Why the versions above the latest one are refused, unless `missing` says it already.
    fn newer(&self, plan: &VersionPlan) -> BTreeMap<Version, String> {
        let missing = |version| plan.missing.iter().any(|missing| missing.version == Some(version));
        let refused = self.known.refused.iter();
        let newer = refused.filter(|(version, _)| **version > plan.latest && !missing(**version));
        newer.map(|(version, refusal)| (*version, refusal.reason.clone())).collect()
    }

    /// The switch of the main engine to a loaded version. The result lists the changed rows, which may be
    /// many, so it is called on the thread of the switch.
    fn next(&self, target: Version, old_stays: bool) -> Option<impl FnOnce() -> NextVersion + Send + use<>> {
        let old = self.model.engine.served();
        let version = self.known.secondary.get(&target)?.served();
        let switch_bytes = self.context.loader.live.switch_bytes();
        let has_cache = self.model.engine.has_cache();
        Some(move || {
            let (newer, older) = if target > old.version() { (&version, &old) } else { (&old, &version) };
            // Only a cache needs them.
            let rows = has_cache.then(|| newer.store.changed_since(&older.store)).flatten();
            let changes = rows.map_or(Changes::Unknown, Changes::Rows);
            NextVersion { version, changes, switch_bytes, old_stays }
        })
    }

    /// Tells the server what is loaded, unless it knows that.
    fn tell(&mut self, reported: Reported) -> Result<(), NotChanged> {
        // Versions may have been opened for minutes since the plan began.
        if !self.last_try && reported.traffic != self.context.loader.live.traffic(self.name) {
            return Err(NotChanged::OldSettings);
        }
        if self.known.reported.as_ref() == Some(&reported) && !self.known.report_again {
            return Ok(());
        }
        let name = self.name;
        let schema = self.model.engine.describe().schema;
        if let Sticky::Feature(feature) = &reported.traffic.sticky
            && !schema.features.iter().any(|known| known.name == *feature)
        {
            let effect = "the model has no such feature, so request ids are used";
            tracing::warn!(model = name, feature, "models.{name}.sticky: {effect}");
        }
        for version in &reported.secondary {
            if !self.known.secondary.contains_key(version) {
                // The main engine still has a version that it leaves.
                let served = self.model.engine.served();
                debug_assert_eq!(served.version(), *version, "an engine has another version than its number");
                self.known.secondary.insert(*version, self.secondary(served));
            }
        }
        self.set_shadow(reported.shadow);
        let engine =
            |version| self.known.secondary.get(version).map(|engine| engine.clone() as Arc<dyn Predict>);
        let loaded = LoadedVersions {
            secondary: reported.secondary.iter().filter_map(engine).collect(),
            main: reported.main,
            latest: reported.latest,
            traffic: reported.traffic.clone(),
            shadow: self.known.shadow.as_ref().map(|(_, shadow)| shadow.clone()),
            refused: reported.refused.clone(),
        };
        self.context.registry.set_versions(name, loaded)?;
        (self.known.reported, self.known.report_again) = (Some(reported), false);
        Ok(())
    }

    /// An engine of a version that the main engine does not have.
    fn secondary(&self, version: SharedVersion) -> Arc<Engine> {
        let engine = &self.model.engine;
        let metrics = self.context.loader.metrics.secondary(self.name, &engine.describe().schema);
        Arc::new(engine.secondary(version, metrics))
    }

    fn set_shadow(&mut self, version: Option<Version>) {
        if self.known.shadow.as_ref().map(|(version, _)| *version) == version {
            return;
        }
        self.known.shadow = version.and_then(|version| {
            let main = &self.model.engine;
            let secondary = self.known.secondary.get(&version).map(|engine| engine.served());
            let loaded = secondary.unwrap_or_else(|| main.served());
            let metrics = Metrics::hidden(self.name, &main.describe().schema);
            let engine = Background::new(main.secondary(loaded, metrics));
            let engine = engine.inspect_err(|error| tracing::warn!(%error, "no shadow")).ok()?;
            Some((version, Arc::new(engine) as Arc<dyn Predict>))
        });
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
