//! The log of learned samples: labelled samples that clients send to the server, kept until a model was
//! trained on them.
//!
//! The log of a model is the directory `models/<model>/state/learn/`. Its segments are files with ascending
//! numbers. One process at a time appends to it ([`Log`]; the file `lock` is locked). A sample is
//! acknowledged when the file is synced, and one sync serves all requests that arrived during the one before
//! ([`Learner`]). Readers ([`Segment`]) may be in any process. They read only samples that are durable,
//! because a cursor must not count samples that a crash can lose.
//!
//! `docs/file-formats.md` (Learned samples) draws all files, byte by byte.
//!
//! **A torn tail.** A crash can leave any of the bytes that were not synced. [`Log::open`] cuts off the last
//! segment at its first record that is not whole. But if a later record, or the file `durable`, shows that
//! the record was durable before, the file was damaged afterwards, and that is an error.
//!
//! **A log that is deleted.** The writer's open files outlive their names. So after each sync it checks that
//! the segment is still at its path, and otherwise acknowledges nothing. The log must be opened again then,
//! and it gets a new id. A reader whose segment is gone begins with the first one that is there.
//!
//! **The file `durable`** says up to where the log is durable. It is written after each sync, and never
//! synced itself: after a power failure it is missing, damaged or says too little, until the log is opened
//! again.
//!
//! **The file `id`** says which log this is (`id.rs`). **The file `full`** says that the log has no room, so
//! a trainer should publish what it has trained on (`full.rs`).

mod format;
mod full;
mod id;
mod log;
mod room;
mod segment;
mod writer;

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod crash;
#[cfg(test)]
#[cfg(not(flechette_loom))]
pub(crate) mod tests;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

pub(crate) use format::{Record, schema_sum};
pub(crate) use full::full_at;
pub(crate) use id::id_of;
pub(crate) use log::{Log, repair};
pub(crate) use room::LearnerOptions;
pub(crate) use segment::{Durable, Segment};
pub(crate) use writer::{LearnError, Learner};

use crate::store::StoreError;
pub(crate) use crate::store::format::Checksum;
use crate::store::hot_rows::STATE;

/// The directory of a model's log in its directory for state.
const FOLDER: &str = "learn";
/// Suffix of the name of a segment.
const SUFFIX: &str = ".fllearn";
/// Digits of the number of a segment.
const DIGITS: usize = 10;

/// The place after a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    /// The number of the sample's segment.
    pub segment: u64,
    /// Samples of the segment up to the place.
    pub samples: u64,
}

/// Why a log cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LogError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{}: another process writes this log", path.display())]
    Locked { path: PathBuf },
    #[error("{}: not a log of samples: expected the file to begin with FLLEARNS", path.display())]
    Foreign { path: PathBuf },
    #[error("{}: format version: expected {expected}, got {got}", path.display())]
    Version { path: PathBuf, expected: u32, got: u32 },
    #[error(
        "{}: samples of another schema: expected checksum {expected}, got {got}; train them from a version \
         of their schema, or remove the segments up to this one while no server runs",
        path.display()
    )]
    Schema { path: PathBuf, expected: Checksum, got: Checksum },
    #[error("{}: damaged at byte {at}: {reason}", path.display())]
    Damaged { path: PathBuf, at: u64, reason: &'static str },
    #[error("{}: missing, but a later segment exists", path.display())]
    Missing { path: PathBuf },
    #[error("{}: is not the name of a segment", path.display())]
    Name { path: PathBuf },
    #[error("{}: was removed or replaced while the log was written", path.display())]
    Gone { path: PathBuf },
}

impl LogError {
    fn io(path: &Path, error: io::Error) -> Self {
        Self::Store(StoreError::at(path, error))
    }
}

/// The directory of a model's log.
#[must_use]
pub(crate) fn folder(models: &Path, name: &str) -> PathBuf {
    models.join(name).join(STATE).join(FOLDER)
}

/// The file name of a segment. The order of names is that of numbers.
#[must_use]
pub(crate) fn name_of(segment: u64) -> String {
    format!("{segment:0DIGITS$}{SUFFIX}")
}

/// The number of the segment with this file name.
#[must_use]
pub(crate) fn number_of(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(SUFFIX)?;
    let number = digits.parse().ok()?;
    (name_of(number) == name).then_some(number)
}

/// The numbers of the segments in a directory, ascending.
///
/// # Errors
/// When the directory cannot be read.
pub(crate) fn segments(dir: &Path) -> Result<Vec<u64>, LogError> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(dir).map_err(|e| LogError::io(dir, e))? {
        let entry = entry.map_err(|e| LogError::io(dir, e))?;
        numbers.extend(entry.file_name().to_str().and_then(number_of));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Removes the segments before the segment of this name, whose samples were all trained on by a version that
/// is published. Returns how many were removed. The segment itself stays, and the last segment always does,
/// so that numbers are never used twice.
///
/// # Errors
/// When the name is not that of a segment, or a file cannot be removed.
pub(crate) fn remove_consumed(dir: &Path, name: &str) -> Result<usize, LogError> {
    let until = number_of(name).ok_or_else(|| LogError::Name { path: dir.join(name) })?;
    let mut removed = 0;
    let numbers = segments(dir)?;
    let last = numbers.last().copied().unwrap_or(0);
    for number in numbers.into_iter().filter(|&number| number < until && number < last) {
        let path = dir.join(name_of(number));
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(LogError::io(&path, e)),
            _ => removed += 1,
        }
    }
    Ok(removed)
}

/// Bytes of all segments in a directory.
fn kept_bytes(dir: &Path) -> Result<u64, LogError> {
    let mut bytes = 0;
    for number in segments(dir)? {
        let path = dir.join(name_of(number));
        match fs::metadata(&path) {
            Ok(found) => bytes += found.len(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(LogError::io(&path, e)),
        }
    }
    Ok(bytes)
}
