//! The calls by which a version reaches the disk, behind a trait so that tests can record them,
//! let any one fail, and work out what a crash between two of them may leave.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// What the writer asks of a file system. Nothing but a sync promises that anything lasts.
pub(crate) trait Disk: Sync {
    /// Makes a directory, which must not exist.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Makes an empty file, which must not exist.
    fn create(&self, path: &Path) -> io::Result<File>;
    /// Appends to a file that [`Disk::create`] made.
    fn append(&self, file: &mut File, path: &Path, bytes: &[u8]) -> io::Result<()>;
    /// Makes the file's bytes last.
    fn sync(&self, file: &File, path: &Path) -> io::Result<()>;
    /// Makes the directory's entries last: which names it has, and what they name.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Renames. A directory's new name must be free, or an empty directory's; a file takes the place of the
    /// file of that name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
}

/// The system's own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SystemDisk;

impl Disk for SystemDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        // Nobody may write it later: readers map it.
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
