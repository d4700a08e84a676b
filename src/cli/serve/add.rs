//! Adds models to the server, at the start and while it runs.
//!
//! A model that cannot be loaded is refused: the log, `/readyz` and the status page say why, and the other
//! models are served. It is tried again if its files have changed, so a version that is copied into place
//! slowly is served when it is complete. If the reason is not in its files, such as a lack of memory, it is
//! also tried again after a minute, and then after twice as long each time, up to an hour.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::stamps::{Stamper, Stamps};
use super::versions::{ServedVersions, SettleOptions};
use super::watch::{Wake, unless_it_panics};
use super::{LoadedModels, Loader};
use crate::cli::error_line;
use crate::server::Registry;
use crate::store::{self, StoreError};

/// Loads models, and adds them to a server.
pub(crate) struct Adder {
    pub loader: Arc<Loader>,
    pub served: LoadedModels,
    pub registry: Registry,
    pub versions: ServedVersions,
    refused: HashMap<String, ModelRefusal>,
}

/// The wait before a refused model is tried again although its files have not changed.
const FIRST_WAIT: Duration = Duration::from_secs(60);
const MAX_WAIT: Duration = Duration::from_secs(3600);

/// A model was not loaded because of a mistake in this program.
#[derive(Debug, thiserror::Error)]
#[error("loading it panicked: the log has the reason")]
pub(crate) struct LoadPanicked;

/// A model that was refused.
struct ModelRefusal {
    /// Its files as they were then.
    stamps: Stamps,
    /// When it is tried again although they have not changed; `None`: never.
    again: Option<Instant>,
    /// The wait until then.
    wait: Duration,
}

impl ModelRefusal {
    fn stays(&self, now: &Stamps) -> bool {
        self.stamps == *now && self.again.is_none_or(|again| Instant::now() < again)
    }

    /// With the wait that follows the one of the refusal before, for the same files.
    fn after(before: Option<&Self>, stamps: Stamps, error: &anyhow::Error) -> Self {
        let wait = match before {
            Some(before) if before.stamps == stamps => (before.wait * 2).min(MAX_WAIT),
            _ => FIRST_WAIT,
        };
        let passes = error.downcast_ref::<StoreError>().is_none_or(StoreError::may_pass);
        Self { stamps, again: passes.then(|| Instant::now() + wait), wait }
    }
}

impl Adder {
    /// # Errors
    /// When the system cannot start a thread.
    pub(crate) fn new(
        loader: &Arc<Loader>,
        served: &LoadedModels,
        registry: Registry,
        wake: Wake,
    ) -> anyhow::Result<Self> {
        let versions = ServedVersions::new(loader, &registry, wake)?;
        let (loader, served) = (loader.clone(), served.clone());
        Ok(Self { loader, served, registry, versions, refused: HashMap::new() })
    }

    /// Loads a model and serves it, with all versions that are wanted. Returns `false`, and does nothing, if
    /// the model was refused and it is not time to try it again.
    ///
    /// # Errors
    /// When the model cannot be loaded. That is logged and shown already.
    pub(crate) fn add(&mut self, name: &str) -> anyhow::Result<bool> {
        let versions = store::versions(&self.loader.models, name).unwrap_or_default();
        // Read before the model is opened, so that later changes are noticed.
        let now = Stamper::new(&self.loader.models, name).of_model(&versions);
        if self.refused.get(name).is_some_and(|refused| refused.stays(&now)) {
            return Ok(false);
        }
        let _loads = self.registry.loads(name);
        match self.load(name) {
            Ok(()) => {
                self.refused.remove(name);
                Ok(true)
            }
            Err(error) => {
                // It may have begun to show metrics, and its next version may have another schema.
                self.loader.metrics.forget(name);
                let line = error_line(error.as_ref());
                // Whoever shows the reason names the model.
                let reason = line.strip_prefix(&format!("model {name:?}: ")).unwrap_or(&line).to_owned();
                let again = match self.loader.live.watch() {
                    Some(_) => "it is tried again if its files change",
                    None => "models.watch_seconds is 0, so a client must load it",
                };
                tracing::warn!(model = name, %reason, "model refused; {again}");
                self.registry.refuse(name, reason);
                let refused = ModelRefusal::after(self.refused.get(name), now, &error);
                self.refused.insert(name.to_owned(), refused);
                Err(error)
            }
        }
    }

