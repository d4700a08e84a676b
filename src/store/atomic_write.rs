//! A file of a model's state: written aside, synced, and renamed over the one before, so that a crash leaves
//! the old one or the new one, whole.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::Duration;

use super::StoreError;
use super::disk::Disk;
use super::write::make_dirs;

/// What a writer that died has left is removed when it is so old.
pub(crate) const ABANDONED: Duration = Duration::from_secs(3600);

/// Puts a file in the place of the one at `path`, in a directory that is made if need be. `write` appends its
/// bytes to the one that lies aside, at the path that it is given.
///
/// # Errors
/// [`StoreError`]; the file before is untouched then, unless only the last sync failed.
pub(crate) fn replace(
    disk: &dyn Disk,
    path: &Path,
    write: impl FnOnce(&mut File, &Path) -> io::Result<()>,
) -> Result<(), StoreError> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    make_dirs(disk, folder)?;
    sweep(folder, &stem);
    let temporary = folder.join(format!(".{stem}.{}.tmp", std::process::id()));
    let at = |e| StoreError::at(&temporary, e);
    // One of our own number that died, or failed.
    match fs::remove_file(&temporary) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(at(e)),
        _ => {}
    }
    let written = || {
        let mut file = disk.create(&temporary)?;
        write(&mut file, &temporary)?;
        disk.sync(&file, &temporary)
    };
    let renamed = written()
        .map_err(at)
        .and_then(|()| disk.rename(&temporary, path).map_err(|e| StoreError::at(path, e)));
    if renamed.is_err() {
        // The next sweep's to mend, where it fails.
        let _ = fs::remove_file(&temporary);
    }
    renamed?;
    disk.sync_dir(folder).map_err(|e| StoreError::at(folder, e))
}

/// Removes what dead writers left.
fn sweep(folder: &Path, stem: &str) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|n| n.strip_prefix(&format!(".{stem}."))?.strip_suffix(".tmp"));
        let written = entry.metadata().and_then(|meta| meta.modified());
        let old = || written.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > ABANDONED));
        if pid.is_some() && old() {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
pub(crate) mod failing;
