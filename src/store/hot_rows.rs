//! The rows that a server's cache held, hottest first, saved for warming the cache at its next start.
//!
//! The file `models/<model>/state/hot_rows.flhot` lists them by table name and row number, so that they can
//! warm the cache of any version. It is replaced atomically ([`super::atomic_write`]).
//!
//! `docs/file-formats.md` (Hot rows) draws it.
//!
//! The contents are not trusted: readers look up each name and number in the version that they serve.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::disk::{Disk, SystemDisk};
use super::{MAX_NAME_BYTES, StoreError, atomic_write};

/// Subdirectory of a model for hot rows, traces and the order of rows.
pub(crate) const STATE: &str = "state";
pub(crate) const FILE: &str = "hot_rows.flhot";

/// Most tables in a file.
pub(crate) const MAX_TABLES: usize = 1 << 16;
/// Most rows in a file. If a cache holds more, only the hottest are saved.
pub(crate) const MAX_ROWS: usize = 1 << 24;

const MAGIC: &[u8; 8] = b"FLHOTROW";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 24;
const ROW_BYTES: usize = 12;
const SUM_BYTES: usize = 16;
const MAX_BYTES: u64 =
    (HEAD_BYTES + MAX_TABLES * (2 + MAX_NAME_BYTES) + MAX_ROWS * ROW_BYTES + SUM_BYTES) as u64;
/// Bytes written at a time.
const CHUNK_BYTES: usize = 1 << 16;

/// Rows of named tables, hottest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) struct HotRows {
    pub tables: Vec<String>,
    pub rows: Vec<HotRow>,
}

/// A row of a named table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HotRow {
    /// The index of its table in [`HotRows::tables`].
    pub table: u32,
    pub row: u64,
}

