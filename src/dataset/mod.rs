//! Streaming readers of click logs, in constant memory.
//!
//! A [`Reader`] fills one [`RawBatch`] after another with the columns of a schema, found by name. It neither
//! hashes nor transforms: `Schema::encode` does, so that a trainer and a client that sends raw strings read
//! the same way. [`open`] chains several files into one reader.
//!
//! Click logs have malformed lines. Such a line is skipped and reported with its file and number. If there
//! are more than a limit, the input is refused, because the file then probably has another format.
//!
//! **Labels.** A line with a missing field does not show which field is missing. So the caller says with
//! [`Labels`] whether the files have a label column, and that fixes the number of fields per line.

mod delimited;
mod feed;
mod fields;
mod files;
#[cfg(test)]
#[cfg(not(flechette_loom))]
mod fuzz;
mod header;
mod held_out;
mod input_file;
mod layout;
mod learned;
mod lines;
mod shuffle;
mod source;
mod stop;
pub(crate) mod stoppable;
pub mod synthetic;

use delimited::Delimited;
pub(crate) use feed::{DataPosition, Feed, FeedFiles, FileAt};
pub(crate) use files::{Files, FollowedDir, can_be_followed};
pub(crate) use header::column_names;
pub(crate) use held_out::HeldOut;
pub use layout::FieldOptions;
pub(crate) use layout::{has_name, label_of, listed};
pub(crate) use learned::{Learned, Shortage};
pub(crate) use shuffle::Shuffle;
pub use stop::Stop;
pub(crate) use stoppable::Stoppable;

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::learnlog::LogError;
use crate::schema::{EncodeError, Schema};
use crate::types::{RawBatch, named};

/// A file of samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFile {
    /// Its name, without its directory.
    pub name: String,
    /// The id of the log of learned samples that the file is a segment of. `None` for other files, and if the
    /// log has no id.
    pub log: Option<String>,
}

/// Consecutive samples of one file in a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRun {
    /// The file, which has an `Arc` of its own each time that it is opened.
    pub file: Arc<DataFile>,
    /// Samples in the batch.
    pub samples: usize,
    /// Samples of the file up to the end of these samples.
    pub of_file: u64,
    /// Whether the file is known to end after these samples. Only a followed directory's files are looked at,
    /// and only at the end of a batch.
    pub ends_file: bool,
}

impl FileRun {
    /// Adds the next samples of a file to the runs of a batch. `of_file` is the number of samples of the file
    /// up to their end. Two files of one name have two runs.
    fn count(runs: &mut Vec<Self>, file: &Arc<DataFile>, samples: usize, of_file: u64) {
        match runs.last_mut() {
            Some(run) if Arc::ptr_eq(&run.file, file) => {
                run.samples += samples;
                run.of_file = of_file;
            }
            _ => runs.push(Self { file: file.clone(), samples, of_file, ends_file: false }),
        }
    }
}

/// The path or the name of a file, for a line of text. If it has control characters, it is quoted and they
/// are escaped, because a line feed or an escape sequence in the name of a file would forge a line.
pub(crate) fn in_line(path: impl AsRef<Path>) -> String {
    let text = path.as_ref().to_string_lossy();
    if text.contains(char::is_control) { format!("{text:?}") } else { text.into_owned() }
}

/// Samples that are read and dropped at a time.
const SKIPPED_SAMPLES: u64 = 4096;

/// Reads samples in the order of its files.
pub trait Reader {
    /// Overwrites `out` with the next samples, in the column order of the schema, and returns their number.
    /// It is `max_samples`, or less at the end or when a column reaches about 1 GiB, or 0 after the last
    /// sample.
    ///
    /// # Errors
    /// [`DatasetError`] when a file cannot be read or has too many malformed lines. The reader and the
    /// content of `out` are then unusable.
    fn read(&mut self, max_samples: usize, out: &mut RawBatch) -> Result<usize, DatasetError>;

    /// The reader whose samples this one hands on, if it hands on all of them in the same batches. Then it
    /// answers the questions below as that reader does, unless it has answers of its own.
    fn inner(&self) -> Option<&dyn Reader> {
        None
    }

    /// Malformed lines that were skipped so far.
    fn skipped(&self) -> u64 {
        self.inner().map_or(0, |inner| inner.skipped())
    }

    /// The lines that the last call of [`Reader::read`] skipped: for each, the number of samples in the batch
    /// before it.
    fn skips(&self) -> &[usize] {
        self.inner().map_or(&[], |inner| inner.skips())
    }

