//! The files that a reader reads: a list, or a directory in which files appear while training runs.
//!
//! A file of a followed directory counts when it is renamed into place, so it is complete. Files are taken in
//! the order of their names. Names that begin with `.` or end with `.tmp` or `.part` are ignored, because
//! writers use them for files that are not complete. An entry that is not a file, or whose name is not UTF-8,
//! is reported once and not trained on. If a directory cannot be read any more, the reader waits for it.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fs::DirEntry;
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use super::{DatasetError, Stop, in_line};

/// How often a followed directory is read while no next file is there.
const POLL: Duration = Duration::from_millis(200);

/// The files of a reader.
pub(crate) enum Files {
    List(VecDeque<PathBuf>),
    Followed(FollowedDir),
}

/// What comes after a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    File(PathBuf),
    /// Nothing yet: the reader was told to stop while it waited. A later call may return a file.
    Stopped,
    /// No more files.
    End,
}

impl Files {
    /// The next file. In a followed directory it waits for one.
    ///
    /// # Errors
    /// [`DatasetError::Open`] when the directory could never be read.
    pub(crate) fn next(&mut self, stop: &Stop) -> Result<Next, DatasetError> {
        match self {
            Self::List(paths) => Ok(paths.pop_front().map_or(Next::End, Next::File)),
            Self::Followed(follow) => follow.next(stop),
        }
    }

    /// Bytes of all files as they are on disk; `None` if that is not known, as for pipes.
    pub(crate) fn bytes(&self) -> Option<u64> {
        let Self::List(paths) = self else { return None };
        let size = |path: &PathBuf| path.metadata().ok().filter(|found| found.is_file()).map(|f| f.len());
        paths.iter().map(size).sum()
    }

    /// Whether the number of files is not limited. Then the limit of malformed lines counts for each file.
    pub(crate) fn endless(&self) -> bool {
        matches!(self, Self::Followed(_))
    }
}

/// A directory whose files are read in the order of their names as they appear.
#[derive(Clone, Debug)]
pub(crate) struct FollowedDir {
    dir: PathBuf,
    /// The name of the last file.
    until: Option<String>,
    /// The name of the file that was returned last.
    current: Option<String>,
    /// Names up to `current` that were read or reported, as far as their files still exist.
    known: BTreeSet<String>,
    /// Entries that cannot be trained on. They were reported.
    refused: BTreeSet<OsString>,
    state: DirState,
}

/// Whether a followed directory can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DirState {
    /// It was not read yet.
    Unknown,
    Readable,
    /// It was readable before, which was reported.
    Lost,
}

impl FollowedDir {
    /// Follows a directory, up to the file named `until`.
    pub(crate) fn new(dir: &Path, until: Option<String>) -> Self {
        Self {
            dir: dir.to_owned(),
            until,
            current: None,
            known: BTreeSet::new(),
            refused: BTreeSet::new(),
            state: DirState::Unknown,
        }
    }

    /// The path of the file of this name.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Continues with the file after this name. Returns whether the file of this name is there.
    ///
    /// # Errors
    /// [`DatasetError::Open`] when the directory cannot be read.
    pub(crate) fn continue_after(&mut self, name: &str) -> Result<bool, DatasetError> {
        let names = self.names().map_err(|cause| self.unreadable(cause))?;
        self.state = DirState::Readable;
        self.known = names.into_iter().filter(|known| &**known <= name).collect();
        self.current = Some(name.to_owned());
        let exists = self.known.contains(name);
        // Which of them an earlier run trained on is not known, because a cursor has only the last name.
        let before = self.known.len() - usize::from(exists);
        let (dir, taken) = (self.dir.display(), format!("files before {name:?} are taken as trained on"));
        match (before, exists) {
            (0, _) => {}
            (_, true) => tracing::info!("{dir}: {before} {taken}, and not read"),
            (_, false) => tracing::warn!(
                "{dir}: {before} {taken}, although that file is not here: if it was in another directory of \
                 this name, give this one another name"
            ),
        }
        Ok(exists)
    }

    fn next(&mut self, stop: &Stop) -> Result<Next, DatasetError> {
        let mut waiting = None;
        loop {
            if self.until.as_ref().zip(self.current.as_ref()).is_some_and(|(until, now)| now >= until) {
                return Ok(Next::End);
            }
            if stop.requested() {
                return Ok(Next::Stopped);
            }
            if let Some(names) = self.poll()? {
                self.report_late(&names);
                if let Some(name) = self.first_new(names) {
                    // The listing of a large directory is no snapshot: a file that was renamed before this
                    // one may be missing. A listing that begins now has both.
                    let name = self.poll()?.and_then(|names| self.first_new(names)).unwrap_or(name);
                    if self.until.as_ref().is_some_and(|until| name > *until) {
                        return Ok(Next::End);
                    }
                    let path = self.dir.join(&name);
                    self.known.insert(name.clone());
                    self.current = Some(name);
                    return Ok(Next::File(path));
                }
            }
            waiting.get_or_insert_with(|| stop.begin_wait());
            sleep(POLL);
        }
    }

