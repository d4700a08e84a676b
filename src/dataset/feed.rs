//! The data of a training run: its files, what is held out for validation, how the rest is shuffled, and from
//! where an epoch is read.
//!
//! An epoch is a deterministic sequence of samples. So training continues at any batch boundary by opening
//! the same sequence and skipping the samples that were trained ([`DataPosition`]). A followed directory has
//! no end and its first files may be gone, so there the position is a file and a number of its samples.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Stoppable;
use super::delimited::Delimited;
use super::held_out::{DataPart, HeldOut, OnePart};
use super::learned::{Learned, LearnedReader};
use super::shuffle::{Shuffle, Shuffled};
use super::{
    DatasetError, Files, FollowedDir, Format, Input, ReadOptions, Reader, Stop, in_line, open_input,
};
use crate::schema::Schema;

/// The data of a training run.
pub(crate) struct Feed {
    /// `None` for learned samples, if nothing else is read.
    pub format: Option<Format>,
    pub files: FeedFiles,
    pub schema: Schema,
    pub options: ReadOptions,
    pub shuffle: Option<Shuffle>,
    pub held_out: Option<HeldOut>,
    pub stop: Stop,
}

/// The files of a training run.
#[derive(Clone, Debug)]
pub(crate) enum FeedFiles {
    List(Vec<PathBuf>),
    /// Without shuffling and held-out samples, because their order is that of time.
    Followed(FollowedDir),
    /// The same holds for the log of learned samples.
    Learned(Learned),
}

/// A batch boundary in the data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DataPosition {
    /// Counted from 1.
    pub epoch: u32,
    /// Samples of this epoch before the position.
    pub samples: u64,
    /// In a followed directory: the file of the last sample.
    pub file: Option<FileAt>,
}

/// A position in a file of a followed directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileAt {
    pub name: String,
    /// Samples of the file before the position.
    pub samples: u64,
    /// Whether the position is known to be the end of the file. Then the run continues even if the file is
    /// gone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub complete: bool,
}

impl DataPosition {
    /// The beginning of an epoch, counted from 1.
    pub(crate) fn begin(epoch: u32) -> Self {
        Self { epoch, samples: 0, file: None }
    }
}

impl Feed {
    /// Opens the samples to train on, from this position to the end of its epoch. An interrupt ends the skip
    /// to the position, and the reader then has no samples.
    ///
    /// # Errors
    /// [`DatasetError`], also when the data ends before the position.
    pub(crate) fn open(&self, from: &DataPosition) -> Result<Box<dyn Reader + Send>, DatasetError> {
        let skipped = match (&self.files, &from.file) {
            // Its reader begins at the place.
            (FeedFiles::Followed(_), Some(_)) => 0,
            (FeedFiles::Learned(_), Some(file)) => file.samples,
            _ => from.samples,
        };
        let mut reader = self.open_files(from)?;
        if let Some(held_out) = self.held_out {
            reader = Box::new(OnePart::new(reader, held_out, DataPart::Trained));
        }
        if let Some(shuffle) = self.shuffle {
            reader = Box::new(Shuffled::new(reader, shuffle, from.epoch));
        }
        let got = reader.skip(skipped)?;
        if got < skipped && !self.stop.interrupted() {
            let origin = from.file.as_ref().map_or_else(|| self.names().join(", "), |file| file.name.clone());
            return Err(DatasetError::Shorter { origin: in_line(origin), expected: skipped, got });
        }
        Ok(Box::new(Stoppable::new(reader, self.stop.clone())))
    }

    /// Opens the samples that are held out; `None` if none are.
    ///
    /// # Errors
    /// [`DatasetError`].
    pub(crate) fn open_held_out(&self) -> Result<Option<Box<dyn Reader + Send>>, DatasetError> {
        let Some(held_out) = self.held_out else { return Ok(None) };
        let files = self.open_files(&DataPosition::begin(1))?;
        let part = OnePart::new(files, held_out, DataPart::HeldOut);
        Ok(Some(Box::new(Stoppable::new(Box::new(part), self.stop.only_interrupts()))))
    }