    /// Skips the next samples and returns their number, which is less than `samples` only at the end. The
    /// samples after them, and the decisions about malformed lines, are those of reading and dropping them.
    ///
    /// # Errors
    /// As [`Reader::read`].
    fn skip(&mut self, samples: u64) -> Result<u64, DatasetError> {
        let (mut dropped, mut left) = (RawBatch::default(), samples);
        while left > 0 {
            let got = self.read(left.min(SKIPPED_SAMPLES) as usize, &mut dropped)?;
            if got == 0 {
                break;
            }
            left -= got as u64;
        }
        Ok(samples - left)
    }

    /// The files of the samples of the last [`Reader::read`], in order. Empty if samples do not follow each
    /// other as in files.
    fn runs(&self) -> &[FileRun] {
        self.inner().map_or(&[], |inner| inner.runs())
    }

    /// Whether the reader may wait long for the next samples. Then each batch must be handed on at once.
    fn may_wait(&self) -> bool {
        self.inner().is_some_and(|inner| inner.may_wait())
    }

    /// What ends a wait of the reader from another thread; `None` if it never waits.
    fn stop(&self) -> Option<Stop> {
        self.inner()?.stop()
    }

    /// The share of the input that was read, from 0 to 1, by bytes on disk; `None` if its size is not known.
    fn share(&self) -> Option<f64> {
        self.inner()?.share()
    }
}

/// The format of a file's lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Tab-separated without a header: label (see [`Labels`]), 13 integers `I1` to `I13`, 26 strings `C1` to
    /// `C26`.
    CriteoTsv,
    /// Comma-separated with a header; column `click` is the label.
    AvazuCsv,
    /// Comma-separated, fields may be in double quotes. With a header, or with [`FieldOptions::columns`].
    Csv,
    /// Tab-separated, without quotes. With a header, or with [`FieldOptions::columns`].
    Tsv,
    /// Generated: a "file" is a description such as `rows=1000,seed=1,skew=medium`.
    Synthetic,
}

named! {
    Format:
    CriteoTsv = "criteo-tsv", AvazuCsv = "avazu-csv", Csv = "csv", Tsv = "tsv", Synthetic = "synthetic";
    DatasetError = |name| DatasetError::UnknownFormat { name }
}

/// Whether files have a label column.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Labels {
    /// Every file must have a label column.
    Required,
    /// A file with a header may lack the label column, with a warning. A file without a header has a label if
    /// its columns are named with one.
    #[default]
    Expected,
    /// No labels are read. A file without a header has no label field, also if its columns are named with
    /// one; a label column in a header is ignored.
    None,
}

impl Labels {
    /// The labels for a command with or without the flag `--unlabelled`.
    #[must_use]
    pub(crate) fn unless(unlabelled: bool) -> Self {
        if unlabelled { Self::None } else { Self::Expected }
    }
}

/// How a reader treats its input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadOptions {
    /// Malformed lines that are skipped, over all files, before the input is refused.
    pub malformed_lines: u64,
    /// Bytes of a line; a longer one is malformed.
    pub line_bytes: usize,
    /// Whether the files have labels.
    pub labels: Labels,
    /// How fields are named and divided.
    pub fields: FieldOptions,
}

impl Default for ReadOptions {
    fn default() -> Self {
        let (labels, fields) = (Labels::default(), FieldOptions::default());
        Self { malformed_lines: 100, line_bytes: 1 << 20, labels, fields }
    }
}