/// Why hot rows cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HotRowsError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{}: {source}", path.display())]
    Form { path: PathBuf, source: FormError },
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum FormError {
    #[error("not a hot rows file: expected the file to begin with FLHOTROW")]
    Foreign,
    #[error("format version: expected {VERSION}, got {got}")]
    Version { got: u32 },
    #[error("{what}: expected at most {limit}, got {got}")]
    Limit { what: &'static str, got: u64, limit: u64 },
    #[error("damaged: expected {expected} bytes, got {got}")]
    Size { expected: u64, got: u64 },
    #[error("damaged: the checksum does not match")]
    Checksum,
    #[error("name of table {table}: not UTF-8")]
    Name { table: usize },
    #[error("row {row}: expected a table below {tables}, got {got}")]
    Table { row: usize, got: u32, tables: usize },
}

impl HotRows {
    /// Parses the bytes of a file.
    ///
    /// # Errors
    /// [`FormError`] for bytes that [`HotRows::save`] does not write.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, FormError> {
        let got = bytes.len() as u64;
        let short = |expected: usize| FormError::Size { expected: expected as u64, got };
        if bytes.get(..MAGIC.len()) != Some(MAGIC) {
            return Err(FormError::Foreign);
        }
        let head = bytes.first_chunk::<HEAD_BYTES>().ok_or(short(HEAD_BYTES + SUM_BYTES))?;
        let version = u32_at(head, 8);
        if version != VERSION {
            return Err(FormError::Version { got: version });
        }
        let tables = limited("tables", u32_at(head, 12).into(), MAX_TABLES)?;
        let rows = limited("rows", u64_at(head, 16), MAX_ROWS)?;
        let least = HEAD_BYTES + 2 * tables + rows * ROW_BYTES + SUM_BYTES;
        let (body, sum) = bytes.split_last_chunk::<SUM_BYTES>().ok_or(short(least))?;
        if bytes.len() < least {
            return Err(short(least));
        }
        if xxh3_128(body) != u128::from_le_bytes(*sum) {
            return Err(FormError::Checksum);
        }
        let (names, rest) = names(&body[HEAD_BYTES..], tables).ok_or(short(least))?;
        if rest.len() != rows * ROW_BYTES {
            let expected = bytes.len() - rest.len() + rows * ROW_BYTES;
            return Err(short(expected));
        }
        let name = |(table, name): (usize, &[u8])| {
            String::from_utf8(name.to_vec()).map_err(|_| FormError::Name { table })
        };
        let row = |(row, bytes): (usize, &[u8; ROW_BYTES])| match (u32_at(bytes, 0), u64_at(bytes, 4)) {
            (got, _) if got as usize >= tables => Err(FormError::Table { row, got, tables }),
            (table, row) => Ok(HotRow { table, row }),
        };
        Ok(Self {
            tables: names.into_iter().enumerate().map(name).collect::<Result<_, _>>()?,
            rows: rest.as_chunks().0.iter().enumerate().map(row).collect::<Result<_, _>>()?,
        })
    }

    /// Loads the hot rows of a model; `None` if none were saved.
    ///
    /// # Errors
    /// [`HotRowsError`] when the file cannot be read or is malformed.
    pub(crate) fn load(models: &Path, name: &str) -> Result<Option<Self>, HotRowsError> {
        let path = path(models, name);
        let at = |e| StoreError::at(&path, e);
        let file = match super::bytes::open_regular(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(at)?,
        };
        let bytes = file.metadata().map_err(at)?.len();
        let form = |source| HotRowsError::Form { path: path.clone(), source };
        if bytes > MAX_BYTES {
            return Err(form(FormError::Limit { what: "bytes", got: bytes, limit: MAX_BYTES }));
        }
        let mut content = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut content).map_err(at)?;
        Self::parse(&content).map(Some).map_err(form)
    }

    /// Replaces the saved hot rows of a model with the first [`MAX_ROWS`] of these. The directory of the
    /// model must exist.
    ///
    /// # Errors
    /// [`StoreError`]. The old file is then unchanged, unless only the last sync failed: then the new file
    /// is in place.
    pub(crate) fn save(&self, models: &Path, name: &str) -> Result<(), StoreError> {
        self.save_on(&SystemDisk, models, name)
    }

    pub(crate) fn save_on(&self, disk: &dyn Disk, models: &Path, name: &str) -> Result<(), StoreError> {
        atomic_write::replace(disk, &path(models, name), |file, path| self.write(disk, file, path))
    }

    fn write(&self, disk: &dyn Disk, file: &mut File, path: &Path) -> io::Result<()> {
        let mut hash = Xxh3::new();
        let mut put = |file: &mut File, bytes: &[u8]| {
            hash.update(bytes);
            disk.append(file, path, bytes)
        };
        let rows = &self.rows[..self.rows.len().min(MAX_ROWS)];
        put(file, &self.head(rows.len())?)?;
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        for rows in rows.chunks(CHUNK_BYTES / ROW_BYTES) {
            chunk.clear();
            for HotRow { table, row } in rows {
                chunk.extend_from_slice(&table.to_le_bytes());
                chunk.extend_from_slice(&row.to_le_bytes());
            }
            put(file, &chunk)?;
        }
        disk.append(file, path, &hash.digest128().to_le_bytes())
    }

    /// The bytes before the rows: the numbers and the names of the tables.
    fn head(&self, rows: usize) -> io::Result<Vec<u8>> {
        let too_large =
            |what: &str| io::Error::new(io::ErrorKind::InvalidInput, format!("{what} exceeds the limit"));
        if self.tables.len() > MAX_TABLES {
            return Err(too_large("the number of tables"));
        }
        let mut head = MAGIC.to_vec();
        head.extend_from_slice(&VERSION.to_le_bytes());
        head.extend_from_slice(&(self.tables.len() as u32).to_le_bytes());
        head.extend_from_slice(&(rows as u64).to_le_bytes());
        for name in &self.tables {
            let bytes = u16::try_from(name.len()).map_err(|_| too_large("the name of a table"))?;
            head.extend_from_slice(&bytes.to_le_bytes());
            head.extend_from_slice(name.as_bytes());
        }
        Ok(head)
    }
}

fn path(models: &Path, name: &str) -> PathBuf {
    models.join(name).join(STATE).join(FILE)
}

/// Splits off the names of `tables` tables, and returns what follows them.
fn names(mut bytes: &[u8], tables: usize) -> Option<(Vec<&[u8]>, &[u8])> {
    let mut names = Vec::with_capacity(tables);
    for _ in 0..tables {
        let (length, rest) = bytes.split_first_chunk()?;
        let (name, rest) = rest.split_at_checked(u16::from_le_bytes(*length).into())?;
        names.push(name);
        bytes = rest;
    }
    Some((names, bytes))
}

fn limited(what: &'static str, got: u64, limit: usize) -> Result<usize, FormError> {
    match usize::try_from(got) {
        Ok(count) if count <= limit => Ok(count),
        _ => Err(FormError::Limit { what, got, limit: limit as u64 }),
    }
}

fn u32_at<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u64_at<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

#[cfg(test)]
mod tests;
