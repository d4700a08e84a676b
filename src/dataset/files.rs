//! The files that a reader reads: a list, or a directory in which files appear while training runs.
//!
//! A file of a followed directory counts when it is renamed into place, so it is complete. Files are taken in
//! the order of their names. Names that begin with `.` or end with `.tmp` or `.part` are ignored, because
//! writers use them for files that are not complete.

use std::collections::{BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use super::{DatasetError, Stop};

/// How often a followed directory is read while no next file is there.
const POLL: Duration = Duration::from_millis(200);

/// The files of a reader.
pub(crate) enum Files {
    List(VecDeque<PathBuf>),
    Followed(Follow),
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
    /// [`DatasetError::Open`] when the directory cannot be read.
    pub(crate) fn next(&mut self, stop: &Stop) -> Result<Next, DatasetError> {
        match self {
            Self::List(paths) => Ok(paths.pop_front().map_or(Next::End, Next::File)),
            Self::Followed(follow) => follow.next(stop),
        }
    }

    /// Takes back the file that [`Self::next`] returned last.
    pub(crate) fn give_back(&mut self, path: PathBuf) {
        match self {
            Self::List(paths) => paths.push_front(path),
            Self::Followed(follow) => follow.again = Some(path),
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
pub(crate) struct Follow {
    dir: PathBuf,
    /// The name of the last file.
    until: Option<String>,
    /// The name of the file that was returned last.
    current: Option<String>,
    /// A file to return once more.
    again: Option<PathBuf>,
    /// Names up to `current` that were read or reported, as far as their files still exist.
    known: BTreeSet<String>,
}

impl Follow {
    /// Follows a directory, up to the file named `until`.
    pub(crate) fn new(dir: &Path, until: Option<String>) -> Self {
        Self { dir: dir.to_owned(), until, current: None, again: None, known: BTreeSet::new() }
    }

    /// Starts at the file of this name again. Files before it have been read.
    ///
    /// # Errors
    /// [`DatasetError::Open`] when the directory cannot be read.
    pub(crate) fn from(mut self, name: &str) -> Result<Self, DatasetError> {
        self.known = self.names()?.into_iter().filter(|known| &**known <= name).collect();
        self.again = Some(self.dir.join(name));
        self.current = Some(name.to_owned());
        Ok(self)
    }

    fn next(&mut self, stop: &Stop) -> Result<Next, DatasetError> {
        if let Some(again) = self.again.take() {
            return Ok(Next::File(again));
        }
        loop {
            if self.until.as_ref().zip(self.current.as_ref()).is_some_and(|(until, now)| now >= until) {
                return Ok(Next::End);
            }
            if stop.requested() {
                return Ok(Next::Stopped);
            }
            let names = self.names()?;
            self.report_late(&names);
            let next = names.into_iter().find(|name| self.current.as_ref().is_none_or(|now| name > now));
            if let Some(name) = next {
                if self.until.as_ref().is_some_and(|until| name > *until) {
                    return Ok(Next::End);
                }
                let path = self.dir.join(&name);
                self.known.insert(name.clone());
                self.current = Some(name);
                return Ok(Next::File(path));
            }
            sleep(POLL);
        }
    }

    /// The names of the complete files in the directory, ascending.
    fn names(&self) -> Result<BTreeSet<String>, DatasetError> {
        let refused = |cause| DatasetError::Open { path: self.dir.clone(), cause };
        let mut names = BTreeSet::new();
        for entry in self.dir.read_dir().map_err(refused)? {
            let entry = entry.map_err(refused)?;
            // A name that is not UTF-8 could not be named in a cursor.
            let Ok(name) = entry.file_name().into_string() else { continue };
            let complete = !name.starts_with('.') && !name.ends_with(".tmp") && !name.ends_with(".part");
            if complete && !entry.file_type().map_err(refused)?.is_dir() {
                names.insert(name);
            }
        }
        Ok(names)
    }

    /// Warns once of each file that appeared after a file with a greater name was read.
    fn report_late(&mut self, names: &BTreeSet<String>) {
        self.known.retain(|known| names.contains(known));
        let Some(current) = &self.current else { return };
        for late in names.range(..current.clone()) {
            if self.known.insert(late.clone()) {
                let late = self.dir.join(late);
                tracing::warn!("{}: appeared after {current:?}: it is not trained on", late.display());
            }
        }
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
