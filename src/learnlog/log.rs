//! Writing: appends records to the last segment, and repairs it after a crash or a failed call.
//!
//! A segment is never written again once a later one exists, and all its bytes are durable by then. A record
//! that could not be made durable is cut off before anything else is written, because after a failed sync it
//! is not known which of its bytes are on disk.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::format::{HEADER_BYTES, Record, header};
use super::id::identify;
use super::{Checksum, Durable, LogError, Position, Segment, name_of, segments};
use crate::store::disk::{Disk, SystemDisk, is_at, lock_until};
use crate::store::make_dirs;

/// The file that the writer locks.
const LOCK: &str = "lock";

/// The directories up to that of the models.
const PARENTS: usize = 3;

/// The calls that the log needs besides those of [`Disk`].
pub(crate) trait LogDisk: Disk {
    /// Creates an empty file to append to; fails if it exists.
    fn create_log(&self, path: &Path) -> io::Result<File>;
    /// Opens a file to append to.
    fn open_log(&self, path: &Path) -> io::Result<File>;
    /// Cuts off a file that is opened to append.
    fn truncate(&self, file: &File, path: &Path, bytes: u64) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

impl LogDisk for SystemDisk {
    fn create_log(&self, path: &Path) -> io::Result<File> {
        OpenOptions::new().append(true).create_new(true).mode(0o644).open(path)
    }

    fn open_log(&self, path: &Path) -> io::Result<File> {
        OpenOptions::new().append(true).open(path)
    }

    fn truncate(&self, file: &File, _path: &Path, bytes: u64) -> io::Result<()> {
        file.set_len(bytes)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
}

/// A log that is opened for writing.
pub(crate) struct Log {
    disk: &'static dyn LogDisk,
    dir: PathBuf,
    segment_bytes: u64,
    tail: Option<Tail>,
    /// The number of the next segment.
    next: u64,
    durable: File,
    /// Locked until the log is dropped.
    lock: File,
}

/// The segment that is written.
struct Tail {
    number: u64,
    path: PathBuf,
    file: File,
    schema: Checksum,
    /// Bytes that are durable.
    bytes: u64,
    /// Samples in them.
    samples: u64,
    /// Whether there may be more bytes, which must be cut off.
    torn: bool,
}

impl Log {
    /// Opens the log in a directory, which is made if needed, and cuts off a torn tail.
    ///
    /// # Errors
    /// [`LogError`], also when another process writes the log, or the last segment is damaged.
    pub(crate) fn open(disk: &'static dyn LogDisk, dir: &Path, segment_bytes: u64) -> Result<Self, LogError> {
        Self::open_within(Duration::ZERO, disk, dir, segment_bytes)
    }

    /// As [`Self::open`], after a wait of at most `wait` for another process.
    pub(crate) fn open_within(
        wait: Duration,
        disk: &'static dyn LogDisk,
        dir: &Path,
        segment_bytes: u64,
    ) -> Result<Self, LogError> {
        make_dirs(disk, dir)?;
        // Another process may have made a directory without syncing its entry.
        for parent in dir.ancestors().skip(1).take(PARENTS) {
            disk.sync_dir(parent).map_err(|e| LogError::io(parent, e))?;
        }
        let lock = lock(dir, wait)?;
        let durable = Durable::create(dir)?;
        let mut log = Self { disk, dir: dir.to_owned(), segment_bytes, tail: None, next: 1, durable, lock };
        let last = segments(dir)?.last().copied();
        // Before a reader sees that samples are durable.
        identify(disk, dir, last.is_none())?;
        if let Some(last) = last {
            log.open_last(last)?;
        }
        log.show_durable();
        Ok(log)
    }

