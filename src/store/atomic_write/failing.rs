//! A disk on which one chosen call fails, for tests of [`super::replace`].

use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::disk::SystemDisk;
use super::*;

/// The real disk, except that one call fails. A failing append has written half of its bytes.
pub(crate) struct Failing {
    calls: AtomicUsize,
    at: usize,
}

impl Failing {
    /// Call number `at` fails, counted from 0.
    pub(crate) fn at(at: usize) -> Self {
        Self { calls: AtomicUsize::new(0), at }
    }

    fn step(&self, run: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        match self.calls.fetch_add(1, Ordering::Relaxed) == self.at {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => run(),
        }
    }
}

impl Disk for Failing {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.step(|| SystemDisk.create_dir(path))
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        self.step(|| Ok(()))?;
        SystemDisk.create(path)
    }

    fn append(&self, file: &mut File, path: &Path, bytes: &[u8]) -> io::Result<()> {
        SystemDisk.append(file, path, &bytes[..bytes.len() / 2])?;
        self.step(|| SystemDisk.append(file, path, &bytes[bytes.len() / 2..]))
    }

    fn sync(&self, file: &File, path: &Path) -> io::Result<()> {
        self.step(|| SystemDisk.sync(file, path))
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.step(|| SystemDisk.sync_dir(path))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step(|| SystemDisk.rename(from, to))
    }
}
