//! How the settings of a running server change.

use super::layers::Layers;
use super::settings::{self, Setting};
use super::{Config, ConfigError, MODEL_TABLES};

/// The settings that a running server uses from now on.
#[derive(Debug)]
pub(crate) struct Reloaded {
    pub layers: Layers,
    pub config: Config,
    /// Keys with a new value that is used from now on.
    pub changed: Vec<&'static str>,
    /// Keys with a new value that is used after a restart.
    pub restart: Vec<&'static str>,
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
        let differs = |setting: &&Setting| self.text(setting.key) != new.text(setting.key);
        let (changed, restart): (Vec<&Setting>, Vec<&Setting>) =
            settings::all().filter(differs).partition(|setting| setting.reloads);
        let mut layers = self.clone();
        changed.iter().for_each(|setting| layers.take(setting.key, new));
        let names = |layers: &Self| layers.models.keys().cloned().collect::<Vec<_>>();
        let same = names(self) == names(new)
            && self.models.values().zip(new.models.values()).all(|(old, new)| old.same(new));
        layers.models.clone_from(&new.models);
        let config = layers.clone().config()?;
        let keys = |settings: Vec<&Setting>| settings.iter().map(|setting| setting.key).collect();
        let mut changed: Vec<_> = keys(changed);
        changed.extend((!same).then_some(MODEL_TABLES));
        Ok(Reloaded { layers, config, changed, restart: keys(restart) })
    }
}