    fn open_last(&mut self, number: u64) -> Result<(), LogError> {
        self.next = number;
        let path = self.dir.join(name_of(number));
        let Some(next) = number.checked_add(1) else {
            return Err(LogError::Damaged { path, at: 0, reason: "no segment can have a greater number" });
        };
        let known = Durable::read(&self.dir)?.filter(|known| known.segment == number && known.bytes > 0);
        let mut segment = match Segment::open(&self.dir, number) {
            Ok(segment) => segment,
            Err(error @ (LogError::Foreign { .. } | LogError::Damaged { .. })) => {
                // A segment is durable with its header before it gets a record, so this one never had any.
                let bytes = fs::metadata(&path).map_err(|e| LogError::io(&path, e))?.len();
                if known.is_some() || bytes > HEADER_BYTES as u64 {
                    return Err(error);
                }
                tracing::warn!("{}: removed: its header is not whole", path.display());
                return self.disk.remove(&path).map_err(|e| LogError::io(&path, e));
            }
            Err(error) => return Err(error),
        };
        let end = segment.bytes()?;
        let mut samples = 0;
        let damage = loop {
            match segment.next_record(end) {
                Ok(Some(head)) => samples += u64::from(head.samples),
                Ok(None) => break None,
                Err(error @ LogError::Damaged { .. }) => break Some(error),
                Err(error) => return Err(error),
            }
        };
        let bytes = segment.at;
        if let Some(error) = damage {
            if known.is_some_and(|known| known.bytes > bytes) || segment.was_durable(bytes, end)? {
                return Err(error);
            }
            tracing::warn!("{error}: its last {} bytes were not durable: cut off", end - bytes);
        } else if let Some(known) = known.filter(|known| known.bytes > bytes) {
            let reason = "it is shorter than its durable bytes";
            return Err(LogError::Damaged { path, at: known.bytes, reason });
        }
        let at = |e| LogError::io(&path, e);
        let file = self.disk.open_log(&path).map_err(at)?;
        let schema = segment.schema;
        let tail = Tail { number, path: path.clone(), file, schema, bytes, samples, torn: end > bytes };
        let tail = self.tail.insert(tail);
        tail.cut(self.disk)?;
        // The records after the last sync of a process that was killed are kept, so they must become durable.
        self.disk.sync(&tail.file, &path).map_err(at)?;
        self.disk.sync_dir(&self.dir).map_err(|e| LogError::io(&self.dir, e))?;
        self.next = next;
        Ok(())
    }

    /// Appends records and makes them durable. Returns the place after each record that is durable, and why
    /// the others are not. They are not in the log then.
    pub(crate) fn append(&mut self, records: &[Record]) -> (Vec<Position>, Result<(), LogError>) {
        let mut positions = Vec::with_capacity(records.len());
        while positions.len() < records.len() {
            let rest = &records[positions.len()..];
            match self.tail_for(&rest[0]).and_then(|()| self.append_run(rest, &mut positions)) {
                Ok(()) => {}
                Err(error) => return (positions, Err(error)),
            }
        }
        (positions, Ok(()))
    }

    /// Appends the first records, as far as they fit in the last segment, with one sync.
    fn append_run(&mut self, records: &[Record], positions: &mut Vec<Position>) -> Result<(), LogError> {
        let Some(tail) = &mut self.tail else { return Ok(()) };
        tail.cut(self.disk)?;
        let (mut bytes, mut samples) = (Vec::new(), tail.samples);
        let mut places = Vec::new();
        for record in records {
            let at = tail.bytes + bytes.len() as u64;
            // The first record always fits, because `tail_for` has made room for it.
            if !places.is_empty() && (record.schema != tail.schema || at >= self.segment_bytes) {
                break;
            }
            record.push(at, tail.bytes, &mut bytes);
            samples += u64::from(record.samples);
            places.push(Position { segment: tail.number, samples });
        }
        tail.torn = true;
        let written = self.disk.append(&mut tail.file, &tail.path, &bytes);
        let synced = written.and_then(|()| self.disk.sync(&tail.file, &tail.path));
        let synced = synced.map_err(|e| LogError::io(&tail.path, e));
        if let Err(error) = synced.and_then(|()| check_is_at(&tail.file, &tail.path)) {
            if let Err(cut) = tail.cut(self.disk) {
                tracing::warn!("{cut}: a partial record is cut off before the next one is written");
            }
            return Err(error);
        }
        tail.torn = false;
        tail.bytes += bytes.len() as u64;
        tail.samples = samples;
        positions.append(&mut places);
        self.show_durable();
        Ok(())
    }

