//! What is wanted of a model, and opening what is not loaded yet.

use std::collections::{BTreeMap, BTreeSet};

use super::{Known, Refusal, ServedVersions, SettleOptions, refusal};
use crate::cli::serve::stamps::Stamper;
use crate::cli::serve::{LoadedModel, Loader};
use crate::config::{STABLE, Shadow, TrafficConfig, VersionPolicy};
use crate::engine::SharedVersion;
use crate::metrics::EventKind;
use crate::predict::Predict;
use crate::server::{Labels, Missing};
use crate::store::{self, StoreError};
use crate::types::{LabelTarget, Version};

/// What should be loaded of a model.
pub(super) struct VersionPlan {
    pub wanted: BTreeSet<Version>,
    pub latest: Version,
    pub stable: Version,
    /// The versions that labels other than `stable` name.
    pub pinned: BTreeSet<Version>,
    pub shadow: Option<Version>,
    pub traffic: TrafficConfig,
    /// The versions that are wanted and refused.
    pub missing: Vec<Missing>,
    /// The reason why the highest version that was tried now is refused.
    pub refused: Option<String>,
}

/// The versions that settings name, by label or by setting.
fn named(traffic: &TrafficConfig) -> BTreeMap<String, LabelTarget> {
    let versions = match &traffic.versions {
        VersionPolicy::Given(versions) => versions.iter().copied().collect(),
        VersionPolicy::Latest(_) => Vec::new(),
    };
    let versions =
        versions.into_iter().map(|version| (format!("versions {version}"), LabelTarget::Version(version)));
    let shadow = match traffic.shadow {
        Some(Shadow::Target(follow)) => Some(("shadow".to_owned(), follow)),
        Some(Shadow::Label(_)) | None => None,
    };
    let labels = traffic.labels.iter().map(|(label, follow)| (format!("label {label}"), *follow));
    let all = labels.chain(versions).chain(shadow);
    all.filter(|(_, follow)| *follow != LabelTarget::Latest).collect()
}

impl ServedVersions {
    /// The labels of a model, with those of the present settings.
    fn labels(&self, name: &str, traffic: &TrafficConfig) -> Result<Labels, String> {
        let labels = match self.registry.labels(name) {
            Some(labels) => Labels { settings: traffic.labels.clone(), ..labels },
            None => {
                let set =
                    store::labels::load(&self.loader.models, name).map_err(|error| error.to_string())?;
                let labels = Labels { settings: traffic.labels.clone(), set };
                self.registry.set_labels(name, labels.clone());
                labels
            }
        };
        Ok(labels)
    }

    /// Opens what is wanted and not loaded yet.
    pub(super) fn plan(
        &self,
        model: &LoadedModel,
        name: &str,
        look: SettleOptions<'_>,
        known: &mut Known,
    ) -> Result<VersionPlan, String> {
        let traffic = self.loader.live.traffic(name);
        let mut labels = self.labels(name, &traffic)?;
        if let Some((label, follow)) = look.label {
            labels = labels.with(label, follow);
        }
        self.keep_named(name, &traffic, known);
        let on_disk = self.on_disk(model, name, known)?;
        let wanted = named(&TrafficConfig { labels: labels.all(), ..traffic.clone() });
        // A version that is named but not on disk stays refused, so that it is logged once.
        let named = |version| wanted.values().any(|follow| *follow == LabelTarget::Version(version));
        known.refused.retain(|version, _| on_disk.contains(version) || named(*version));
        self.warn_of_gone(model, name, &on_disk, known);
        let stamper = Stamper::new(&self.loader.models, name);
        let mut opener = Opener { versions: self, model, name, known, urgent: look.urgent, stamper };
        let (mut missing, mut refused) = (Vec::new(), None);
        let mut policy = opener.policy(&traffic.versions, (&on_disk, look.new), (&mut missing, &mut refused));
        let main = model.engine.version();
        if policy.is_empty() {
            policy.insert(main);
        }
        let latest = policy.last().copied().unwrap_or(main);
        let mut pinned = BTreeSet::new();
        let mut stable = latest;
        for (label, follow) in labels.all() {
            let version = follow.version(latest);
            match opener.load(version) {
                Ok(()) if label == STABLE => stable = version,
                Ok(()) if follow == LabelTarget::Latest => {}
                Ok(()) => drop(pinned.insert(version)),
                Err(reason) => {
                    if look.label.is_some_and(|(set, _)| set == label) {
                        return Err(reason);
                    }
                    if label == STABLE {
                        stable = main;
                    }
                    missing.push(Missing { version, text: format!("label {label}: {reason}") });
                }
            }
        }
        let shadow = match &traffic.shadow {
            None => None,
            Some(Shadow::Target(follow)) => Some(*follow),
            Some(Shadow::Label(label)) => labels.all().get(label).copied(),
        };
        let shadow = shadow.map(|follow| follow.version(latest));
        let shadow = shadow.filter(|version| match opener.load(*version) {
            Ok(()) => true,
            Err(reason) => {
                missing.push(Missing { version: *version, text: format!("shadow: {reason}") });
                false
            }
        });
        let wanted = policy.iter().chain(&pinned).chain(&shadow).chain([&stable]).copied().collect();
        Ok(VersionPlan { wanted, latest, stable, pinned, shadow, traffic, missing, refused })
    }

