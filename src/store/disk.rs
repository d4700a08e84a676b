//! The file system calls that write a version, behind a trait: tests record them, let any of them fail, and
//! compute what a crash between two of them may leave. And the locks of directories.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// The file system calls of a writer. Data and names survive a crash only after a sync.
pub(crate) trait Disk: Sync {
    /// Creates a directory; fails if it exists.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Creates an empty file; fails if it exists.
    fn create(&self, path: &Path) -> io::Result<File>;
    /// Appends to a file that [`Disk::create`] made.
    fn append(&self, file: &mut File, path: &Path, bytes: &[u8]) -> io::Result<()>;
    /// Makes the contents of the file durable.
    fn sync(&self, file: &File, path: &Path) -> io::Result<()>;
    /// Makes the entries of the directory durable: names, and what they refer to.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Renames a file or directory. A file replaces an existing file. A directory replaces only an empty
    /// directory.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
}

/// The real file system.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SystemDisk;

impl Disk for SystemDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        // The file is read-only when it is opened again, because readers map it.
        OpenOptions::new().write(true).create_new(true).mode(0o444).open(path)
    }

    fn append(&self, file: &mut File, _path: &Path, bytes: &[u8]) -> io::Result<()> {
        file.write_all(bytes)
    }

    fn sync(&self, file: &File, _path: &Path) -> io::Result<()> {
        file.sync_all()
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }
}

/// Whether an open file or directory is still the one at its path. Between the opening and the lock, another
/// process may have removed or renamed it.
///
/// # Errors
/// When one of them cannot be examined. A path without a file is no error.
pub(crate) fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let found = match fs::metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        found => found?,
    };
    let held = file.metadata()?;
    Ok((held.dev(), held.ino()) == (found.dev(), found.ino()))
}

/// Locks a file or directory until it is closed. Returns false if another reader or writer has locked it. On
/// a file system without locks it is always free.
pub(crate) fn lock_if_free(file: &File) -> bool {
    !matches!(file.try_lock(), Err(TryLockError::WouldBlock))
}

/// How often [`lock_until`] tries.
const LOCK_RETRY: Duration = Duration::from_millis(5);

/// Tries a lock, and again while another reader or writer has locked the file, until this time.
pub(crate) fn lock_until(
    until: Instant,
    try_lock: impl Fn() -> Result<(), TryLockError>,
) -> Result<(), TryLockError> {
    loop {
        match try_lock() {
            Err(TryLockError::WouldBlock) if Instant::now() < until => thread::sleep(LOCK_RETRY),
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests;