    /// Makes the last segment one that can take this record.
    fn tail_for(&mut self, record: &Record) -> Result<(), LogError> {
        if let Some(tail) = &mut self.tail {
            if tail.schema == record.schema && tail.bytes < self.segment_bytes {
                return Ok(());
            }
            // A later segment says that this one is whole.
            tail.cut(self.disk)?;
        }
        // Another process may write a log that was made here since.
        check_is_at(&self.lock, &self.dir.join(LOCK))?;
        let (number, path) = (self.next, self.dir.join(name_of(self.next)));
        let file = match self.create(&path, record.schema) {
            Ok(file) => file,
            Err(error) => {
                // If this fails, the next attempt or the next start removes the file.
                let _ = self.disk.remove(&path);
                return Err(error);
            }
        };
        let (schema, bytes) = (record.schema, HEADER_BYTES as u64);
        self.tail = Some(Tail { number, path, file, schema, bytes, samples: 0, torn: false });
        self.next = number + 1;
        self.show_durable();
        Ok(())
    }

    /// Creates a segment without records, and makes it durable.
    fn create(&self, path: &Path, schema: Checksum) -> Result<File, LogError> {
        let at = |e| LogError::io(path, e);
        if path.exists() {
            self.disk.remove(path).map_err(at)?;
        }
        let mut file = self.disk.create_log(path).map_err(at)?;
        self.disk.append(&mut file, path, &header(schema)).map_err(at)?;
        self.disk.sync(&file, path).map_err(at)?;
        self.disk.sync_dir(&self.dir).map_err(|e| LogError::io(&self.dir, e))?;
        Ok(file)
    }

    /// Checks that the log is still at its path.
    ///
    /// # Errors
    /// [`LogError::Gone`]; the log must be opened again then.
    pub(crate) fn check(&self) -> Result<(), LogError> {
        check_is_at(&self.lock, &self.dir.join(LOCK))?;
        self.tail.as_ref().map_or(Ok(()), |tail| check_is_at(&tail.file, &tail.path))
    }

    /// Bytes of the last segment.
    pub(super) fn last_bytes(&self) -> u64 {
        self.tail.as_ref().map_or(0, |tail| tail.bytes)
    }

    /// Tells readers how far the log is durable. If this fails, they wait until the next time.
    fn show_durable(&self) {
        let durable = match &self.tail {
            Some(tail) => Durable { segment: tail.number, bytes: tail.bytes },
            // All segments before the next one are durable.
            None => Durable { segment: self.next, bytes: 0 },
        };
        if let Err(error) = durable.write(&self.durable) {
            tracing::warn!("{}: durable: {error}: readers wait", self.dir.display());
        }
    }
}

impl Tail {
    /// Cuts off what is not durable.
    fn cut(&mut self, disk: &dyn LogDisk) -> Result<(), LogError> {
        if self.torn {
            let cut = disk.truncate(&self.file, &self.path, self.bytes);
            // A crash must not bring the bytes back once a later segment exists.
            let cut = cut.and_then(|()| disk.sync(&self.file, &self.path));
            cut.map_err(|e| LogError::io(&self.path, e))?;
            self.torn = false;
        }
        Ok(())
    }
}

/// Checks that an open file is still the one at its path.
fn check_is_at(file: &File, path: &Path) -> Result<(), LogError> {
    match is_at(file, path) {
        Ok(true) => Ok(()),
        Ok(false) => Err(LogError::Gone { path: path.to_owned() }),
        Err(error) => Err(LogError::io(path, error)),
    }
}

fn lock(dir: &Path, wait: Duration) -> Result<File, LogError> {
    let path = dir.join(LOCK);
    let opened = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
    let file = opened.map_err(|e| LogError::io(&path, e))?;
    match lock_until(Instant::now() + wait, || file.try_lock()) {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(LogError::Locked { path: dir.to_owned() }),
        Err(fs::TryLockError::Error(error)) => Err(LogError::io(&path, error)),
    }
}

/// Repairs a log that no process writes, as [`Log::open`] does, so that everything in it can be read. Does
/// nothing if a process writes it.
///
/// # Errors
/// As [`Log::open`].
pub(crate) fn repair(dir: &Path) -> Result<(), LogError> {
    match Log::open(&SystemDisk, dir, u64::MAX) {
        Ok(_) | Err(LogError::Locked { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}
