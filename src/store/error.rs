//! Why a version cannot be used, read or written.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::BadRow;
use super::format::{Checksum, FormatError};
use crate::mem::OutOfHostMemory;
use crate::types::{TableId, Version};

/// A version that cannot be used, and why.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Refusal {
    pub version: Version,
    pub reason: StoreError,
}

/// Why a version could not be read or written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages document the variants
pub enum StoreError {
    #[error("{what} name {name:?}: {reason}")]
    Name { what: &'static str, name: String, reason: &'static str },
    #[error("{}: no such directory", path.display())]
    MissingDirectory { path: PathBuf },
    #[error("{}: not a directory", path.display())]
    NotADirectory { path: PathBuf },
    #[error("{}: missing file", path.display())]
    MissingFile { path: PathBuf },
    #[error("{}: lists {file:?}, which is not a file of this schema", path.display())]
    UnexpectedFile { path: PathBuf, file: String },
    #[error(
        "{}: {}: expected {expected} bytes, got {got}",
        path.display(),
        if got < expected { "truncated" } else { "too long" }
    )]
    Size { path: PathBuf, expected: u64, got: u64 },
    #[error("{}: corrupt: expected checksum {expected}, got {got}", path.display())]
    Checksum { path: PathBuf, expected: Checksum, got: Checksum },
    #[error("{}: {source}", path.display())]
    Format { path: PathBuf, source: FormatError },
    #[error("{}: {reason}", path.display())]
    Schema { path: PathBuf, reason: String },
    #[error("{}: tensor {tensor:?}: expected {expected}, got {got}", path.display())]
    Tensor { path: PathBuf, tensor: String, expected: String, got: String },
    #[error("{}: {source}", path.display())]
    Row { path: PathBuf, source: BadRow },
    #[error("working table {}: {source}", table.0)]
    Working { table: TableId, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("number of tables: expected {expected}, got {got}")]
    Tables { expected: usize, got: usize },
    #[error("{}: made from version {base}, but the highest version is {highest}", path.display())]
    BaseOvertaken { path: PathBuf, base: Version, highest: Version },
    #[error("{}: base: expected the version before {version}, got {got}", path.display())]
    BaseNumber { path: PathBuf, version: Version, got: Version },
    #[error(
        "{}: base: expected version {base} with checksum {expected}, got checksum {got}", path.display()
    )]
    BaseDiffers { path: PathBuf, base: Version, expected: Checksum, got: Checksum },
    #[error("{}: its base, version {base}: {source}", path.display())]
    Base { path: PathBuf, base: Version, source: Box<StoreError> },
    #[error("{}: is being removed", path.display())]
    Removing { path: PathBuf },
    #[error("{}: damaged: {reason}", path.display())]
    Labels { path: PathBuf, reason: String },
    #[error(transparent)]
    Memory(#[from] OutOfHostMemory),
    #[error("not accepted: {reason}")]
    NotAccepted { reason: String },
    #[error("{}: disk full", path.display())]
    DiskFull { path: PathBuf },
    #[error("{}: permission denied", path.display())]
    Permission { path: PathBuf },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: no version number is left after {}", path.display(), u64::MAX)]
    NumbersExhausted { path: PathBuf },
    #[error("model {model:?}: no good version{}", List(refused))]
    NoGoodVersion { model: String, refused: Vec<Refusal> },
}

impl StoreError {
    /// The variant for a failed system call at `path`.
    pub(crate) fn at(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull { path },
            io::ErrorKind::PermissionDenied => Self::Permission { path },
            io::ErrorKind::NotADirectory => Self::NotADirectory { path },
            _ => Self::Io { path, source },
        }
    }

    /// Whether the cause may end although no file changes: the system had no memory or no free descriptor, or
    /// could not read.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Self::Memory(_) | Self::Io { .. } | Self::Permission { .. } => true,
            Self::Removing { .. } => true,
            Self::Base { source, .. } => source.may_pass(),
            Self::NoGoodVersion { refused, .. } => refused.iter().any(|refusal| refusal.reason.may_pass()),
            _ => false,
        }
    }
}

/// Formats as `: version 3: reason; version 2: reason`, or `: it has no versions`.
struct List<'a>(&'a [Refusal]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str(": it has no versions");
        }
        for (i, Refusal { version, reason }) in self.0.iter().enumerate() {
            write!(f, "{} version {version}: {reason}", if i == 0 { ":" } else { ";" })?;
        }
        Ok(())
    }
}