    /// Opens a file that is not trained on. An interrupt ends it, also while it waits for a pipe.
    ///
    /// # Errors
    /// [`DatasetError`].
    pub(crate) fn open_other(&self, path: &Path) -> Result<Box<dyn Reader + Send>, DatasetError> {
        let stop = self.stop.only_interrupts();
        let input = Input { files: Files::List([path.to_owned()].into()), stop: stop.clone() };
        let reader = open_input(self.format()?, input, &self.schema, self.options.clone())?;
        Ok(Box::new(Stoppable::new(reader, stop)))
    }

    /// The names of the files, without their directories; empty for a followed directory or a log. Generated
    /// data has its whole description as its name.
    #[must_use]
    pub(crate) fn names(&self) -> Vec<String> {
        let FeedFiles::List(paths) = &self.files else { return Vec::new() };
        paths.iter().map(|path| self.name(path)).collect()
    }

    /// The name of one file, as [`Self::names`].
    #[must_use]
    pub(crate) fn name(&self, path: &Path) -> String {
        match (self.format, path.file_name()) {
            (Some(Format::Synthetic), _) | (_, None) => path.to_string_lossy().into_owned(),
            (_, Some(name)) => name.to_string_lossy().into_owned(),
        }
    }

    fn format(&self) -> Result<Format, DatasetError> {
        self.format.ok_or(DatasetError::NoFormat)
    }

    fn open_files(&self, from: &DataPosition) -> Result<Box<dyn Reader + Send>, DatasetError> {
        let plain = self.shuffle.is_none() && self.held_out.is_none();
        // Shuffling reads a whole block, so it cannot go on after a pause in the middle of it.
        let stop = if plain { self.stop.clone() } else { self.stop.only_interrupts() };
        let files = match (&self.files, &from.file) {
            (FeedFiles::List(paths), _) => Files::List(paths.iter().cloned().collect()),
            (FeedFiles::Followed(follow), None) => Files::Followed(follow.clone()),
            (FeedFiles::Followed(follow), Some(file)) => return self.open_followed(follow, file, stop),
            (FeedFiles::Learned(learned), file) => {
                let reader = LearnedReader::open(learned.clone(), file.as_ref(), &self.schema, stop)?;
                return Ok(Box::new(reader));
            }
        };
        open_input(self.format()?, Input { files, stop }, &self.schema, self.options.clone())
    }

    /// Opens a followed directory at a position in one of its files.
    ///
    /// # Errors
    /// Also when samples of that file would be lost: it ends before the position, or it is gone and the
    /// position is not known to be its end.
    fn open_followed(
        &self,
        follow: &FollowedDir,
        at: &FileAt,
        stop: Stop,
    ) -> Result<Box<dyn Reader + Send>, DatasetError> {
        let format = self.format()?;
        if format == Format::Synthetic {
            return Err(DatasetError::Follow);
        }
        let (mut follow, path) = (follow.clone(), follow.path(&at.name));
        let exists = follow.continue_after(&at.name)?;
        let interrupts = stop.clone();
        let input = Input { files: Files::Followed(follow), stop };
        let mut reader = Delimited::open(format, input, &self.schema, self.options.clone())?;
        if exists {
            let got = reader.skip_in(path.clone(), at.samples)?;
            if got < at.samples && !interrupts.interrupted() {
                let origin = in_line(&path);
                return Err(DatasetError::Shorter { origin, expected: at.samples, got });
            }
        } else if at.complete {
            tracing::info!("{}: is gone, and all of it was trained on", in_line(&path));
        } else {
            return Err(DatasetError::Gone { path, samples: at.samples });
        }
        Ok(Box::new(reader))
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
pub(crate) mod tests;
