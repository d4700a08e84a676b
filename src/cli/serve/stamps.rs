//! The files of versions as they were at some time. A version that was refused is tried again only if files
//! have changed since: its own, or those of the versions that it builds on. One of these may be missing or
//! damaged, and appear or be repaired later.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::store::{self, Base, version_dir};
use crate::types::Version;

/// A hash of the names, lengths and times of change of a version's files. Only a hash is kept, because a
/// hundred deltas that build on one another may be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp(u64);

/// The stamps of some versions of a model. `None` is the file of its labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stamps(Vec<(Option<Version>, Stamp)>);

/// Reads the stamps of a model's versions, of each version once.
pub(crate) struct Stamper<'m> {
    models: &'m Path,
    name: &'m str,
    read: BTreeMap<Option<Version>, Stamp>,
    /// What each version builds on.
    bases: BTreeMap<Version, Option<Base>>,
}

impl<'m> Stamper<'m> {
    pub(crate) fn new(models: &'m Path, name: &'m str) -> Self {
        Self { models, name, read: BTreeMap::new(), bases: BTreeMap::new() }
    }

    /// The stamps of these versions.
    pub(crate) fn of(&mut self, versions: &[Version]) -> Stamps {
        Stamps(versions.iter().map(|version| (Some(*version), self.stamp(Some(*version)))).collect())
    }

    /// The stamps of all that decides whether a model with these versions can be loaded.
    pub(crate) fn of_model(&mut self, versions: &[Version]) -> Stamps {
        let Stamps(mut stamps) = self.of(versions);
        stamps.push((None, self.stamp(None)));
        Stamps(stamps)
    }

    /// The stamps of the versions whose files are read to open a version: itself, and those that it builds
    /// on, down to a full version or to a loaded one.
    pub(crate) fn of_chain(&mut self, version: Version, loaded: &[Base]) -> Stamps {
        let (mut chain, mut next) = (Vec::new(), Some(version));
        while let Some(version) = next {
            // Read before the manifest, so that a later change of the manifest is noticed.
            chain.push((Some(version), self.stamp(Some(version))));
            let base =
                *self.bases.entry(version).or_insert_with(|| store::base_of(self.models, self.name, version));
            // A damaged manifest may name any base.
            let base = base.filter(|base| base.version < version && !loaded.contains(base));
            next = base.map(|base| base.version);
        }
        Stamps(chain)
    }

    /// Whether these versions have their stamps still.
    pub(crate) fn are_same(&mut self, Stamps(stamps): &Stamps) -> bool {
        stamps.iter().all(|(version, stamp)| self.stamp(*version) == *stamp)
    }

    /// The stamp of a version or of the labels, which may be missing.
    fn stamp(&mut self, version: Option<Version>) -> Stamp {
        let (models, name) = (self.models, self.name);
        *self.read.entry(version).or_insert_with(|| {
            // Sorted, because a directory is listed in any order.
            let mut files = BTreeMap::new();
            let path = match version {
                Some(version) => version_dir(&models.join(name), version),
                None => store::labels::path(models, name),
            };
            add_files(&path, 2, &mut files);
            let mut hasher = DefaultHasher::new();
            files.hash(&mut hasher);
            Stamp(hasher.finish())
        })
    }
}

/// A file as it was at some time.
#[derive(Hash)]
struct About {
    bytes: u64,
    /// The time at which its contents changed, which a copy may set to that of its source.
    modified: Option<SystemTime>,
    /// The time at which the system changed anything of it: seconds and nanoseconds.
    changed: [i64; 2],
}

fn add_files(path: &Path, depth: usize, files: &mut BTreeMap<PathBuf, About>) {
    let Ok(about) = fs::metadata(path) else { return };
    let (bytes, modified) = (about.len(), about.modified().ok());
    files.insert(path.to_owned(), About { bytes, modified, changed: [about.ctime(), about.ctime_nsec()] });
    if about.is_dir() && depth > 0 {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        entries.for_each(|entry| add_files(&entry.path(), depth - 1, files));
    }
}