    /// Writes down which versions the settings name, so that no trainer removes them while no server has
    /// them.
    fn keep_named(&self, name: &str, traffic: &TrafficConfig, known: &mut Known) {
        let named = named(traffic);
        if known.named.as_ref() == Some(&named) {
            return;
        }
        let models = &self.loader.models;
        let same = store::labels::load_settings(models, name).is_ok_and(|before| before == named);
        let saved = if same { Ok(()) } else { store::labels::save_settings(models, name, &named) };
        match saved {
            Ok(()) => (known.named, known.not_named) = (Some(named), false),
            // Tried again at the next look.
            Err(error) => {
                if !std::mem::replace(&mut known.not_named, true) {
                    tracing::warn!(
                        model = name,
                        %error,
                        "the versions that the settings name are not written down: while this server is \
                         down, a trainer may remove them"
                    );
                }
            }
        }
    }

    /// The versions of a model's directory, ascending.
    fn on_disk(&self, model: &LoadedModel, name: &str, known: &mut Known) -> Result<Vec<Version>, String> {
        let serving = model.engine.version();
        match store::versions(&self.loader.models, name) {
            Ok(versions) => {
                if std::mem::take(&mut known.unreadable) {
                    tracing::info!(model = name, version = serving.0, "model readable again");
                }
                Ok(versions)
            }
            Err(reason) => {
                if !std::mem::replace(&mut known.unreadable, true) {
                    let effect = "the loaded version goes on";
                    tracing::warn!(model = name, version = serving.0, %reason, "model unreadable: {effect}");
                    let text = format!("unreadable: {reason}; {effect}");
                    self.loader.metrics.events.record(EventKind::Refused, name, text);
                }
                Err(reason.to_string())
            }
        }
    }

    /// Warns once of each loaded version that is no longer on disk.
    fn warn_of_gone(&self, model: &LoadedModel, name: &str, on_disk: &[Version], known: &mut Known) {
        let loaded = known.secondary.keys().copied().chain([model.engine.version()]);
        let gone: BTreeSet<Version> = loaded.filter(|version| !on_disk.contains(version)).collect();
        for version in gone.difference(&known.gone) {
            let effect = "it goes on, and a restart would not find it";
            tracing::warn!(model = name, version = version.0, "version no longer on disk: {effect}");
            let text = format!("version {version} is no longer on disk: {effect}");
            self.loader.metrics.events.record(EventKind::Gone, name, text);
        }
        known.gone = gone;
    }
}

/// Loads versions of one model.
struct Opener<'o> {
    versions: &'o ServedVersions,
    model: &'o LoadedModel,
    name: &'o str,
    known: &'o mut Known,
    urgent: bool,
    stamper: Stamper<'o>,
}

