//! What is known of each version of a model, good or not.

use std::collections::BTreeMap;
use std::path::Path;

use super::format::{Base, TrainingTotals};
use super::link::{Link, is_served, read_manifest};
use super::snapshot::{Opened, open_beside};
use super::version_files::{MANIFEST, version_dir, versions};
use super::{EmbeddingStore, StoreError, base_of, check_base};
use crate::types::{Version, VersionSelector};

/// What a listing reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// All files of each version.
    Files,
    /// Only the manifests.
    Manifests,
}

/// A version on disk.
#[derive(Debug)]
pub(crate) struct Listed {
    pub version: Version,
    /// Whether a process serves the version now.
    pub served: bool,
    /// The labels that name the version.
    pub labels: Vec<String>,
    /// What its manifest says, if it can be read.
    pub summary: Option<Summary>,
    /// Why the version cannot be opened, as far as it was checked.
    pub refusal: Option<StoreError>,
    /// Why training cannot continue from it, although it can be served.
    pub checkpoint: Option<StoreError>,
}

/// What a manifest says of its version.
#[derive(Debug)]
pub(crate) struct Summary {
    /// `None` for a full version.
    pub base: Option<Base>,
    pub training: Option<TrainingTotals>,
    pub quality: BTreeMap<String, f64>,
    /// Bytes of all files.
    pub bytes: u64,
}

/// The versions of a model, ascending, with the labels of `named`. The files of a chain are read once.
///
/// # Errors
/// [`StoreError`] when the directory of the model cannot be read.
pub(crate) fn list(
    models: &Path,
    name: &str,
    named: &BTreeMap<String, VersionSelector>,
    check: Check,
) -> Result<Vec<Listed>, StoreError> {
    let mut before: Option<EmbeddingStore> = None;
    let mut listed = Vec::new();
    for version in versions(models, name)? {
        let dir = version_dir(&models.join(name), version);
        let (served, manifest) = (is_served(&dir), read_manifest(&dir));
        let (mut refusal, mut checkpoint) = (None, None);
        if check == Check::Manifests {
            let base = manifest.as_ref().ok().and_then(|(manifest, _)| manifest.base);
            refusal = base.and_then(|base| check_chain(models, name, version, base).err());
        } else {
            match open_beside(models, name, version, &before.iter().collect::<Vec<_>>()) {
                Ok(Opened { store, .. }) => before = Some(store),
                Err(error) => refusal = Some(error),
            }
            if refusal.is_none() {
                checkpoint = Link::open(dir, version).and_then(|link| link.check_checkpoint()).err();
            }
        }
        let summary = match manifest {
            Ok((manifest, _)) => Some(Summary {
                base: manifest.base,
                training: manifest.training,
                bytes: manifest.bytes(),
                quality: manifest.quality,
            }),
            Err(error) => {
                refusal.get_or_insert(error);
                None
            }
        };
        let own = named.iter().filter(|(_, target)| **target == VersionSelector::Version(version));
        let labels = own.map(|(label, _)| label.clone()).collect();
        listed.push(Listed { version, served, labels, summary, refusal, checkpoint });
    }
    Ok(listed)
}

/// Checks that what a delta builds on, down to a full version, is what was built on. The error names the
/// first broken link from the delta on.
fn check_chain(models: &Path, name: &str, delta: Version, base: Base) -> Result<(), StoreError> {
    let (mut delta, mut base) = (delta, base);
    loop {
        check_base(models, name, base).map_err(|error| match error {
            StoreError::Base { base, source, .. } => {
                StoreError::Base { path: version_dir(&models.join(name), delta).join(MANIFEST), base, source }
            }
            error => error,
        })?;
        match base_of(models, name, base.version).filter(|next| next.version < base.version) {
            Some(next) => (delta, base) = (base.version, next),
            None => return Ok(()),
        }
    }
}
