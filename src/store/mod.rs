//! The embedding store: a model's versions on disk and the rows of one version in reach.
//!
//! A version is a directory that is written aside, synced, and renamed into place, and never
//! changed again ([`write()`]); reading one ([`snapshot`]) checks every byte against its manifest and
//! then serves rows from the mapped files. So a crash at any instant leaves the versions that
//! were there, and a damaged one is refused by name while the one before it serves. [`mod@format`]
//! draws the bytes, [`table`] holds rows, [`hot_rows`] keeps what a cache held, and `disk` is the handful of
//! calls that must reach the disk, so that tests can make each of them fail.
//!
//! Tables that are larger than memory are trained in a working file ([`crate::rowlog`]).

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::mem::{HostMemory, OutOfHostMemory};
use crate::types::{TableId, Version};

pub(crate) mod atomic_write;
mod contents;
#[cfg(test)]
mod crash;
pub(crate) mod disk;
pub mod format;
pub mod hot_rows;
pub(crate) mod snapshot;
pub(crate) mod table;
mod write;

pub use contents::{Contents, DenseTensor, Rows};
pub use snapshot::{Dense, Latest, Opened, models, open, open_latest, open_latest_with, versions};
pub use table::{BadRow, EncodeError, PlainMemory, State, Table, rows_of};
pub use write::write;

use crate::rowlog::WorkingError;
use format::{Checksum, FormatError};

/// All rows of one version of a model.
#[derive(Debug)]
pub struct EmbeddingStore {
    version: Version,
    tables: Vec<Table>,
    /// Whether reading a row may mean to wait for the disk.
    on_disk: bool,
}

impl EmbeddingStore {
    /// A store of these tables, which stand in the schema's order.
    #[must_use]
    pub fn new(version: Version, tables: Vec<Table>) -> Self {
        Self { version, tables, on_disk: false }
    }

    /// The version whose rows these are.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The tables, in the schema's order.
    #[must_use]
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// The table; `None` when the schema has none of this number.
    #[must_use]
    pub fn table(&self, table: TableId) -> Option<&Table> {
        self.tables.get(table.index())
    }

    /// One row's bytes; `None` when the table does not hold it.
    #[must_use]
    pub fn row(&self, table: TableId, id: u64) -> Option<&[u8]> {
        self.table(table)?.row(id)
    }

    /// Bytes of all rows and state.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tables.iter().map(Table::bytes).sum()
    }

    /// Bytes of all rows, without the state.
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        self.tables.iter().map(|table| table.as_bytes().len() as u64).sum()
    }

    /// Prepares for rows of mapped files that are not in memory and will be read here and there: the system is
    /// told not to read their neighbours too, and [`Self::fetch`] asks for rows from now on.
    pub fn expect_disk(&mut self) {
        self.on_disk = true;
        self.tables.iter().for_each(Table::expect_random_reads);
    }

    /// Asks the disk for all these rows at once, and does not wait: who reads them after this waits for the
    /// slowest, and not for one after the other. Does nothing unless rows are expected on disk.
    pub fn fetch(&self, rows: impl IntoIterator<Item = (TableId, u64)>) {
        if self.on_disk {
            rows.into_iter().for_each(|(table, id)| self.table(table).into_iter().for_each(|t| t.fetch(id)));
        }
    }

    /// Reads every page of every row once, so that no request waits for the disk.
    pub fn prefault(&self) {
        self.tables.iter().for_each(Table::prefault);
    }

    /// The rows in memory of their own, without the state: what a server reads.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the memory is not to be had.
    pub(crate) fn rows_copied(&self, memory: &dyn HostMemory) -> Result<Self, OutOfHostMemory> {
        let tables = self.tables.iter().map(|table| table.rows_copied(memory)).collect::<Result<_, _>>()?;
        Ok(Self { version: self.version, tables, on_disk: false })
    }

    /// The same rows and state in memory of their own: the store's RAM tier.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the memory is not to be had.
    pub fn copied(&self, memory: &dyn HostMemory) -> Result<Self, OutOfHostMemory> {
        let tables = self.tables.iter().map(|table| table.copied(memory)).collect::<Result<_, _>>()?;
        Ok(Self { version: self.version, tables, on_disk: false })
    }

    /// The tables, to train on.
    #[must_use]
    pub fn into_tables(self) -> Vec<Table> {
        self.tables
    }
}

/// A version that was not good, and why.
#[derive(Debug)]
pub struct Refusal {
    /// Which one.
    pub version: Version,
    /// What is wrong with it.
    pub reason: StoreError,
}

