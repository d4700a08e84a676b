//! Streaming readers of click logs, in constant memory.
//!
//! A [`Reader`] fills one [`RawBatch`] after another with the columns of a schema, found by their
//! names, and neither hashes nor transforms: that is the schema's part (`Schema::encode`), so that
//! a trainer and a client that sends raw strings read the same way. [`open`] chains several
//! files into one reader.
//!
//! Click logs have broken lines. One that cannot be read is reported with its file and number and
//! skipped, up to a limit; past it the whole input is refused, because then the file is more
//! probably not what it is said to be.

mod avazu;
mod criteo;
mod delimited;
mod fields;
mod lines;
mod source;
pub mod synthetic;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;

use crate::schema::Schema;
use crate::types::RawBatch;

/// Gives samples in the order of its files.
pub trait Reader {
    /// Writes the next samples over `out`: `max_samples`, or fewer at the end or where a column
    /// would grow past 1 GiB, or 0 when there are no more. Columns stand in the schema's order.
    ///
    /// # Errors
    /// [`DatasetError`] when a file cannot be read or has too many malformed lines. The reader and what
    /// stands in `out` are of no use then.
    fn read(&mut self, max_samples: usize, out: &mut RawBatch) -> Result<usize, DatasetError>;

    /// How many malformed lines were skipped so far.
    fn skipped(&self) -> u64;

    /// The lines that the last call of [`Reader::read`] skipped: for each, the number of samples in the batch before it.
    fn skips(&self) -> &[usize] {
        &[]
    }
}

/// What a file's lines look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Tab-separated, no header: label, 13 integers, 26 strings; or without the label.
    CriteoTsv,
    /// Comma-separated with a header; `click` is the label and may be absent.
    AvazuCsv,
    /// Generated: a "file" is a description such as `rows=1000,seed=1,skew=medium`.
    Synthetic,
}

impl Format {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::CriteoTsv, Self::AvazuCsv, Self::Synthetic];

    /// Its name on the command line.
    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::CriteoTsv => "criteo-tsv",
            Self::AvazuCsv => "avazu-csv",
            Self::Synthetic => "synthetic",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Format {
    type Err = DatasetError;

    fn from_str(name: &str) -> Result<Self, DatasetError> {
        let unknown = || DatasetError::UnknownFormat { name: name.into() };
        Self::ALL.into_iter().find(|format| format.name() == name).ok_or_else(unknown)
    }
}

/// What a reader bears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Malformed lines that are skipped, over all files, before the input is refused.
    pub malformed_lines: u64,
    /// Bytes of a line; a longer one is malformed.
    pub line_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { malformed_lines: 100, line_bytes: 1 << 20 }
    }
}

/// Why no samples come.
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    /// No format has this name.
    #[error("unknown format {name:?}, expected criteo-tsv, avazu-csv or synthetic")]
    UnknownFormat {
        /// What came.
        name: String,
    },
    /// Nothing to read.
    #[error("no data file was given")]
    NoFiles,
    /// The file cannot be opened.
    #[error("{}: cannot be opened: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A directory stands where a file is expected.
    #[error("{}: expected a file, got a directory", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
    },
    /// Reading or decompressing failed.
    #[error("{}: cannot be read past line {line}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The last line that came whole.
        line: u64,
        /// What the system or the decompressor says; a truncated file is told here.
        source: io::Error,
    },
    /// More malformed lines than are borne.
    #[error("{}: line {line}: {reason}: more than {limit} malformed lines", path.display())]
    TooManyMalformed {
        /// The file.
        path: PathBuf,
        /// The line that was one too many.
        line: u64,
        /// What is wrong with it.
        reason: String,
        /// How many are skipped at most.
        limit: u64,
    },
    /// The schema names an input that the data does not have.
    #[error("{origin}: {input:?} of the schema is not a column, expected one of {columns}")]
    UnknownColumn {
        /// The format, or the file whose header was read.
        origin: String,
        /// The dense or categorical feature.
        input: String,
        /// What there is.
        columns: String,
    },
    /// A file with a header has another than the format allows.
    #[error("{}: header: {reason}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Files with labels and files without in one input.
    #[error("{}: {} labels, unlike the files before it", path.display(), if *labelled { "has" } else { "has no" })]
    MixedLabels {
        /// The file that differs.
        path: PathBuf,
        /// Whether it has labels.
        labelled: bool,
    },
    /// The description of a synthetic data set is wrong.
    #[error("synthetic data {text:?}: {reason}")]
    Synthetic {
        /// The description.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// Opens files, one after the other, as one reader of the schema's columns. Compression by gzip or
/// zstd is told by content. The first file is opened at once, the next when the one before ends.
///
/// # Errors
/// [`DatasetError`] when there is no file, the first cannot be opened, or the schema names columns
/// that the format does not have.
pub fn open(
    format: Format,
    paths: &[PathBuf],
    schema: &Schema,
    limits: Limits,
) -> Result<Box<dyn Reader + Send>, DatasetError> {
    if paths.is_empty() {
        return Err(DatasetError::NoFiles);
    }
    Ok(match format {
        Format::CriteoTsv => Box::new(criteo::open(paths, schema, limits)?),
        Format::AvazuCsv => Box::new(avazu::open(paths, schema, limits)?),
        Format::Synthetic => Box::new(synthetic::open(paths, schema)?),
    })
}
