//! Which rows a server's cache held, the hottest first, kept for its next start.
//!
//! They lie in `models/<model>/state/hot_rows.flhot`, by the names of their tables and their numbers in them,
//! so that any version of the model can be warmed with them. A file is written aside, synced and renamed
//! over the one before: a crash leaves the old one or the new one, whole.
//!
//! **The file**, all numbers little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `FLHOTROW` |
//! | 4 | version of the format, 1 |
//! | 4 | number of tables T, at most [`MAX_TABLES`] |
//! | 8 | number of rows R, at most [`MAX_ROWS`] |
//! | T times 2 + n | a table's name: its length n in bytes, then UTF-8 |
//! | R times 4 + 8 | a row, the hottest first: its table's place among the names from 0, then its number |
//! | 16 | XXH3-128 of all bytes before |
//!
//! Nothing of it is trusted: whoever reads it looks each name and number up in the version it serves.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::disk::{Disk, SystemDisk};
use super::{StoreError, atomic_write};

/// Where a model's hot rows, counts and traces lie, beside its versions.
pub(crate) const STATE: &str = "state";
/// The file's name there.
pub(crate) const FILE: &str = "hot_rows.flhot";

/// Most tables of a file.
pub(crate) const MAX_TABLES: usize = 1 << 16;
/// Most rows of a file: of a cache that holds more, the hottest are saved.
pub(crate) const MAX_ROWS: usize = 1 << 24;

const MAGIC: &[u8; 8] = b"FLHOTROW";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 24;
const ROW_BYTES: usize = 12;
const SUM_BYTES: usize = 16;
/// Most bytes of a name, by its length's field.
const MAX_NAME_BYTES: usize = u16::MAX as usize;
const MAX_BYTES: u64 =
    (HEAD_BYTES + MAX_TABLES * (2 + MAX_NAME_BYTES) + MAX_ROWS * ROW_BYTES + SUM_BYTES) as u64;
/// Bytes written at a time.
const CHUNK_BYTES: usize = 1 << 16;

/// Rows by their tables' names, the hottest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HotRows {
    /// The names of tables.
    pub tables: Vec<String>,
    /// Each row's table, by its place in `tables`, and its number.
    pub rows: Vec<(u32, u64)>,
}

/// Why there are no hot rows to be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HotRowsError {
    /// The system's refusal.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A file that is not of the format.
    #[error("{}: {source}", path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: FormError,
    },
}

/// What is wrong with the bytes of a file.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum FormError {
    /// Another kind of file.
    #[error("no hot rows: expected the file to begin with FLHOTROW")]
    Foreign,
    /// A format of another time.
    #[error("format version: expected {VERSION}, got {got}")]
    Version {
        /// What it says.
        got: u32,
    },
    /// A count past its limit.
    #[error("{what}: expected at most {limit}, got {got}")]
    Limit {
        /// What is counted.
        what: &'static str,
        /// The count.
        got: u64,
        /// Its limit.
        limit: u64,
    },
    /// A file that is cut short, or too long.
    #[error("damaged: expected {expected} bytes, got {got}")]
    Size {
        /// By its counts; at least, where it ends before all of them.
        expected: u64,
        /// Its length.
        got: u64,
    },
    /// Bytes that are not those that were written.
    #[error("damaged: the checksum is another")]
    Checksum,
    /// A name that is no text.
    #[error("name of table {table}: not UTF-8")]
    Name {
        /// Its place.
        table: usize,
    },
    /// A row of no table.
    #[error("row {row}: expected a table below {tables}, got {got}")]
    Table {
        /// Its place.
        row: usize,
        /// Its table.
        got: u32,
        /// How many there are.
        tables: usize,
    },
}

impl HotRows {
    /// What the bytes of a file say.
    ///
    /// # Errors
    /// [`FormError`] for bytes that [`HotRows::save`] would not have written.
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
            pair => Ok(pair),
        };
        Ok(Self {
            tables: names.into_iter().enumerate().map(name).collect::<Result<_, _>>()?,
            rows: rest.as_chunks().0.iter().enumerate().map(row).collect::<Result<_, _>>()?,
        })
    }

    /// The hot rows of a model; `None` where none were saved.
    ///
    /// # Errors
    /// [`HotRowsError`] naming the file, where it is there and is none of these or cannot be read.
    pub(crate) fn load(models: &Path, name: &str) -> Result<Option<Self>, HotRowsError> {
        let path = path(models, name);
        let at = |e| StoreError::at(&path, e);
        let file = match super::table::open_regular(&path) {
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

    /// Puts these in the place of the model's hot rows; past [`MAX_ROWS`] the coldest are left out. The
    /// model's directory is there; that of its state is made.
    ///
    /// # Errors
    /// [`StoreError`]; the file before is untouched then, unless only the last sync failed.
    pub fn save(&self, models: &Path, name: &str) -> Result<(), StoreError> {
        self.save_on(&SystemDisk, models, name)
    }

    pub(crate) fn save_on(&self, disk: &dyn Disk, models: &Path, name: &str) -> Result<(), StoreError> {
        atomic_write::replace(disk, &path(models, name), |file, atomic_write| {
            self.write(disk, file, atomic_write)
        })
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
            for (table, row) in rows {
                chunk.extend_from_slice(&table.to_le_bytes());
                chunk.extend_from_slice(&row.to_le_bytes());
            }
            put(file, &chunk)?;
        }
        disk.append(file, path, &hash.digest128().to_le_bytes())
    }

    /// All before the rows.
    fn head(&self, rows: usize) -> io::Result<Vec<u8>> {
        let past =
            |what: &str| io::Error::new(io::ErrorKind::InvalidInput, format!("{what}: past the limit"));
        if self.tables.len() > MAX_TABLES {
            return Err(past("number of tables"));
        }
        let mut head = MAGIC.to_vec();
        head.extend_from_slice(&VERSION.to_le_bytes());
        head.extend_from_slice(&(self.tables.len() as u32).to_le_bytes());
        head.extend_from_slice(&(rows as u64).to_le_bytes());
        for name in &self.tables {
            let bytes = u16::try_from(name.len()).map_err(|_| past("a table's name"))?;
            head.extend_from_slice(&bytes.to_le_bytes());
            head.extend_from_slice(name.as_bytes());
        }
        Ok(head)
    }
}

fn path(models: &Path, name: &str) -> PathBuf {
    models.join(name).join(STATE).join(FILE)
}

/// So many names, and what comes after them.
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
