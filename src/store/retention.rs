//! Retention: removes old versions, but keeps the newest full ones and the deltas after the oldest of them.
//! Also compaction, which writes a chain as one full version.
//!
//! A version that a reader has locked (`link`), or that a label or the settings of a server name (`labels`),
//! is not removed. Before its files are removed, a version is renamed to a name that no reader opens. If the
//! process dies then, the next write or removal removes the files (`write::sweep`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::Path;

use super::disk::{SystemDisk, lock_if_free};
use super::format::Base;
use super::link::read_manifest;
use super::snapshot::{Opened, Purpose, open};
use super::version_files::{MANIFEST, version_dir};
use super::write::{publish, removal_path, sweep};
use super::{Checkpoint, Contents, Dense, DenseTensor, Numbering, StoreError, TableRows, labels, versions};
use crate::types::{Version, VersionSelector};

/// The bytes of a chain on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChainBytes {
    /// Of the full version that it begins with.
    pub full: u64,
    /// Of all its deltas.
    pub deltas: u64,
    /// How many deltas it has.
    pub length: usize,
}

/// What a version builds on, from its manifest; `None` if it is full, or its manifest cannot be read.
pub(crate) fn base_of(models: &Path, name: &str, version: Version) -> Option<Base> {
    read_manifest(&version_dir(&models.join(name), version)).ok()?.0.base
}

/// Checks that a version is still the one with this checksum. Its directory may have been deleted, and
/// another version may have got its number.
///
/// # Errors
/// [`StoreError::Base`] and [`StoreError::BaseDiffers`].
pub(crate) fn check_base(models: &Path, name: &str, base: Base) -> Result<(), StoreError> {
    let (model, version) = (models.join(name), base.version);
    let path = version_dir(&model, version);
    let found = match path.is_dir() {
        true => read_manifest(&path),
        false => Err(StoreError::MissingDirectory { path: path.clone() }),
    };
    let (_, got) = found.map_err(|source| {
        let source = Box::new(source);
        StoreError::Base { path: model, base: version, source }
    })?;
    if got == base.xxh3_128 {
        return Ok(());
    }
    Err(StoreError::BaseDiffers { path, base: version, expected: base.xxh3_128, got })
}

/// The bytes of the chain of a version, from the manifests.
///
/// # Errors
/// [`StoreError`] when a manifest cannot be read, or a version that a delta builds on was replaced.
pub(crate) fn chain_bytes(models: &Path, name: &str, version: Version) -> Result<ChainBytes, StoreError> {
    let (mut bytes, mut version, mut expected) = (ChainBytes::default(), version, None);
    loop {
        let path = version_dir(&models.join(name), version);
        let (manifest, got) = read_manifest(&path)?;
        if let Some(expected) = expected.filter(|&expected| expected != got) {
            return Err(StoreError::BaseDiffers { path, base: version, expected, got });
        }
        let own = manifest.bytes();
        match manifest.base {
            Some(base) if base.version < version => {
                bytes.deltas = bytes.deltas.saturating_add(own);
                bytes.length += 1;
                (version, expected) = (base.version, Some(base.xxh3_128));
            }
            _ => return Ok(ChainBytes { full: own, ..bytes }),
        }
    }
}

/// Removes the versions of a model before its `keep` newest full versions, except those that are in use and
/// those that labels or settings name. Returns the removed versions.
///
/// # Errors
/// [`StoreError`] when the directory of the model or its labels cannot be read. A version that cannot be
/// removed stays.
pub(crate) fn retain(models: &Path, name: &str, keep: usize) -> Result<Vec<Version>, StoreError> {
    let (model, all) = (models.join(name), versions(models, name)?);
    // What a removal left that was interrupted, or that was not allowed to remove files.
    sweep(&model);
    let is_full = |version: &&Version| {
        read_manifest(&version_dir(&model, **version)).is_ok_and(|(manifest, _)| manifest.base.is_none())
    };
    let Some(oldest_kept) = all.iter().rev().filter(is_full).nth(keep.max(1) - 1) else {
        return Ok(Vec::new());
    };
    let (mut kept, mut removed) = (named(models, name)?, Vec::new());
    // A directory without a manifest is not one that a trainer wrote.
    let is_ours = |version: &Version| version_dir(&model, *version).join(MANIFEST).is_file();
    let before = all.iter().copied().filter(|version| version < oldest_kept).filter(is_ours);
    // The newest first, so that no delta stays without its base if the process is killed meanwhile.
    for version in before.rev() {
        if kept.contains(&version) {
            continue;
        }
        if remove(models, name, version) {
            removed.push(version);
        } else {
            // A reader that has locked it may not have locked its base yet.
            keep_chain(&model, version, &all, &mut kept);
        }
    }
    removed.reverse();
    Ok(removed)
}