    fn load(&mut self, name: &str) -> anyhow::Result<()> {
        let loaded = unless_it_panics(|| -> anyhow::Result<_> {
            let model = self.loader.load(name)?;
            self.registry.add(model.engine.clone())?;
            Ok(model)
        });
        let model = loaded.unwrap_or_else(|| Err(LoadPanicked.into()))?;
        self.served.add(model.clone());
        // The model is served from here on, whatever happens. The reason is in the log.
        let _ = unless_it_panics(|| self.versions.settle(&model, SettleOptions::FIRST));
        self.registry.loaded(name);
        Ok(())
    }

    /// Tries a model again that was refused, even if it has not changed.
    pub(crate) fn forget_refused(&mut self, name: &str) {
        self.refused.remove(name);
    }

    /// Tries all refused models again.
    pub(crate) fn forget_all_refused(&mut self) {
        self.refused.clear();
    }

    /// Forgets the refused models that are not in the directory any more, also those that were to be tried
    /// again.
    pub(crate) fn retain(&mut self, names: &[String]) {
        self.refused.retain(|name, _| names.contains(name));
        self.registry.retain(names);
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use std::io;

    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_refused_model_is_tried_again_only_if_its_files_changed_or_the_reason_may_have_passed() {
        let models = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(models.path().join("m/1")).unwrap();
        let stamps = || Stamper::new(models.path(), "m").of_model(&[crate::types::Version(1)]);
        let (before, path) = (stamps(), models.path().to_owned());
        let damaged = StoreError::MissingFile { path: path.clone() };
        let unreadable = StoreError::Io { path: path.clone(), source: io::Error::other("") };
        let refused = |reason| crate::store::Refusal { version: crate::types::Version(1), reason };
        let none_good =
            |reason| StoreError::NoGoodVersion { model: "m".to_owned(), refused: vec![refused(reason)] };
        let wait = |error: anyhow::Error| {
            let first = ModelRefusal::after(None, before.clone(), &error);
            first.again.map(|_| ModelRefusal::after(Some(&first), before.clone(), &error).wait)
        };
        assert_eq!(wait(none_good(damaged).into()), None);
        assert_eq!(wait(none_good(unreadable).into()), Some(2 * FIRST_WAIT));
        assert_eq!(wait(anyhow!("no thread")), Some(2 * FIRST_WAIT));
        let damaged = StoreError::MissingFile { path };
        let refused = ModelRefusal::after(None, before.clone(), &damaged.into());
        assert!(refused.stays(&stamps()));
        let file = models.path().join("m/1/file");
        std::fs::write(&file, "bad").unwrap();
        assert!(!refused.stays(&stamps()));
        // A copy that keeps times, such as that of rsync, repairs it.
        let (damaged, at) = (stamps(), std::fs::metadata(&file).unwrap().modified().unwrap());
        std::fs::write(&file, "yes").unwrap();
        std::fs::File::options().write(true).open(&file).unwrap().set_modified(at).unwrap();
        assert!(damaged != stamps());
    }

    #[test]
    fn a_model_that_was_refused_because_of_its_labels_is_tried_again_if_they_have_changed() {
        let models = tempfile::tempdir().unwrap();
        let labels = models.path().join("m/state/labels.json");
        std::fs::create_dir_all(labels.parent().unwrap()).unwrap();
        std::fs::write(&labels, "{").unwrap();
        let stamps = || Stamper::new(models.path(), "m").of_model(&[]);
        let damaged = crate::store::labels::load(models.path(), "m").unwrap_err();
        let refused = ModelRefusal::after(None, stamps(), &damaged.into());
        assert!(refused.again.is_none() && refused.stays(&stamps()));
        std::fs::remove_file(&labels).unwrap();
        assert!(!refused.stays(&stamps()));
    }
}
