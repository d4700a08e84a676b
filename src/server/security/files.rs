//! A value that is read from files, and read again when they change.
//!
//! The contents are compared, not the times of change, so links that point elsewhere are noticed too. If the
//! new contents cannot be used, the value stays as it is, and each later check tries them again. Files that
//! belong together are often replaced one after the other, so a reason is logged only when two checks in a
//! row have found it, with the same contents.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, RwLock};

use ring::digest::{Context, Digest, SHA256};

use crate::sync::EvenPoisoned;

/// Most bytes of a file.
const FILE_BYTES: u64 = 1 << 20;

/// A file that a setting names.
pub(crate) struct SettingFile {
    pub setting: &'static str,
    pub path: PathBuf,
}

/// A file that a setting names, with its contents.
pub(crate) struct Contents {
    pub setting: &'static str,
    path: PathBuf,
    pub bytes: Vec<u8>,
}

/// Why a file cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{setting}: {}: {reason}", path.display())]
#[allow(missing_docs)] // the error text says it
pub struct FileError {
    pub setting: &'static str,
    pub path: PathBuf,
    /// Never has a part of the file.
    pub reason: String,
}

impl Contents {
    fn read(setting: &'static str, path: &Path) -> Result<Self, FileError> {
        let wrong = |reason| FileError { setting, path: path.to_owned(), reason };
        // The contents of anything else may have no end, or never begin.
        if !fs::metadata(path).map_err(|error| wrong(error.to_string()))?.is_file() {
            return Err(wrong("not a file".to_owned()));
        }
        let mut bytes = Vec::new();
        let read = File::open(path).and_then(|file| file.take(FILE_BYTES + 1).read_to_end(&mut bytes));
        match read.map_err(|error| wrong(error.to_string()))? as u64 {
            0..=FILE_BYTES => Ok(Self { setting, path: path.to_owned(), bytes }),
            _ => Err(wrong(format!("limit {FILE_BYTES} bytes, got more"))),
        }
    }

    pub(crate) fn wrong(&self, reason: impl Into<String>) -> FileError {
        FileError { setting: self.setting, path: self.path.clone(), reason: reason.into() }
    }
}

/// The value, and its files.
pub(crate) struct Watched<T> {
    files: Vec<SettingFile>,
    parse: fn(&[Contents]) -> Result<T, FileError>,
    value: RwLock<Arc<T>>,
    seen: Mutex<Seen>,
}

/// Who lets files be read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asker {
    /// With SIGHUP: the result is logged at once.
    Operator,
    Timer,
}

/// What the last check has found.
struct Seen {
    /// Digest of the contents in use.
    digest: Digest,
    /// Why later contents are refused.
    refused: Option<RefusedContents>,
}

struct RefusedContents {
    /// `None` if they cannot be read.
    digest: Option<Digest>,
    reason: FileError,
    logged: bool,
}

impl RefusedContents {
    fn is_of(&self, digest: Option<Digest>, reason: &FileError) -> bool {
        let same = match (&self.digest, &digest) {
            (Some(own), Some(other)) => own.as_ref() == other.as_ref(),
            (own, other) => own.is_none() && other.is_none(),
        };
        same && self.reason == *reason
    }
}

impl<T> Watched<T> {
    /// Reads the files for the first time.
    ///
    /// # Errors
    /// When a file cannot be read, or cannot be used.
    pub(crate) fn open(
        files: Vec<SettingFile>,
        parse: fn(&[Contents]) -> Result<T, FileError>,
    ) -> Result<Self, FileError> {
        let (digest, contents) = read(&files)?;
        let value = RwLock::new(Arc::new(parse(&contents)?));
        Ok(Self { files, parse, value, seen: Mutex::new(Seen { digest, refused: None }) })
    }

    pub(crate) fn value(&self) -> Arc<T> {
        self.value.read().even_poisoned().clone()
    }

    /// Reads the files again. Returns a new value if they have changed.
    pub(crate) fn check(&self, asker: Asker) -> Option<Arc<T>> {
        let mut seen = self.seen.lock().even_poisoned();
        let (digest, contents) = match read(&self.files) {
            Ok(read) => read,
            Err(reason) => {
                seen.refuse(None, reason, asker);
                return None;
            }
        };
        if digest.as_ref() == seen.digest.as_ref() {
            seen.refused = None;
            return None;
        }
        match (self.parse)(&contents) {
            Ok(value) => {
                let settings: Vec<&str> = self.files.iter().map(|file| file.setting).collect();
                tracing::info!(settings = settings.join(", "), "new files are used from now on");
                let value = Arc::new(value);
                *self.value.write().even_poisoned() = value.clone();
                *seen = Seen { digest, refused: None };
                Some(value)
            }
            Err(reason) => {
                seen.refuse(Some(digest), reason, asker);
                None
            }
        }
    }
}

impl Seen {
    fn refuse(&mut self, digest: Option<Digest>, reason: FileError, asker: Asker) {
        let before = self.refused.take().filter(|before| before.is_of(digest, &reason));
        let logged = before.as_ref().is_some_and(|before| before.logged);
        let log = asker == Asker::Operator || before.is_some() && !logged;
        if log {
            tracing::error!("{reason}; the old contents stay in use");
        }
        self.refused = Some(RefusedContents { digest, reason, logged: logged || log });
    }
}

fn read(files: &[SettingFile]) -> Result<(Digest, Vec<Contents>), FileError> {
    let contents: Vec<Contents> =
        files.iter().map(|file| Contents::read(file.setting, &file.path)).collect::<Result<_, _>>()?;
    let mut digest = Context::new(&SHA256);
    for file in &contents {
        digest.update(&(file.bytes.len() as u64).to_le_bytes());
        digest.update(&file.bytes);
    }
    Ok((digest.finish(), contents))
}

#[cfg(test)]
mod tests;