impl Opener<'_> {
    /// The versions of a policy that are loaded.
    fn policy(
        &mut self,
        policy: &VersionPolicy,
        (on_disk, new): (&[Version], bool),
        (missing, refused): (&mut Vec<Missing>, &mut Option<String>),
    ) -> BTreeSet<Version> {
        let mut good = BTreeSet::new();
        match policy {
            VersionPolicy::Given(versions) => {
                for &version in versions {
                    match self.load(version) {
                        Ok(()) => drop(good.insert(version)),
                        Err(text) => missing.push(Missing { version, text }),
                    }
                }
            }
            VersionPolicy::Latest(count) => {
                let mut candidates: BTreeSet<Version> = self.known.secondary.keys().copied().collect();
                candidates.insert(self.model.engine.version());
                if new {
                    candidates.extend(on_disk);
                }
                for version in candidates.into_iter().rev() {
                    let first = !self.known.refused.contains_key(&version);
                    match self.load(version) {
                        Ok(()) => drop(good.insert(version)),
                        Err(reason) if first => *refused = refused.take().or(Some(reason)),
                        Err(_) => {}
                    }
                    if good.len() == *count {
                        break;
                    }
                }
            }
        }
        good
    }

    /// Loads a version, unless it is loaded. A version that was refused is tried again only if its files have
    /// changed, or those of a version that it builds on, or after some time if the reason may have passed.
    ///
    /// # Errors
    /// Why it is refused.
    fn load(&mut self, version: Version) -> Result<(), String> {
        if version == self.model.engine.version() || self.known.secondary.contains_key(&version) {
            return Ok(());
        }
        let (loader, name) = (&self.versions.loader, self.name);
        if let Some(refusal) = self.known.refused.get(&version)
            && refusal.stays()
            && self.stamper.are_same(&refusal.stamps)
        {
            return Err(refusal.reason.clone());
        }
        let model = self.model;
        let secondary = self.known.secondary.values().map(|engine| engine.served());
        let below = secondary.chain([model.engine.served()]).filter(|loaded| loaded.version() < version);
        let before = below.max_by_key(|loaded| loaded.version());
        // Read before the version is opened, so that later changes are noticed.
        let loaded = before.as_ref().and_then(|before| before.store.base());
        let stamps = self.stamper.of_chain(version, loaded);
        let open = || open(loader, model, version, before);
        let opened = if self.urgent { open() } else { self.versions.opening.install(open) };
        match opened {
            Ok(loaded) => {
                self.known.refused.remove(&version);
                tracing::debug!(model = name, version = version.0, "version opened");
                let engine = self.versions.secondary(self.model, name, loaded);
                self.known.secondary.insert(version, engine);
                Ok(())
            }
            Err(error) => {
                let (number, serving) = (version.0, self.model.engine.version().0);
                let reason = format!("{error:#}");
                tracing::warn!(model = name, version = number, serving, %reason, "version refused");
                let text = format!("version {version}: {reason}");
                loader.metrics.events.record(EventKind::Refused, name, text);
                self.model.engine.count_refused();
                let reason = refusal(version, &reason);
                let passes = error.downcast_ref::<StoreError>().is_some_and(StoreError::may_pass);
                let refusal = Refusal::new(stamps, reason.clone(), passes);
                self.known.refused.insert(version, refusal);
                Err(reason)
            }
        }
    }
}

/// Opens a version, checks all of it, and prepares its rows. `before` is the highest loaded version below it.
fn open(
    loader: &Loader,
    LoadedModel { engine, memory, .. }: &LoadedModel,
    version: Version,
    before: Option<SharedVersion>,
) -> anyhow::Result<SharedVersion> {
    let name = engine.describe().model;
    let Some(before) = before else {
        let mut opened = store::open(&loader.models, &name, version, loader.purpose())?;
        engine.check_schema(&opened)?;
        memory.load(&mut opened)?;
        memory.prepare(&mut opened);
        return Ok(engine.accept(opened)?);
    };
    let mut opened = store::open_after(&loader.models, &name, version, &before.store)?;
    engine.check_schema(&opened)?;
    // Otherwise the base rows are those of the loaded version, and ready.
    if !opened.store.builds_on(&before.store) {
        memory.load(&mut opened)?;
        memory.prepare(&mut opened);
    }
    Ok(engine.accept(opened)?)
}
