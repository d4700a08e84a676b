//! The tables `[models.NAME]` of the file: which versions of a model are loaded, and how its requests are
//! shared out among them. They have no flags or environment variables.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use toml::de::DeValue;

use super::layers::Given;
use super::settings::{Fallback, MODEL_SECTION, Setting};
use super::{ConfigError, Source, unknown};
use crate::types::{Follow, Version};

/// How the tables are named when they have changed.
pub(crate) const MODEL_TABLES: &str = MODEL_SECTION.name;

/// Most versions that a policy loads, most labels of a model, and most bytes of a label.
pub(crate) const MAX_VERSIONS: usize = 32;
pub(crate) const MAX_LABELS: usize = 16;
const LABEL_BYTES: usize = 32;

/// The label of requests that name neither a version nor a label, and the one that gets a share of them.
pub(crate) const STABLE: &str = "stable";
pub(crate) const CANARY: &str = "canary";

const CANARY_SHARE: &str = "models.NAME.canary_share";
const LABELS: &str = "models.NAME.labels";
const SHADOW: &str = "models.NAME.shadow";
const SHADOW_SHARE: &str = "models.NAME.shadow_share";
const STICKY: &str = "models.NAME.sticky";
const VERSIONS: &str = "models.NAME.versions";

/// A table `[models.NAME]`.
#[allow(missing_docs)] // settings.rs has the meaning of each key
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TrafficConfig {
    pub versions: VersionPolicy,
    pub labels: BTreeMap<String, Follow>,
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
            shadow_share: 0.0,
        }
    }
}

/// Which versions of a model are loaded, besides those that its labels name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum VersionPolicy {
    /// So many of the highest good ones.
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
    Follow(Follow),
    Label(String),
}

/// Whether a text can be the name of a label.
pub(crate) fn is_label(text: &str) -> bool {
    let letter =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'_';
    let starts = text.as_bytes().first().is_some_and(u8::is_ascii_lowercase);
    starts && text.len() <= LABEL_BYTES && text.bytes().all(letter) && Follow::parse(text).is_none()
}

/// What the name of a label must be.
pub(crate) const LABEL_FORM: &str =
    "1 to 32 lowercase letters, digits, - and _, the first a letter, but not \"latest\"";

/// The settings of one model that are given.
#[derive(Clone, Debug, Default)]
pub(crate) struct ModelTable(BTreeMap<&'static str, Given>);

impl ModelTable {
    /// Adds a key of the table. `place` is for errors.
    pub(crate) fn add(&mut self, name: &str, value: &DeValue<'_>, source: Source) -> Result<(), ConfigError> {
        let Some(key) = keys().find(|setting| short(setting) == name).map(|setting| setting.key) else {
            return Err(unknown::model_key(source.to_string(), name.to_owned()));
        };
        let Some(text) = text_of(value) else {
            let expected = "a string, a number, or a list or table of them".to_owned();
            return Err(ConfigError::Value {
                key,
                source_of: source,
                expected,
                got: value.type_str().to_owned(),
            });
        };
        self.0.insert(key, Given { text, source });
        Ok(())
    }

    /// Whether both give the same values.
    pub(crate) fn same(&self, other: &Self) -> bool {
        let texts =
            |table: &Self| table.0.iter().map(|(key, given)| (*key, given.text.clone())).collect::<Vec<_>>();
        texts(self) == texts(other)
    }

    /// Validates everything.
    pub(crate) fn config(&self) -> Result<TrafficConfig, ConfigError> {
        let share = |text: &str| text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
        let share_form = || "a number from 0 to 1".to_owned();
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
        let shadow = self.given(SHADOW).map(|_| self.parse(SHADOW, shadow_form, shadow_of)).transpose()?;
        let labels = self.given(LABELS).map(|_| self.parse(LABELS, label_form, labels_of)).transpose()?;
        Ok(TrafficConfig {
            versions: self.parse(VERSIONS, policy_form, policy_of)?,
            labels: labels.unwrap_or_default(),
            canary_share: self.parse(CANARY_SHARE, share_form, share)?,
            sticky: self.parse(STICKY, sticky_form, sticky_of)?,
            shadow,
            shadow_share: self.parse(SHADOW_SHARE, share_form, share)?,
        })
    }

    fn given(&self, key: &str) -> Option<&Given> {
        self.0.get(key)
    }

    fn parse<T>(
        &self,
        key: &'static str,
        expected: impl FnOnce() -> String,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, ConfigError> {
        let given = self.given(key);
        let default = keys().find(|setting| setting.key == key).map(|setting| setting.default);
        let text = match (given, default) {
            (Some(given), _) => given.text.trim(),
            (None, Some(Fallback::Text(text))) => text,
            (None, _) => "",
        };
        read(text).ok_or_else(|| ConfigError::Value {
            key,
            source_of: given.map_or(Source::Default, |given| given.source.clone()),
            expected: expected(),
            got: format!("{text:?}"),
        })
    }

    /// The table as text that can be read again.
    pub(crate) fn to_toml(&self, model: &str) -> String {
        let mut text = format!("\n[models.{}]\n", toml::Value::String(model.to_owned()));
        for setting in keys() {
            // Writing to a string cannot fail.
            let _ = match (self.given(setting.key), setting.default) {
                (Some(Given { text: value, source }), _) => {
                    let value = toml::Value::String(value.clone());
                    writeln!(text, "{} = {value}  # {source}", short(setting))
                }
                (None, Fallback::Text(value)) => {
                    let value = toml::Value::String(value.to_owned());
                    writeln!(text, "{} = {value}  # default", short(setting))
                }
                (None, Fallback::Words(words)) => writeln!(text, "# {}: {words}  # default", short(setting)),
            };
        }
        text
    }
}

/// The settings of a model.
fn keys() -> impl Iterator<Item = &'static Setting> {
    MODEL_SECTION.settings.iter()
}

/// The name of a setting in its table.
pub(crate) fn short(setting: &Setting) -> &'static str {
    setting.key.rsplit('.').next().unwrap_or(setting.key)
}

/// Lists become texts with commas, and tables `key = value` with commas.
fn text_of(value: &DeValue<'_>) -> Option<String> {
    let joined = |parts: Vec<String>| parts.join(", ");
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(digits) => {
            i64::from_str_radix(digits.as_str(), digits.radix()).ok().map(|n| n.to_string())
        }
        DeValue::Float(number) => Some(number.to_string()),
        DeValue::Array(list) => {
            list.iter().map(|part| text_of(part.get_ref())).collect::<Option<_>>().map(joined)
        }
        DeValue::Table(table) => {
            let pair = |(key, value): (&toml::Spanned<_>, &toml::Spanned<DeValue<'_>>)| {
                let key: &std::borrow::Cow<'_, str> = key.get_ref();
                Some(format!("{key} = {}", text_of(value.get_ref())?))
            };
            table.iter().map(pair).collect::<Option<_>>().map(joined)
        }
        _ => None,
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
                let numbers = text.split(',').map(|number| number.trim().parse().ok().map(Version));
                let given: BTreeSet<Version> = numbers.collect::<Option<_>>()?;
                (given.len() <= MAX_VERSIONS).then_some(VersionPolicy::Given(given))
            }
        },
    }
}

fn labels_of(text: &str) -> Option<BTreeMap<String, Follow>> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let pair = |part: &str| {
        let (label, version) = part.split_once('=')?;
        let label = label.trim();
        is_label(label).then_some((label.to_owned(), Follow::parse(version.trim())?))
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
    Follow::parse(text).map(Shadow::Follow).or_else(label)
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