/// Removes these versions, except those that have changed since they were written, that are in use, that
/// labels or settings name, or that other versions build on. Returns the removed ones.
///
/// # Errors
/// As [`retain`].
pub(crate) fn remove_unused(models: &Path, name: &str, own: &[Base]) -> Result<Vec<Base>, StoreError> {
    let (model, named, all) = (models.join(name), named(models, name)?, versions(models, name)?);
    let bases: BTreeSet<Version> =
        all.iter().filter_map(|&version| base_or_before(&model, version, &all)).collect();
    let removed = own.iter().copied().filter(|base| {
        // If the version was removed by hand, another one may have its number.
        let is_own =
            read_manifest(&version_dir(&model, base.version)).is_ok_and(|(_, sum)| sum == base.xxh3_128);
        let is_needed = || bases.contains(&base.version) || named.contains(&base.version);
        is_own && !is_needed() && remove(models, name, base.version)
    });
    Ok(removed.collect())
}

/// The versions that labels or settings name, and those that they build on.
fn named(models: &Path, name: &str) -> Result<BTreeSet<Version>, StoreError> {
    let (mut kept, all) = (BTreeSet::new(), versions(models, name)?);
    let (labels, settings) = (labels::load(models, name)?, labels::load_settings(models, name)?);
    for target in labels.into_values().chain(settings.into_values()) {
        if let VersionSelector::Version(version) = target {
            keep_chain(&models.join(name), version, &all, &mut kept);
        }
    }
    Ok(kept)
}

/// Adds a version, and those that it builds on or may build on.
fn keep_chain(model: &Path, version: Version, all: &[Version], kept: &mut BTreeSet<Version>) {
    let mut next = Some(version);
    while let Some(version) = next.filter(|version| kept.insert(*version)) {
        next = base_or_before(model, version, all);
    }
}

/// What a version builds on; `None` if it is full. If its manifest cannot be read, perhaps because it is
/// still being copied, it may be a delta of the one before it. `all` has the versions on disk, ascending.
fn base_or_before(model: &Path, version: Version, all: &[Version]) -> Option<Version> {
    match read_manifest(&version_dir(model, version)) {
        Ok((manifest, _)) => manifest.base.map(|base| base.version),
        Err(_) => all[..all.partition_point(|&other| other < version)].last().copied(),
    }
}

/// Removes a version, unless a reader or another process uses it, or it was named meanwhile.
fn remove(models: &Path, name: &str, version: Version) -> bool {
    let model = &models.join(name);
    let path = version_dir(model, version);
    // The lock is held until the files are removed.
    let Ok(dir) = File::open(&path) else { return false };
    // To remove other versions may have taken long, so the labels are read again.
    if !lock_if_free(&dir) || named(models, name).map_or(true, |named| named.contains(&version)) {
        return false;
    }
    let removal = removal_path(model, version);
    if let Err(error) = fs::rename(&path, &removal) {
        tracing::warn!(path = %path.display(), %error, "an old version cannot be removed");
        return false;
    }
    // It is no version any more, whatever happens to its files.
    if let Err(error) = fs::remove_dir_all(&removal) {
        let path = removal.display();
        tracing::warn!(%path, %error, "the files of a removed version cannot be removed; it is tried again");
    }
    true
}

fn tensors(dense: &BTreeMap<String, Dense>) -> Vec<DenseTensor<'_>> {
    let named = dense.iter();
    named
        .map(|(name, tensor)| DenseTensor {
            name: name.clone(),
            shape: tensor.shape().to_vec(),
            values: tensor.values(),
        })
        .collect()
}

/// Writes a full version with the contents of a chain's version. `highest` is the highest version so far.
///
/// # Errors
/// [`StoreError`] when the version cannot be opened, or the new one cannot be written, also because another
/// writer has made a version, whose contents the new one would hide.
pub(crate) fn compact(
    models: &Path,
    name: &str,
    version: Version,
    highest: Version,
) -> Result<Base, StoreError> {
    let opened = open(models, name, version, Purpose::Train)?;
    let Opened { model_toml, dense, dense_states, store, training, quality, cursor, metadata, .. } = &opened;
    // Without optimizer state, f32 rows are all that a checkpoint would have.
    let has_states = !dense_states.is_empty()
        || cursor.is_some()
        || store.tables().iter().any(|table| !table.states().is_empty());
    let contents = Contents {
        model_toml,
        numbering: Numbering::OnlyAfter(highest),
        dense: tensors(dense),
        tables: store.tables().iter().map(TableRows::from).collect(),
        checkpoint: has_states
            .then(|| Checkpoint { dense_states: tensors(dense_states), cursor: cursor.as_deref() }),
        training: *training,
        quality: quality.clone(),
        metadata: metadata.clone(),
    };
    publish(&SystemDisk, models, name, &contents).map(|written| written.base)
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
