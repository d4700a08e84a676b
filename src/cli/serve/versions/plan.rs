//! What is wanted of a model, and opening what is not loaded yet.

use std::collections::{BTreeMap, BTreeSet};

use super::{LookContext, Settling, VersionRefusal, refusal};
use crate::cli::serve::stamps::Stamper;
use crate::cli::serve::{LoadedModel, Loader};
use crate::config::{STABLE, Shadow, TrafficConfig, VersionPolicy};
use crate::engine::SharedVersion;
use crate::metrics::EventKind;
use crate::predict::Predict;
use crate::server::{LabelTargets, Labels, MissingVersion};
use crate::store::{self, StoreError};
use crate::types::{Version, VersionSelector};

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
    pub missing: Vec<MissingVersion>,
    /// The reason why the highest version that was tried now is refused.
    pub refused: Option<String>,
}

/// The versions that `models.NAME.versions` selects.
#[derive(Default)]
struct PolicyVersions {
    /// Those that are loaded.
    good: BTreeSet<Version>,
    /// Those that the settings give and are refused.
    missing: Vec<MissingVersion>,
    /// The reason why the highest version that was tried now is refused.
    refused: Option<String>,
}

/// The versions that labels name.
struct LabelVersions {
    stable: Version,
    /// The versions that other labels name.
    pinned: BTreeSet<Version>,
}

/// The versions that settings name, by label or by setting.
fn named(traffic: &TrafficConfig) -> BTreeMap<String, VersionSelector> {
    let versions = match &traffic.versions {
        VersionPolicy::Given(versions) => versions.iter().copied().collect(),
        VersionPolicy::Latest(_) => Vec::new(),
    };
    let versions = versions
        .into_iter()
        .map(|version| (format!("versions {version}"), VersionSelector::Version(version)));
    let shadow = match traffic.shadow {
        Some(Shadow::Target(target)) => Some(("shadow".to_owned(), target)),
        Some(Shadow::Label(_)) | None => None,
    };
    let labels = traffic.labels.iter().map(|(label, target)| (format!("label {label}"), *target));
    let all = labels.chain(versions).chain(shadow);
    all.filter(|(_, target)| *target != VersionSelector::Latest).collect()
}

