//! The labels of a model that clients have set, kept for the next start; and the versions that the settings
//! of its server name, kept so that no trainer removes them while the server is down.
//!
//! The files `labels.json` and `settings.json` in `models/<model>/state/` are objects, such as `{"stable": 3,
//! "canary": "latest"}`. They are replaced atomically ([`super::atomic_write`]). A damaged file is an error
//! and not an empty one, because a label that is forgotten could undo a roll-back.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::disk::{Disk, SystemDisk};
use super::hot_rows::STATE;
use super::version_files::require_dir;
use super::{StoreError, atomic_write, bytes};
use crate::types::VersionSelector;

/// Most bytes of the file.
const MAX_BYTES: u64 = 64 << 10;

const SET: &str = "labels.json";
const SETTINGS: &str = "settings.json";

/// The file of the labels that clients have set.
pub(crate) fn path(models: &Path, name: &str) -> PathBuf {
    models.join(name).join(STATE).join(SET)
}

/// The file of what the settings name.
fn settings_path(models: &Path, name: &str) -> PathBuf {
    models.join(name).join(STATE).join(SETTINGS)
}

/// The labels of a model; none if none were set.
///
/// # Errors
/// [`StoreError`] when the file cannot be read or is damaged.
pub(crate) fn load(models: &Path, name: &str) -> Result<BTreeMap<String, VersionSelector>, StoreError> {
    load_from(&path(models, name))
}

/// What the settings of the last server name, by label or by setting.
///
/// # Errors
/// As [`load`].
pub(crate) fn load_settings(
    models: &Path,
    name: &str,
) -> Result<BTreeMap<String, VersionSelector>, StoreError> {
    load_from(&settings_path(models, name))
}

fn load_from(path: &Path) -> Result<BTreeMap<String, VersionSelector>, StoreError> {
    let at = |e| StoreError::at(path, e);
    let file = match bytes::open_regular(path) {
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(BTreeMap::new());
        }
        file => file.map_err(at)?,
    };
    let mut text = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut text).map_err(at)?;
    let damaged = |reason: String| StoreError::Labels { path: path.to_owned(), reason };
    if text.len() as u64 > MAX_BYTES {
        return Err(damaged(format!("expected at most {MAX_BYTES} bytes")));
    }
    let labels: BTreeMap<String, Value> =
        serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    let target = |(label, value): (String, Value)| {
        let target = match &value {
            Value::Number(number) => VersionSelector::parse(&number.to_string()),
            Value::String(text) => VersionSelector::parse(text),
            _ => None,
        };
        let wrong = || damaged(format!("{label}: expected a number or latest, got {value}"));
        Ok((label.clone(), target.ok_or_else(wrong)?))
    };
    labels.into_iter().map(target).collect()
}

/// Replaces the labels of a model, whose directory must exist.
///
/// # Errors
/// [`StoreError`]. The old file is then unchanged, unless only the last sync failed.
pub(crate) fn save(
    models: &Path,
    name: &str,
    labels: &BTreeMap<String, VersionSelector>,
) -> Result<(), StoreError> {
    save_of(models, name, &path(models, name), labels)
}

/// Replaces what the settings name, of a model whose directory must exist.
///
/// # Errors
/// As [`save`].
pub(crate) fn save_settings(
    models: &Path,
    name: &str,
    named: &BTreeMap<String, VersionSelector>,
) -> Result<(), StoreError> {
    save_of(models, name, &settings_path(models, name), named)
}

fn save_of(
    models: &Path,
    name: &str,
    path: &Path,
    labels: &BTreeMap<String, VersionSelector>,
) -> Result<(), StoreError> {
    // Otherwise it would be made: where the disk with the models is not mounted, for example.
    require_dir(&models.join(name))?;
    save_on(&SystemDisk, path, labels)
}

fn save_on(
    disk: &dyn Disk,
    path: &Path,
    labels: &BTreeMap<String, VersionSelector>,
) -> Result<(), StoreError> {
    let value = |target: &VersionSelector| match target {
        VersionSelector::Latest => Value::String(target.to_string()),
        VersionSelector::Version(version) => Value::Number(version.0.into()),
    };
    let object: serde_json::Map<_, _> =
        labels.iter().map(|(label, target)| (label.clone(), value(target))).collect();
    let text = format!("{:#}\n", Value::Object(object));
    atomic_write::replace(disk, path, |file, path| disk.append(file, path, text.as_bytes()))
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::super::atomic_write::failing::Failing;
    use super::*;
    use crate::types::Version;

    fn labels(stable: u64) -> BTreeMap<String, VersionSelector> {
        [
            ("canary".to_owned(), VersionSelector::Latest),
            ("stable".to_owned(), VersionSelector::Version(Version(stable))),
        ]
        .into()
    }

    /// A directory with a model.
    fn models() -> tempfile::TempDir {
        let models = tempfile::tempdir().unwrap();
        std::fs::create_dir(models.path().join("ctr")).unwrap();
        models
    }

    #[test]
    fn labels_of_a_model_that_is_not_there_are_not_saved() {
        let models = models();
        std::fs::rename(models.path().join("ctr"), models.path().join("moved")).unwrap();
        for saved in [save(models.path(), "ctr", &labels(3)), save_settings(models.path(), "ctr", &labels(3))]
        {
            assert!(matches!(saved, Err(StoreError::MissingDirectory { .. })), "{saved:?}");
        }
        assert!(!models.path().join("ctr").exists());
    }

    #[test]
    fn saved_labels_are_loaded_and_damaged_ones_are_refused() {
        let models = models();
        let load = || load(models.path(), "ctr");
        assert!(load().unwrap().is_empty());
        save(models.path(), "ctr", &labels(3)).unwrap();
        assert_eq!(load().unwrap(), labels(3));
        for damaged in ["", "{", "[1]", "{\"stable\": -1}", "{\"stable\": \"newest\"}", "{\"stable\": null}"]
        {
            std::fs::write(path(models.path(), "ctr"), damaged).unwrap();
            assert!(load().unwrap_err().to_string().contains("labels.json: damaged: "), "{damaged}");
        }
    }

    #[test]
    fn whatever_fails_there_are_old_or_new_labels() {
        let models = models();
        save(models.path(), "ctr", &labels(1)).unwrap();
        for at in 0.. {
            let saved = save_on(&Failing::at(at), &path(models.path(), "ctr"), &labels(2));
            let found = load(models.path(), "ctr").unwrap();
            assert!([1, 2].map(labels).contains(&found), "{found:?}");
            if saved.is_ok() {
                assert!(at > 3 && found == labels(2));
                return;
            }
        }
    }

    mod fuzz {
        use super::*;
        use crate::fuzz::bytes::{Input, mutated};
        use crate::fuzz::run;

        #[test]
        fn labels_of_versions() {
            let models = models();
            save(models.path(), "ctr", &labels(3)).unwrap();
            let file = path(models.path(), "ctr");
            let seed = std::fs::read(&file).unwrap();
            run(mutated([seed], &["latest", "canary", "null", "\"a\": 1,", "[]", "1.5"]), |Input(text)| {
                std::fs::write(&file, text).unwrap();
                let Ok(read) = load(models.path(), "ctr") else { return false };
                save(models.path(), "ctr", &read).unwrap();
                assert_eq!(load(models.path(), "ctr").unwrap(), read);
                true
            });
        }
    }
}
