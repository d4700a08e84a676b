//! Settings of single models: which versions of it are loaded and how its requests are shared out
//! (`traffic.rs`), in the table `[models.NAME]`, and the keys of `[batcher]` in `[models.NAME.batcher]`. As
//! variables they are `FLECHETTE_MODELS_<NAME>_<KEY>` and `FLECHETTE_MODELS_<NAME>_BATCHER_<KEY>`, with the
//! name as it is.
//!
//! Their full keys are `models.NAME.KEY` and `models.NAME.batcher.KEY`. A setting of the batcher that a model
//! does not have is taken from `[batcher]`.

use std::collections::{BTreeMap, BTreeSet};

use super::layers::{Layers, PREFIX, variable};
use super::settings::{self, MODEL_SECTION, Setting};
use super::{BatcherConfig, ConfigError, ServerConfig};

/// Prefix of the keys that a model shares with all models.
const BATCHER: &str = "batcher.";

/// Prefix of the keys that only models have. `NAME` stands for any name.
pub(super) const OF_ONE: &str = "models.NAME.";

/// How the variables begin.
const VARIABLES: &str = "FLECHETTE_MODELS_";

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

/// The settings that a model can have for itself, and that all models have in common.
fn shared() -> impl Iterator<Item = &'static Setting> {
    settings::all().filter(|setting| setting.key.starts_with(BATCHER))
}

/// The settings that a model can have for itself.
fn own() -> impl Iterator<Item = &'static Setting> {
    shared().chain(MODEL_SECTION.settings)
}

/// What follows the name of a model in the full key.
fn end(setting: &Setting) -> &'static str {
    setting.key.strip_prefix(OF_ONE).unwrap_or(setting.key)
}

/// The full key of a model's setting.
fn full_key(model: &str, setting: &Setting) -> String {
    format!("models.{model}.{}", end(setting))
}

/// What follows the name of a model in the variable.
fn variable_end(setting: &Setting) -> String {
    variable(end(setting)).replacen(PREFIX, "_", 1)
}

/// Whether a model may have this name. One with a control character could not be printed as a key of TOML.
fn is_name(model: &str) -> bool {
    !model.is_empty() && !model.contains(char::is_control)
}

/// The model and the setting of a full key.
pub(super) fn of_model(key: &str) -> Option<(&str, &'static Setting)> {
    let rest = key.strip_prefix("models.")?;
    own().find_map(|setting| {
        let model = rest.strip_suffix(end(setting))?.strip_suffix('.')?;
        // Otherwise a key of the model in the table of its batcher would be one of another model.
        (is_name(model) && !model.ends_with(".batcher")).then_some((model, setting))
    })
}

/// The key that all models have in common with a model's setting.
pub(super) fn common_key(setting: &Setting) -> Option<&'static str> {
    setting.key.starts_with(BATCHER).then_some(setting.key)
}

/// Candidates for a misspelt key.
pub(super) fn keys_like(name: &str) -> Vec<String> {
    let rest = name.strip_prefix("models.").and_then(|name| name.rsplit_once('.'));
    let Some((model, _)) = rest else { return Vec::new() };
    let model = model.strip_suffix(".batcher").unwrap_or(model);
    own().map(|setting| full_key(model, setting)).collect()
}

/// The full key of an environment variable.
pub(super) fn key_of_variable(name: &str) -> Option<String> {
    let rest = name.strip_prefix(VARIABLES)?;
    own().find_map(|setting| {
        let model = rest.strip_suffix(&variable_end(setting))?;
        is_name(model).then(|| full_key(model, setting))
    })
}

/// The variables that may be meant by a name that is not one of them.
pub(super) fn variables_like(name: &str) -> Vec<String> {
    let Some(rest) = name.strip_prefix(VARIABLES) else { return Vec::new() };
    // Names of models may have underscores too.
    let models = rest.match_indices('_').map(|(at, _)| &rest[..at]).filter(|model| !model.is_empty());
    let all = |model| own().map(move |setting| format!("{VARIABLES}{model}{}", variable_end(setting)));
    models.flat_map(all).collect()
}

impl Layers {
    /// Models with own settings whose keys begin with `begin`.
    pub(super) fn models_with(&self, begin: &str) -> BTreeSet<&str> {
        let of_models = self.given.keys().filter_map(|key| of_model(key));
        of_models.filter(|(_, setting)| setting.key.starts_with(begin)).map(|(model, _)| model).collect()
    }

    /// The models that have settings for themselves, with the full keys of these and how they are called in
    /// the model's table of the file.
    pub(super) fn of_models(&self) -> BTreeMap<&str, Vec<(&str, &'static str)>> {
        let mut models = BTreeMap::<_, Vec<_>>::new();
        for key in self.given.keys() {
            if let Some((model, setting)) = of_model(key) {
                models.entry(model).or_default().push((key.as_str(), end(setting)));
            }
        }
        models
    }

    /// # Errors
    /// For the first wrong value, of the common settings before those of models.
    pub(super) fn batchers(&self, server: &ServerConfig) -> Result<Batchers, ConfigError> {
        let common = self.batcher(server)?;
        let batcher = |model: &str| Ok((model.to_owned(), self.of(model).batcher(server)?));
        let models = self.models_with(BATCHER).into_iter().map(batcher).collect::<Result<_, _>>()?;
        Ok(Batchers { common, models })
    }

    /// These layers with the settings of a model in the place of the common ones.
    fn of(&self, model: &str) -> Self {
        let mut layers = self.clone();
        for setting in shared() {
            if let Some(given) = self.given.get(&full_key(model, setting)) {
                layers.given.insert(setting.key.to_owned(), given.clone());
            }
        }
        layers
    }
}
