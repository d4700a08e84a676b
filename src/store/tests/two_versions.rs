//! Two versions of a model, whose files can be damaged, and a check that the second one is refused by name.

use std::fs;
use std::path::{Path, PathBuf};

use super::Sample;
use crate::config::TableMemory;
use crate::store::{self, Purpose};
use crate::types::Version;

/// Every file of a version, by its path.
pub(super) fn files_of(version: &Path) -> Vec<PathBuf> {
    let tables = ["t0", "t1", "t2", "t3"].map(|table| format!("tables/{table}.safetensors"));
    let files = ["model.toml", "dense.safetensors", "MANIFEST.json"].map(str::to_owned);
    files.iter().chain(&tables).map(|file| version.join(file)).collect()
}

/// Replaces the bytes of a published file, as a failing disk would.
pub(super) fn replace(path: &Path, bytes: &[u8]) {
    fs::remove_file(path).unwrap();
    fs::write(path, bytes).unwrap();
}

pub(super) fn two_versions() -> (tempfile::TempDir, Sample) {
    let dir = tempfile::tempdir().unwrap();
    let first = Sample::of(1);
    assert_eq!(first.write(dir.path(), "m").unwrap(), Version(1));
    assert_eq!(Sample::of(2).write(dir.path(), "m").unwrap(), Version(2));
    (dir, first)
}

/// Asserts that version 2 is refused with an error that names `file`, and that version 1 is opened.
pub(super) fn assert_refused_by_name(models: &Path, first: &Sample, file: &Path, what: &str) {
    let latest = store::open_latest(models, "m", Purpose::Serve).unwrap();
    assert_eq!(latest.opened.store.version(), Version(1), "{what}");
    first.assert_is(&latest.opened);
    assert_eq!(latest.refused.len(), 1);
    assert_eq!(latest.refused[0].version, Version(2));
    let reason = latest.refused[0].reason.to_string();
    assert!(reason.starts_with(&*file.to_string_lossy()), "{what}: {reason}");
    let in_memory = store::open(models, "m", Version(2), Purpose::ServeFrom(TableMemory::Ram)).unwrap_err();
    assert_eq!(in_memory.to_string(), reason, "{what}");
}
