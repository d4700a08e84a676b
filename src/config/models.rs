//! Settings of single models: the keys of `[batcher]` in `[models.NAME.batcher]`, or as variables
//! `FLECHETTE_MODELS_<NAME>_BATCHER_<KEY>` with the name as it is.
//!
//! Their full key is `models.NAME.batcher.KEY`. What a model does not have is taken from `[batcher]`.

use std::collections::{BTreeMap, BTreeSet};

use super::layers::{Layers, PREFIX, variable};
use super::settings::{self, Setting};
use super::{BatcherConfig, ConfigError, ServerConfig};

/// The settings of the models' batchers.
#[derive(Clone, Debug, PartialEq)]
pub struct Batchers {
    /// Section `batcher`.
    pub common: BatcherConfig,
    /// Of the models that have settings for themselves, by name.
    pub models: BTreeMap<String, BatcherConfig>,
}

impl Batchers {
    /// The settings of a model's batcher.
    pub(crate) fn of(&self, model: &str) -> &BatcherConfig {
        self.models.get(model).unwrap_or(&self.common)
    }
}

/// Whether a model may have this name. One with a control character could not be printed as a key of TOML.
fn is_name(model: &str) -> bool {
    !model.is_empty() && !model.contains(char::is_control)
}

/// The model and the setting of a full key.
pub(super) fn of_model(key: &str) -> Option<(&str, &'static Setting)> {
    let (rest, name) = key.strip_prefix("models.")?.rsplit_once('.')?;
    let model = rest.strip_suffix(".batcher").filter(|model| is_name(model))?;
    Some((model, settings::find(&format!("batcher.{name}"))?))
}

/// The full keys that may be meant by a name that is not one of them.
pub(super) fn keys_like(name: &str) -> Vec<String> {
    let rest = name.strip_prefix("models.").and_then(|name| name.rsplit_once('.'));
    let Some(model) = rest.and_then(|(rest, _)| rest.strip_suffix(".batcher")) else { return Vec::new() };
    own().map(|setting| format!("models.{model}.{}", setting.key)).collect()
}

/// The settings that a model can have for itself.
fn own() -> impl Iterator<Item = &'static Setting> {
    settings::all().filter(|setting| setting.key.starts_with("batcher."))
}

/// The full key of an environment variable.
pub(super) fn key_of_variable(name: &str) -> Option<String> {
    let (model, end) = split_variable(name)?;
    let setting = own().find(|setting| variable(setting.key).strip_prefix(PREFIX) == Some(end))?;
    Some(format!("models.{model}.{}", setting.key))
}

/// The variables that may be meant by a name that is not one of them.
pub(super) fn variables_like(name: &str) -> Vec<String> {
    let Some((model, _)) = split_variable(name) else { return Vec::new() };
    let of =
        |setting: &Setting| variable(setting.key).replacen(PREFIX, &format!("{PREFIX}MODELS_{model}_"), 1);
    own().map(of).collect()
}

/// The model and `BATCHER_<KEY>`.
fn split_variable(name: &str) -> Option<(&str, &str)> {
    let rest = name.strip_prefix(PREFIX)?.strip_prefix("MODELS_")?;
    let at = rest.rfind("_BATCHER_").filter(|at| is_name(&rest[..*at]))?;
    Some((&rest[..at], &rest[at + 1..]))
}

impl Layers {
    /// The names of the models that have settings for themselves.
    pub(super) fn models(&self) -> BTreeSet<&str> {
        self.given.keys().filter_map(|key| of_model(key)).map(|(model, _)| model).collect()
    }

    /// # Errors
    /// For the first wrong value, of the common settings before those of models.
    pub(super) fn batchers(&self, server: &ServerConfig) -> Result<Batchers, ConfigError> {
        let common = self.batcher(server)?;
        let batcher = |model: &str| Ok((model.to_owned(), self.of(model).batcher(server)?));
        Ok(Batchers { common, models: self.models().into_iter().map(batcher).collect::<Result<_, _>>()? })
    }

    /// These layers with the settings of a model in the place of the common ones.
    fn of(&self, model: &str) -> Self {
        let mut layers = self.clone();
        for (key, given) in &self.given {
            if let Some((_, setting)) = of_model(key).filter(|(name, _)| *name == model) {
                layers.given.insert(setting.key.to_owned(), given.clone());
            }
        }
        layers
    }
}
