//! Replaces a file atomically: the new one is written under a temporary name, synced and renamed over the old
//! one. After a crash the file is the old one or the new one, whole.

use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::path::Path;
use std::time::Duration;

use super::StoreError;
use super::disk::Disk;
use super::write::make_dirs;

/// Age at which a temporary file is removed, because its writer must be dead.
pub(crate) const ABANDONED: Duration = Duration::from_secs(3600);

/// Replaces the file at `path`. Its directory is made if needed. `write` gets the temporary file and its
/// path, and appends the contents.
///
/// # Errors
/// [`StoreError`]. The old file is then unchanged, unless only the last sync failed: then the new file is
/// in place.
pub(crate) fn replace(
    disk: &dyn Disk,
    path: &Path,
    write: impl FnOnce(&mut File, &Path) -> io::Result<()>,
) -> Result<(), StoreError> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    make_dirs(disk, folder)?;
    sweep(folder, &stem);
    // At random, because processes in two containers may have the same id.
    let unique = RandomState::new().build_hasher().finish();
    let temporary = folder.join(format!(".{stem}.{unique:016x}.tmp"));
    let at = |e| StoreError::at(&temporary, e);
    let written = || {
        let mut file = disk.create(&temporary)?;
        write(&mut file, &temporary)?;
        disk.sync(&file, &temporary)
    };
    let renamed = written()
        .map_err(at)
        .and_then(|()| disk.rename(&temporary, path).map_err(|e| StoreError::at(path, e)));
    if renamed.is_err() {
        // If this fails, a later sweep removes the file.
        let _ = fs::remove_file(&temporary);
    }
    renamed?;
    disk.sync_dir(folder).map_err(|e| StoreError::at(folder, e))
}

/// Removes the temporary files of dead writers.
fn sweep(folder: &Path, stem: &str) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let unique = name.to_str().and_then(|n| n.strip_prefix(&format!(".{stem}."))?.strip_suffix(".tmp"));
        let written = entry.metadata().and_then(|meta| meta.modified());
        let old = || written.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > ABANDONED));
        if unique.is_some() && old() {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
pub(crate) mod failing;