/// Why a version could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A name that cannot be a directory or file of a model.
    #[error("{what} name {name:?}: {reason}")]
    Name {
        /// What it was to name.
        what: &'static str,
        /// What came.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A directory that must be there is not.
    #[error("{}: no such directory", path.display())]
    MissingDirectory {
        /// Where it should be.
        path: PathBuf,
    },
    /// Something else stands where a directory must be.
    #[error("{}: not a directory", path.display())]
    NotADirectory {
        /// Where it stands.
        path: PathBuf,
    },
    /// A file of a version that is not there, or that its manifest does not list.
    #[error("{}: missing file", path.display())]
    MissingFile {
        /// Where it should be.
        path: PathBuf,
    },
    /// A file in a manifest that the schema has no use for.
    #[error("{}: lists {file:?}, which is no file of this schema", path.display())]
    UnexpectedFile {
        /// The manifest.
        path: PathBuf,
        /// The file it lists.
        file: String,
    },
    /// A file that is cut short, or too long.
    #[error("{}: {}: expected {expected} bytes, got {got}", path.display(), if got < expected { "truncated" } else { "too long" })]
    Size {
        /// The file.
        path: PathBuf,
        /// The manifest's word.
        expected: u64,
        /// Its length.
        got: u64,
    },
    /// A file whose bytes are not those that were written.
    #[error("{}: corrupt: expected checksum {expected}, got {got}", path.display())]
    Checksum {
        /// The file.
        path: PathBuf,
        /// The manifest's word.
        expected: Checksum,
        /// Its checksum.
        got: Checksum,
    },
    /// A manifest or a tensor file's header that is not of the format.
    #[error("{}: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: FormatError,
    },
    /// A schema that does not parse.
    #[error("{}: {reason}", path.display())]
    Schema {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        reason: String,
    },
    /// A tensor that is missing, too many, or of the wrong shape, read or to be written.
    #[error("{}: tensor {tensor:?}: expected {expected}, got {got}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// What the schema asks for.
        expected: String,
        /// What there is.
        got: String,
    },
    /// A row that the element type of its table's version cannot hold.
    #[error("{}: {source}", path.display())]
    Row {
        /// The table's file.
        path: PathBuf,
        /// Which row, and what is wrong with it.
        source: BadRow,
    },
    /// A working file that cannot be made of a table, or asked for its rows.
    #[error("working table {}: {source}", table.0)]
    Working {
        /// Which one, in the file's order.
        table: TableId,
        /// What is wrong.
        source: WorkingError,
    },
    /// Contents that do not have one table for each of the schema's.
    #[error("tables: expected {expected}, got {got}")]
    Tables {
        /// How many the schema has.
        expected: usize,
        /// How many came.
        got: usize,
    },
    /// A version that the caller of [`open_latest_with`] would not have.
    #[error("not accepted: {reason}")]
    NotAccepted {
        /// The caller's reason.
        reason: String,
    },
    /// The disk has no room. What was there before is untouched.
    #[error("{}: disk full", path.display())]
    DiskFull {
        /// What was being written.
        path: PathBuf,
    },
    /// The system does not let us.
    #[error("{}: permission denied", path.display())]
    Permission {
        /// What was being read or written.
        path: PathBuf,
    },
    /// Any other failure of the system.
    #[error("{}: {source}", path.display())]
    Io {
        /// What was being read or written.
        path: PathBuf,
        /// The system's word.
        source: io::Error,
    },
    /// The highest version has the last number there is.
    #[error("{}: no version number is left after {}", path.display(), u64::MAX)]
    NumbersExhausted {
        /// The model's directory.
        path: PathBuf,
    },
    /// A model without one version that can be used.
    #[error("model {model:?}: no good version{}", List(refused))]
    NoGoodVersion {
        /// The model's name.
        model: String,
        /// Every version there is, highest first.
        refused: Vec<Refusal>,
    },
}

impl StoreError {
    /// What a failure of the system at `path` means.
    pub(crate) fn at(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull { path },
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Self::Permission { path },
            io::ErrorKind::NotADirectory => Self::NotADirectory { path },
            _ => Self::Io { path, source },
        }
    }
}

/// `: version 3: reason; version 2: reason`, or that there is none.
struct List<'a>(&'a [Refusal]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str(": it has none");
        }
        for (i, Refusal { version, reason }) in self.0.iter().enumerate() {
            write!(f, "{} version {version}: {reason}", if i == 0 { ":" } else { ";" })?;
        }
        Ok(())
    }
}

/// Whether `name` may name `what`: names become names of directories and files, so they may not lead
/// anywhere else.
///
/// # Errors
/// [`StoreError::Name`] with what is wrong with it.
pub(crate) fn check_name(what: &'static str, name: &str) -> Result<(), StoreError> {
    let reason = match name {
        "" => "is empty",
        _ if name.len() > 128 => "is longer than 128 bytes",
        _ if name.starts_with('.') => "starts with a dot",
        _ if name.contains(['/', '\\']) => "has a path separator",
        _ if name.chars().any(char::is_control) => "has a control character",
        _ => return Ok(()),
    };
    Err(StoreError::Name { what, name: name.to_owned(), reason })
}
