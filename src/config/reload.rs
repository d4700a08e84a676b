//! How the settings of a running server change.

use std::collections::BTreeSet;

use super::layers::Layers;
use super::models::of_model;
use super::settings;
use super::{Config, ConfigError};

/// The settings that a running server uses from now on.
#[derive(Debug)]
pub(crate) struct Reloaded {
    pub layers: Layers,
    pub config: Config,
    /// Keys with a new value that is used from now on.
    pub changed: Vec<String>,
    /// Keys with a new value that is used after a restart.
    pub restart: Vec<String>,
}

impl Layers {
    /// Reads the file and the environment again, with the same flags.
    ///
    /// # Errors
    /// As [`Self::changed_to`], and when the file cannot be read.
    pub(crate) fn reload(&self) -> Result<Reloaded, ConfigError> {
        self.changed_to(&Self::load(&self.flags)?)
    }

    /// Takes those values of `new` that can change while the server runs.
    ///
    /// # Errors
    /// When `new` is wrong, or when its values are wrong together with those that stay.
    pub(super) fn changed_to(&self, new: &Self) -> Result<Reloaded, ConfigError> {
        new.clone().config()?;
        let of_models: BTreeSet<&String> = self.given.keys().chain(new.given.keys()).collect();
        let of_models = of_models.into_iter().filter_map(|key| Some((key.as_str(), of_model(key)?.1)));
        let all = settings::all().map(|setting| (setting.key, setting)).chain(of_models);
        let (reloads, stays): (Vec<_>, Vec<_>) = all.partition(|(_, setting)| setting.reloads);
        let differs = |(key, _): &(&str, _)| self.text(key) != new.text(key);
        let [changed, restart] =
            [&reloads, &stays].map(|keys| keys.iter().copied().filter(differs).collect());
        let mut layers = self.clone();
        // Also those that have not changed: a setting of a model may now give what was the common value.
        reloads.iter().for_each(|(key, _)| layers.take(key, new));
        let keys = |settings: Vec<(&str, _)>| settings.iter().map(|(key, _)| (*key).to_owned()).collect();
        let (changed, restart): (_, Vec<String>) = (keys(changed), keys(restart));
        match layers.clone().config() {
            Ok(config) => Ok(Reloaded { layers, config, changed, restart }),
            Err(error) => Err(ConfigError::NeedsRestart { error: Box::new(error), stay: restart }),
        }
    }
}