/// Why data cannot be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages explain the fields
pub enum DatasetError {
    #[error("unknown format {name:?}, expected {names}", names = Format::names())]
    UnknownFormat { name: String },
    #[error("no format of the data was given")]
    NoFormat,
    #[error("no data file was given")]
    NoFiles,
    #[error("{}: cannot be opened: {cause}", in_line(path))]
    Open { path: PathBuf, cause: io::Error },
    #[error("{}: expected a file, got a directory", in_line(path))]
    Directory { path: PathBuf },
    /// Reading or decompressing failed, or a compressed file is truncated. `line` is the last line that was
    /// read whole.
    #[error("{}: cannot be read after line {line}: {cause}", in_line(path))]
    Read { path: PathBuf, line: u64, cause: io::Error },
    #[error("{}: line {line}: {reason}: more than {limit} malformed lines", in_line(path))]
    TooManyMalformed { path: PathBuf, line: u64, reason: String, limit: u64 },
    #[error("{}: no line has the expected number of fields; line {line}: {reason}", in_line(path))]
    FieldCount { path: PathBuf, line: u64, reason: String },
    /// The schema names an input that the data does not have. `origin` is the format, `--columns`, or the
    /// file with the header.
    #[error("{origin}: {input:?} of the schema is not a column, expected one of {columns}")]
    UnknownColumn { origin: String, input: String, columns: String },
    #[error("{}: header: {reason}", in_line(path))]
    Header { path: PathBuf, reason: String },
    #[error("{origin}: labels are needed, but there is no column {column:?} (--label), only {columns}")]
    NoLabels { origin: String, column: String, columns: String },
    #[error(
        "{}: {} labels, unlike the files before it", in_line(path), if *labelled { "has" } else { "has no" }
    )]
    MixedLabels { path: PathBuf, labelled: bool },
    #[error("synthetic data {text:?}: {reason}")]
    Synthetic { text: String, reason: String },
    #[error("--follow: synthetic data has no files")]
    Follow,
    /// A flag of [`FieldOptions`] is wrong.
    #[error("{flag}: {reason}")]
    Flag { flag: &'static str, reason: String },
    /// The log of learned samples cannot be read.
    #[error("{0}")]
    Learned(Box<dyn Error + Send + Sync>),
    #[error("{}: {error}", in_line(dir))]
    LearnedValues { dir: PathBuf, error: EncodeError },
    /// The data is not that of the earlier run.
    #[error("{origin}: has {got} samples, but {expected} were trained on before")]
    Shorter { origin: String, expected: u64, got: u64 },
    /// The rest of a followed file would be lost silently.
    #[error(
        "{}: there is no such file, and only its first {samples} samples are known to be trained on: put it \
         back, or train the later files in another directory (--from latest), which gives up its rest",
        in_line(path)
    )]
    Gone { path: PathBuf, samples: u64 },
}

impl DatasetError {
    pub(crate) fn flag(flag: &'static str, reason: impl Into<String>) -> Self {
        Self::Flag { flag, reason: reason.into() }
    }
}

impl From<LogError> for DatasetError {
    fn from(error: LogError) -> Self {
        Self::Learned(Box::new(error))
    }
}

/// Opens files as one reader of the schema's columns, one file after the other. Gzip and zstd are recognised
/// by content. The first file is opened at once, and each later file when the file before it ends.
///
/// # Errors
/// [`DatasetError`] when there is no file, the first cannot be opened, or the schema names columns that the
/// format does not have.
pub fn open(
    format: Format,
    paths: &[PathBuf],
    schema: &Schema,
    options: ReadOptions,
) -> Result<Box<dyn Reader + Send>, DatasetError> {
    let input = Input { files: Files::List(paths.iter().cloned().collect()), stop: Stop::default() };
    open_input(format, input, schema, options)
}

/// Files, and the flag that stops waiting for them.
pub(crate) struct Input {
    pub files: Files,
    pub stop: Stop,
}

/// [`open`] for any kind of files. Of a followed directory no file is opened before the first read.
///
/// # Errors
/// As [`open`].
pub(crate) fn open_input(
    format: Format,
    input: Input,
    schema: &Schema,
    options: ReadOptions,
) -> Result<Box<dyn Reader + Send>, DatasetError> {
    if matches!(&input.files, Files::List(paths) if paths.is_empty()) {
        return Err(DatasetError::NoFiles);
    }
    Ok(match (format, input.files) {
        (Format::Synthetic, Files::Followed(_)) => return Err(DatasetError::Follow),
        (Format::Synthetic, Files::List(paths)) => {
            options.fields.check_unused(&format!("the format {format}"))?;
            Box::new(synthetic::open(&Vec::from(paths), schema)?)
        }
        (_, files) => Box::new(Delimited::open(format, Input { files, ..input }, schema, options)?),
    })
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_control_characters_is_escaped_and_any_other_is_not() {
        assert_eq!(in_line("in/day 1 \"ä\".tsv"), "in/day 1 \"ä\".tsv");
        let path = PathBuf::from("in/a\nerror: b\u{1b}[2K");
        assert_eq!(in_line(&path), r#""in/a\nerror: b\u{1b}[2K""#);
        let error = DatasetError::Directory { path }.to_string();
        assert_eq!(error, r#""in/a\nerror: b\u{1b}[2K": expected a file, got a directory"#);
    }
}
