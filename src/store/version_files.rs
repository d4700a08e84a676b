//! The names of models, versions and their files in a directory, and which of them there are.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{StoreError, check_name};
use crate::types::Version;

pub(crate) const MANIFEST: &str = "MANIFEST.json";
pub(crate) const MODEL: &str = "model.toml";
pub(crate) const DENSE: &str = "dense.safetensors";
pub(crate) const TABLES: &str = "tables";
pub(crate) const CHECKPOINT: &str = "checkpoint";
pub(crate) const DENSE_STATES: &str = "checkpoint/dense.safetensors";
pub(crate) const CURSOR: &str = "checkpoint/cursor.json";

/// The directory that `mkfs.ext4` makes at the root of a volume, which only root can read.
const LOST_AND_FOUND: &str = "lost+found";

/// The names of the models in a directory, sorted: each subdirectory that has a version, good or not, or that
/// cannot be read.
///
/// # Errors
/// [`StoreError`] when `dir` is missing, is not a directory, or cannot be read.
pub(crate) fn models(dir: &Path) -> Result<Vec<String>, StoreError> {
    let is_model = |name: &String| {
        let named = check_name("model", name).is_ok() && name != LOST_AND_FOUND;
        named
            && match versions(dir, name) {
                Ok(versions) => !versions.is_empty(),
                // A file, or a directory that was removed just now.
                Err(StoreError::NotADirectory { .. } | StoreError::MissingDirectory { .. }) => false,
                // Whoever opens it gets the reason, and the other models are not affected.
                Err(_) => true,
            }
    };
    let mut names: Vec<String> = entry_names(dir)?.into_iter().filter(is_model).collect();
    names.sort();
    Ok(names)
}

/// The version numbers of a model, ascending, good or not.
///
/// # Errors
/// [`StoreError`] when the directory of the model is missing or cannot be read.
pub(crate) fn versions(models: &Path, name: &str) -> Result<Vec<Version>, StoreError> {
    check_name("model", name)?;
    let names = entry_names(&models.join(name))?;
    let mut versions: Vec<Version> = names.iter().filter_map(|name| version_number(name)).collect();
    versions.sort();
    Ok(versions)
}

/// The directory of a version in the directory of its model.
pub(crate) fn version_dir(model: &Path, version: Version) -> PathBuf {
    model.join(version.to_string())
}

/// The path of a table's served file in its version.
pub(crate) fn table_file(table: &str) -> String {
    format!("{TABLES}/{table}.safetensors")
}

/// The path of a table's file in the checkpoint.
pub(crate) fn states_file(table: &str) -> String {
    format!("{CHECKPOINT}/{TABLES}/{table}.safetensors")
}

/// Parses the name of a version directory. Signs and leading zeros are refused, so each number has one name.
fn version_number(name: &str) -> Option<Version> {
    name.parse().ok().filter(|number: &u64| *number > 0 && number.to_string() == name).map(Version)
}

/// The names in a directory. Names that are not UTF-8 are left out, because models and versions have none.
fn entry_names(dir: &Path) -> Result<Vec<String>, StoreError> {
    let at = |e| match require_dir(dir) {
        Ok(()) => StoreError::at(dir, e),
        Err(better) => better,
    };
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(at)? {
        names.extend(entry.map_err(at)?.file_name().into_string());
    }
    Ok(names)
}

pub(crate) fn require_dir(path: &Path) -> Result<(), StoreError> {
    match fs::metadata(path) {
        Ok(meta) if meta.is_dir() => Ok(()),
        Ok(_) => Err(StoreError::NotADirectory { path: path.to_owned() }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            Err(StoreError::MissingDirectory { path: path.to_owned() })
        }
        Err(e) => Err(StoreError::at(path, e)),
    }
}
