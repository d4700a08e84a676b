//! The settings `models.NAME.*`: which versions of a model are loaded, and how its requests are shared out
//! among them.

use std::collections::{BTreeMap, BTreeSet};

use super::ConfigError;
use super::layers::Layers;
use super::models::OF_ONE;
use crate::types::{Version, VersionSelector};

/// Most versions that a policy loads, most labels of a model, and most bytes of a label.
pub(crate) const MAX_VERSIONS: usize = 32;
pub(crate) const MAX_LABELS: usize = 16;
const LABEL_BYTES: usize = 32;

/// The label of requests that name neither a version nor a label, and the one that gets a share of them.
pub(crate) const STABLE: &str = "stable";
pub(crate) const CANARY: &str = "canary";

/// The settings of one model. The default is that of a model without any.
#[allow(missing_docs)] // settings/ has the meaning of each key
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TrafficConfig {
    pub versions: VersionPolicy,
    pub labels: BTreeMap<String, VersionSelector>,
    pub canary_share: f64,
    pub sticky: Sticky,
    pub shadow: Option<Shadow>,
    pub shadow_share: f64,
}

impl Default for TrafficConfig {
    fn default() -> Self {
        Self {
            versions: VersionPolicy::Latest(1),
            labels: BTreeMap::new(),
            canary_share: 0.0,
            sticky: Sticky::RequestId,
            shadow: None,
            shadow_share: 0.1,
        }
    }
}

/// Which versions of a model are loaded, besides those that its labels name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum VersionPolicy {
    /// This many of the highest good versions.
    Latest(usize),
    /// These.
    Given(BTreeSet<Version>),
}

/// What keeps the requests of a user at one label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Sticky {
    RequestId,
    /// The ids of this feature of the first sample.
    Feature(String),
}

/// The version that scores a second time.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) enum Shadow {
    Target(VersionSelector),
    Label(String),
}

/// Whether a text can be the name of a label.
pub(crate) fn is_label(text: &str) -> bool {
    let letter =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'_';
    let starts = text.as_bytes().first().is_some_and(u8::is_ascii_lowercase);
    starts && text.len() <= LABEL_BYTES && text.bytes().all(letter) && VersionSelector::parse(text).is_none()
}

/// What the name of a label must be.
pub(crate) const LABEL_FORM: &str =
    "1 to 32 lowercase letters, digits, - and _, the first a letter, but not \"latest\"";

impl Layers {
    /// The settings `models.NAME.*`, by name.
    ///
    /// # Errors
    /// For the first wrong value.
    pub(super) fn traffic(&self) -> Result<BTreeMap<String, TrafficConfig>, ConfigError> {
        let traffic = |model: &str| Ok((model.to_owned(), self.traffic_of(model)?));
        self.models_with(OF_ONE).into_iter().map(traffic).collect()
    }

    /// The settings of one model.
    fn traffic_of(&self, model: &str) -> Result<TrafficConfig, ConfigError> {
        let key = |name: &str| format!("models.{model}.{name}");
        let policy_form = || {
            format!(
                "latest, latest N, all, or numbers of versions with commas, at most {MAX_VERSIONS} of them"
            )
        };
        let label_form = || {
            format!(
                "LABEL = VERSION, with commas, at most {MAX_LABELS}: a label is {LABEL_FORM}; a version \
                 is a number or latest"
            )
        };
        let sticky_form = || "request_id, or feature:NAME".to_owned();
        let shadow_form = || "a number, latest, or a label".to_owned();
        let labels = self.optional(&key("labels"), |key| self.parse(key, label_form, labels_of))?;
        Ok(TrafficConfig {
            versions: self.parse(&key("versions"), policy_form, policy_of)?,
            labels: labels.unwrap_or_default(),
            canary_share: self.fraction(&key("canary_share"))?,
            sticky: self.parse(&key("sticky"), sticky_form, sticky_of)?,
            shadow: self.optional(&key("shadow"), |key| self.parse(key, shadow_form, shadow_of))?,
            shadow_share: self.fraction(&key("shadow_share"))?,
        })
    }
}

fn policy_of(text: &str) -> Option<VersionPolicy> {
    let count = |text: &str| text.trim().parse().ok().filter(|count| (1..=MAX_VERSIONS).contains(count));
    match text {
        "latest" => Some(VersionPolicy::Latest(1)),
        "all" => Some(VersionPolicy::Latest(MAX_VERSIONS)),
        _ => match text.strip_prefix("latest ") {
            Some(number) => count(number).map(VersionPolicy::Latest),
            None => {
                let number = |text: &str| text.trim().parse().ok().filter(|n| *n > 0).map(Version);
                let numbers = text.split(',').map(number);
                let given: BTreeSet<Version> = numbers.collect::<Option<_>>()?;
                (given.len() <= MAX_VERSIONS).then_some(VersionPolicy::Given(given))
            }
        },
    }
}

fn labels_of(text: &str) -> Option<BTreeMap<String, VersionSelector>> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let pair = |part: &str| {
        let (label, version) = part.split_once('=')?;
        let label = label.trim();
        is_label(label).then_some((label.to_owned(), VersionSelector::parse(version.trim())?))
    };
    let pairs: Vec<_> = parts.map(pair).collect::<Option<_>>()?;
    let labels: BTreeMap<_, _> = pairs.iter().cloned().collect();
    (labels.len() == pairs.len() && labels.len() <= MAX_LABELS).then_some(labels)
}

fn sticky_of(text: &str) -> Option<Sticky> {
    match text.split_once(':') {
        None if text == "request_id" => Some(Sticky::RequestId),
        Some(("feature", name)) if !name.is_empty() => Some(Sticky::Feature(name.to_owned())),
        _ => None,
    }
}

fn shadow_of(text: &str) -> Option<Shadow> {
    let label = || is_label(text).then(|| Shadow::Label(text.to_owned()));
    VersionSelector::parse(text).map(Shadow::Target).or_else(label)
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
