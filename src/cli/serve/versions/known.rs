//! What is remembered of a model's versions between two looks at them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::RETRY_AFTER;
use super::plan::VersionPlan;
use super::switching::Switching;
use crate::cli::serve::LoadedModel;
use crate::cli::serve::stamps::Stamps;
use crate::config::TrafficConfig;
use crate::engine::Engine;
use crate::predict::Predict;
use crate::server::{LabelTargets, RefusedVersions};
use crate::types::{Version, VersionSelector};

/// What is known about the versions of a model.
#[derive(Default)]
pub(super) struct KnownVersions {
    /// Versions that were refused.
    pub refused: BTreeMap<Version, VersionRefusal>,
    /// What the settings name, as it was written down last.
    pub named: Option<BTreeMap<String, VersionSelector>>,
    /// Whether it could not be written down at the last look.
    pub named_unsaved: bool,
    /// The labels of the settings that had no effect at the last look.
    pub overridden: BTreeMap<String, LabelTargets>,
    /// Whether its directory could not be read at the last look.
    pub unreadable: bool,
    /// Loaded versions that were missing on disk at the last look, or whose number another version had, with
    /// the text that was logged.
    pub gone: BTreeMap<Version, &'static str>,
    /// The engines of the versions that the main engine does not have.
    pub secondary: BTreeMap<Version, Arc<Engine>>,
    pub shadow: Option<(Version, Arc<dyn Predict>)>,
    /// The switch of the main engine that has not ended.
    pub switching: Option<Switching>,
    /// Whether new versions were asked for during the switch, and are looked for after it.
    pub new_later: bool,
    /// What was reported to the server last.
    pub reported: Option<Reported>,
    /// Whether it is reported again, because it may have kept versions for labels that were set meanwhile.
    pub report_again: bool,
}

impl KnownVersions {
    pub(super) fn at_load(model: &LoadedModel) -> Self {
        Self { refused: (*model.refused).clone(), ..Self::default() }
    }
}

/// A version that was refused.
#[derive(Clone)]
pub(crate) struct VersionRefusal {
    /// Its files as they were then, and those of the versions that it builds on. It is tried again when they
    /// change.
    pub stamps: Stamps,
    pub reason: String,
    /// When it is tried again even if they do not change.
    pub retry_at: Option<Instant>,
}

impl VersionRefusal {
    pub(crate) fn new(stamps: Stamps, reason: String, may_pass: bool) -> Self {
        Self { stamps, reason, retry_at: may_pass.then(|| Instant::now() + RETRY_AFTER) }
    }

    pub(super) fn stays(&self) -> bool {
        self.retry_at.is_none_or(|retry_at| Instant::now() < retry_at)
    }
}

/// What the server knows about the versions of a model, because this module has reported it.
#[derive(PartialEq)]
pub(super) struct Reported {
    pub main: Version,
    /// The versions with an engine of their own.
    pub secondary: Vec<Version>,
    pub latest: Version,
    pub shadow: Option<Version>,
    pub traffic: TrafficConfig,
    pub refused: RefusedVersions,
}

impl Reported {
    pub(super) fn of(
        plan: &VersionPlan,
        main: Version,
        secondary: Vec<Version>,
        refused: RefusedVersions,
    ) -> Self {
        let VersionPlan { latest, shadow, traffic, .. } = plan;
        Self { main, secondary, latest: *latest, shadow: *shadow, traffic: traffic.clone(), refused }
    }
}

/// The sentence about a refused version.
pub(crate) fn refusal(version: Version, reason: &str) -> String {
    format!("version {version} is refused: {reason}")
}
