//! A disk that hangs, for tests.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use super::disk::{Disk, SystemDisk};

/// A disk that does not answer while it is stuck. It counts the syncs of files.
#[derive(Default)]
pub(crate) struct StuckDisk {
    stuck: Mutex<bool>,
    freed: Condvar,
    syncs: AtomicUsize,
}

impl StuckDisk {
    pub(crate) const fn new() -> Self {
        Self { stuck: Mutex::new(false), freed: Condvar::new(), syncs: AtomicUsize::new(0) }
    }

    pub(crate) fn set_stuck(&self, stuck: bool) {
        *self.stuck.lock().unwrap() = stuck;
        self.freed.notify_all();
    }

    /// The syncs of files that have ended.
    pub(crate) fn syncs(&self) -> usize {
        self.syncs.load(Ordering::SeqCst)
    }
}

impl Disk for StuckDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        SystemDisk.create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        SystemDisk.create(path)
    }

    fn append(&self, file: &mut File, path: &Path, bytes: &[u8]) -> io::Result<()> {
        SystemDisk.append(file, path, bytes)
    }

    fn sync(&self, file: &File, path: &Path) -> io::Result<()> {
        let stuck = self.stuck.lock().unwrap();
        let limit = Duration::from_secs(60);
        let (_freed, timeout) = self.freed.wait_timeout_while(stuck, limit, |stuck| *stuck).unwrap();
        assert!(!timeout.timed_out(), "nobody waits this long");
        self.syncs.fetch_add(1, Ordering::SeqCst);
        SystemDisk.sync(file, path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        SystemDisk.sync_dir(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        SystemDisk.rename(from, to)
    }
}