    /// The first of these names after the current one.
    fn first_new(&self, names: BTreeSet<String>) -> Option<String> {
        names.into_iter().find(|name| self.current.as_ref().is_none_or(|now| name > now))
    }

    /// [`Self::names`]; `None` while the directory cannot be read, because a mount can be away for a while.
    ///
    /// # Errors
    /// [`DatasetError::Open`] when the directory was never readable: then its name is probably wrong.
    fn poll(&mut self) -> Result<Option<BTreeSet<String>>, DatasetError> {
        let (before, names) = (self.state, self.names());
        self.state = if names.is_ok() { DirState::Readable } else { DirState::Lost };
        match (before, names) {
            (DirState::Unknown, Err(cause)) => Err(self.unreadable(cause)),
            (DirState::Readable, Err(cause)) => {
                tracing::warn!("{}: training waits until it can be read again", self.unreadable(cause));
                Ok(None)
            }
            (DirState::Lost, Err(_)) => Ok(None),
            (DirState::Lost, Ok(names)) => {
                tracing::info!("{}: can be read again", self.dir.display());
                Ok(Some(names))
            }
            (_, Ok(names)) => Ok(Some(names)),
        }
    }

    fn unreadable(&self, cause: io::Error) -> DatasetError {
        DatasetError::Open { path: self.dir.clone(), cause }
    }

    /// The names of the complete files in the directory, ascending. Warns once of each other entry.
    fn names(&mut self) -> io::Result<BTreeSet<String>> {
        let (mut names, mut refused) = (BTreeSet::new(), BTreeSet::new());
        for entry in self.dir.read_dir()? {
            let entry = entry?;
            let name = entry.file_name();
            if is_incomplete(&name) {
                continue;
            }
            let reason = match reason_against(&entry) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                reason => reason?,
            };
            match (reason, name.into_string()) {
                (None, Ok(name)) => {
                    names.insert(name);
                }
                (reason, name) => {
                    let name = name.map_or_else(|name| name, OsString::from);
                    // A name that is not UTF-8 could not be named in a cursor.
                    let reason = reason.unwrap_or_else(|| "its name is not UTF-8".to_owned());
                    if !self.refused.contains(&name) {
                        tracing::warn!("{}: {name:?} is not trained on: {reason}", self.dir.display());
                    }
                    refused.insert(name);
                }
            }
        }
        self.refused = refused;
        Ok(names)
    }

    /// Warns once of each file that appeared after a file with the same or a greater name was read.
    fn report_late(&mut self, names: &BTreeSet<String>) {
        // An empty directory may be the place of a mount that is away. Its files are not late when they are
        // back.
        if !names.is_empty() {
            self.known.retain(|known| names.contains(known));
        }
        let Some(current) = &self.current else { return };
        for late in names.range(..=current.clone()) {
            if self.known.insert(late.clone()) {
                let late = self.dir.join(late);
                tracing::warn!("{}: appeared after {current:?}: it is not trained on", in_line(late));
            }
        }
    }
}

/// Whether a file of a followed directory may have this name and be trained on.
pub(crate) fn can_be_followed(name: &str) -> bool {
    !name.is_empty() && !name.contains('/') && !is_incomplete(OsStr::new(name))
}

/// Whether a writer has not finished the file of this name.
fn is_incomplete(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    name.starts_with(b".") || name.ends_with(b".tmp") || name.ends_with(b".part")
}

/// Why an entry is not trained on; `None` if it is a file, or a link to one. Nothing is opened, because to
/// open a pipe would wait for its writer.
///
/// # Errors
/// [`io::ErrorKind::NotFound`] when the entry is gone.
fn reason_against(entry: &DirEntry) -> io::Result<Option<String>> {
    let mut kind = entry.file_type()?;
    if kind.is_symlink() {
        match entry.path().metadata() {
            Ok(target) => kind = target.file_type(),
            Err(error) => return Ok(Some(format!("the link leads to no file: {error}"))),
        }
    }
    Ok(match kind {
        kind if kind.is_file() => None,
        kind if kind.is_dir() => Some("it is a directory".to_owned()),
        _ => Some("it is neither a file nor a link to one".to_owned()),
    })
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