impl Settling<'_> {
    /// The labels of the model, with those of the present settings.
    fn labels(&self, traffic: &TrafficConfig) -> Result<Labels, String> {
        let LookContext { registry, loader, .. } = self.context;
        let labels = match registry.labels(self.name) {
            Some(labels) => Labels { settings: traffic.labels.clone(), ..labels },
            None => {
                let set =
                    store::labels::load(&loader.models, self.name).map_err(|error| error.to_string())?;
                let labels = Labels { settings: traffic.labels.clone(), set };
                registry.set_labels(self.name, labels.clone());
                labels
            }
        };
        Ok(labels)
    }

    /// Opens what is wanted and not loaded yet.
    pub(super) fn plan(&mut self) -> Result<VersionPlan, String> {
        let traffic = self.context.loader.live.traffic(self.name);
        let mut labels = self.labels(&traffic)?;
        match self.options.label {
            // It may be refused. The next look warns.
            Some(change) => labels = labels.with(change),
            None => self.warn_of_overridden(&labels),
        }
        self.keep_named(&traffic);
        let on_disk = self.on_disk()?;
        let wanted = named(&TrafficConfig { labels: labels.all(), ..traffic.clone() });
        // A version that is named but not on disk stays refused, so that it is logged once.
        let named = |version| wanted.values().any(|target| *target == VersionSelector::Version(version));
        self.known.refused.retain(|version, _| on_disk.contains(version) || named(*version));
        self.warn_of_gone(&on_disk);
        self.stamper = Stamper::new(&self.context.loader.models, self.name);
        let main = self.model.engine.version();
        let PolicyVersions { mut good, mut missing, refused } = self.open_policy(&traffic.versions, &on_disk);
        if good.is_empty() {
            good.insert(main);
        }
        let latest = good.last().copied().unwrap_or(main);
        let LabelVersions { stable, pinned } = self.open_labels(&labels, latest, &mut missing)?;
        let shadow = match &traffic.shadow {
            None => None,
            Some(Shadow::Target(target)) => Some(*target),
            Some(Shadow::Label(label)) => {
                let target = labels.all().get(label).copied();
                if target.is_none() {
                    let text = format!("shadow: the model has no label {label:?}");
                    missing.push(MissingVersion { version: None, text });
                }
                target
            }
        };
        let shadow = shadow.map(|target| target.version(latest));
        let shadow = shadow.filter(|version| match self.load(*version) {
            Ok(()) => true,
            Err(reason) => {
                missing.push(MissingVersion { version: Some(*version), text: format!("shadow: {reason}") });
                false
            }
        });
        let wanted = good.iter().chain(&pinned).chain(&shadow).chain([&stable]).copied().collect();
        Ok(VersionPlan { wanted, latest, stable, pinned, shadow, traffic, missing, refused })
    }

    /// Warns once of each label of the settings that has no effect, because a client has set the label.
    fn warn_of_overridden(&mut self, labels: &Labels) {
        let overridden: BTreeMap<String, LabelTargets> = labels.overridden().collect();
        for (label, targets) in &overridden {
            if self.known.overridden.get(label) != Some(targets) {
                let LabelTargets { set, settings } = targets;
                let model = self.name;
                tracing::warn!(
                    model,
                    "label {label} is {set}, as a client has set it, and not {settings}, as in \
                     models.{model}.labels"
                );
            }
        }
        self.known.overridden = overridden;
    }

    /// Writes down which versions the settings name, so that no trainer removes them while no server has
    /// them.
    fn keep_named(&mut self, traffic: &TrafficConfig) {
        let named = named(traffic);
        if self.known.named.as_ref() == Some(&named) {
            return;
        }
        let (models, name) = (&self.context.loader.models, self.name);
        let same = store::labels::load_settings(models, name).is_ok_and(|before| before == named);
        let saved = if same { Ok(()) } else { store::labels::save_settings(models, name, &named) };
        match saved {
            Ok(()) => (self.known.named, self.known.named_unsaved) = (Some(named), false),
            // Tried again at the next look.
            Err(error) => {
                if !std::mem::replace(&mut self.known.named_unsaved, true) {
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

    /// The versions of the model's directory, ascending.
    fn on_disk(&mut self) -> Result<Vec<Version>, String> {
        let (loader, name) = (&self.context.loader, self.name);
        let serving = self.model.engine.version();
        match store::versions(&loader.models, name) {
            Ok(versions) => {
                if std::mem::take(&mut self.known.unreadable) {
                    tracing::info!(model = name, version = serving.0, "model readable again");
                }
                Ok(versions)
            }
            Err(reason) => {
                if !std::mem::replace(&mut self.known.unreadable, true) {
                    let effect = "the loaded version goes on";
                    tracing::warn!(model = name, version = serving.0, %reason, "model unreadable: {effect}");
                    let text = format!("unreadable: {reason}; {effect}");
                    loader.metrics.events.record(EventKind::Refused, name, text);
                }
                Err(reason.to_string())
            }
        }
    }

    /// The loaded versions.
    fn loaded(&self) -> Vec<SharedVersion> {
        let secondary = self.known.secondary.values().map(|engine| engine.served());
        secondary.chain([self.model.engine.served()]).collect()
    }

    /// Warns once of each loaded version that is no longer on disk, or whose number another version has
    /// there.
    fn warn_of_gone(&mut self, on_disk: &[Version]) {
        let loader = &self.context.loader;
        let mut gone = BTreeMap::new();
        for loaded in self.loaded() {
            let version = loaded.version();
            let is_replaced = |base| {
                let check = store::check_base(&loader.models, self.name, base);
                matches!(check, Err(StoreError::BaseDiffers { .. }))
            };
            let text = if !on_disk.contains(&version) {
                "version no longer on disk: it goes on, and a restart would not find it"
            } else if loaded.store.base().is_some_and(is_replaced) {
                "another version has its number on disk: the loaded one goes on, and unloading and loading \
                 the model, or a restart, takes the other one"
            } else {
                continue;
            };
            gone.insert(version, text);
            if self.known.gone.get(&version) != Some(&text) {
                tracing::warn!(model = self.name, version = version.0, "{text}");
                loader.metrics.events.record(EventKind::Gone, self.name, format!("{version}: {text}"));
            }
        }
        self.known.gone = gone;
    }

    /// Opens the versions of a policy.
    fn open_policy(&mut self, policy: &VersionPolicy, on_disk: &[Version]) -> PolicyVersions {
        let mut of = PolicyVersions::default();
        match policy {
            VersionPolicy::Given(versions) => {
                for &version in versions {
                    match self.load(version) {
                        Ok(()) => drop(of.good.insert(version)),
                        Err(text) => of.missing.push(MissingVersion { version: Some(version), text }),
                    }
                }
            }
            VersionPolicy::Latest(count) => {
                let mut candidates: BTreeSet<Version> = self.known.secondary.keys().copied().collect();
                candidates.insert(self.model.engine.version());
                let loaded = candidates.last().copied();
                let is_old = |version: &Version| Some(*version) <= loaded;
                // A client that sets a label does not wait for others.
                let old = self.options.label.is_none();
                let wanted = |version: &&Version| self.options.new || (old && is_old(version));
                candidates.extend(on_disk.iter().filter(wanted));
                for version in candidates.into_iter().rev() {
                    let first = !self.known.refused.contains_key(&version);
                    match self.load(version) {
                        Ok(()) => drop(of.good.insert(version)),
                        Err(reason) if first => of.refused = of.refused.or(Some(reason)),
                        Err(_) => {}
                    }
                    if of.good.len() == *count {
                        break;
                    }
                }
            }
        }
        of
    }

    /// Opens the versions that labels name.
    ///
    /// # Errors
    /// Why the version of the label that shall be set is refused. Those of others are `missing`.
    fn open_labels(
        &mut self,
        labels: &Labels,
        latest: Version,
        missing: &mut Vec<MissingVersion>,
    ) -> Result<LabelVersions, String> {
        let mut of = LabelVersions { stable: latest, pinned: BTreeSet::new() };
        for (label, target) in labels.all() {
            let version = target.version(latest);
            match self.load(version) {
                Ok(()) if label == STABLE => of.stable = version,
                Ok(()) if target == VersionSelector::Latest => {}
                Ok(()) => drop(of.pinned.insert(version)),
                Err(reason) => {
                    if self.options.label.is_some_and(|change| change.label == label) {
                        return Err(reason);
                    }
                    if label == STABLE {
                        of.stable = self.model.engine.version();
                    }
                    let text = format!("label {label}: {reason}");
                    missing.push(MissingVersion { version: Some(version), text });
                }
            }
        }
        Ok(of)
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
        if let Some(refusal) = self.known.refused.get(&version)
            && refusal.stays()
            && self.stamper.are_same(&refusal.stamps)
        {
            return Err(refusal.reason.clone());
        }
        let (loader, model, name) = (&self.context.loader, self.model, self.name);
        let loaded = self.loaded();
        let bases: Vec<_> = loaded.iter().filter_map(|loaded| loaded.store.base()).collect();
        // Read before the version is opened, so that later changes are noticed.
        let stamps = self.stamper.of_chain(version, &bases);
        let open = || open(loader, model, version, &loaded);
        let opened = if self.options.urgent { open() } else { self.context.opening.install(open) };
        match opened {
            Ok(loaded) => {
                self.known.refused.remove(&version);
                tracing::debug!(model = name, version = version.0, "version opened");
                self.known.secondary.insert(version, self.secondary(loaded));
                Ok(())
            }
            Err(error) => {
                let (number, serving) = (version.0, model.engine.version().0);
                let reason = format!("{error:#}");
                tracing::warn!(model = name, version = number, serving, %reason, "version refused");
                let text = format!("version {version}: {reason}");
                loader.metrics.events.record(EventKind::Refused, name, text);
                model.engine.count_refused();
                let reason = refusal(version, &reason);
                let passes = error.downcast_ref::<StoreError>().is_some_and(StoreError::may_pass);
                let refusal = VersionRefusal::new(stamps, reason.clone(), passes);
                self.known.refused.insert(version, refusal);
                Err(reason)
            }
        }
    }
}

/// Opens a version, checks all of it that no loaded version shares, and prepares its rows.
fn open(
    loader: &Loader,
    LoadedModel { engine, memory, .. }: &LoadedModel,
    version: Version,
    loaded: &[SharedVersion],
) -> anyhow::Result<SharedVersion> {
    let name = engine.describe().model;
    let stores: Vec<_> = loaded.iter().map(|loaded| &loaded.store).collect();
    let mut opened = store::open_beside(&loader.models, &name, version, &stores)?;
    engine.check_schema(&opened)?;
    // Otherwise the base rows are those of a loaded version, and ready.
    if !stores.iter().any(|loaded| opened.store.shares_base_rows(loaded)) {
        memory.load(&mut opened)?;
        memory.prepare(&mut opened);
    }
    Ok(engine.accept(opened)?)
}
