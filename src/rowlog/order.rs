//! An order of a table's rows, frequent rows first, so that records that are read and written together are
//! adjacent (Fang and others, "A frequency-aware software cache for large recommendation system embeddings",
//! 2022, section 4).
//!
//! An order is a permutation, given by a ranked list of some rows: the row at index `i` of the list has place
//! `i`, and all other rows follow in ascending order. Memory grows with the list and not with the table,
//! because the place of any other row is its number plus the number of ranked rows above it.
//!
//! **The file** is `models/<model>/state/order.safetensors`; `docs/file-formats.md` (Order) lists its tensors
//! and metadata. The order only affects where a process puts rows in its own working file, so any valid file
//! gives correct results.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};

use crate::store::disk::{Disk, SystemDisk};
use crate::store::{StoreError, atomic_write};

/// The name of the file in the state directory of a model.
pub(crate) const FILE: &str = "order.safetensors";

const FORMAT: &str = "flechette-order";
const VERSION: &str = "1";
/// Ranked rows per bucket, if they are spread evenly.
const BUCKET: usize = 8;
/// Bytes written at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// A permutation of the rows of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowOrder {
    rows: u64,
    /// The ranked rows, ascending.
    ranked: Vec<u64>,
    /// The place of each ranked row.
    places: Vec<u64>,
    /// The index in `ranked` at which each bucket begins, and at which the last one ends. A bucket holds the
    /// rows with the same high bits. A binary search in all of `ranked` would miss the processor's cache at
    /// every step.
    begins: Vec<usize>,
    /// Bits of a row number within its bucket.
    shift: u32,
}

/// Why a ranked list is not an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages document the variants
pub enum OrderError {
    #[error("expected a row below {rows}, got {row}")]
    PastEnd { row: u64, rows: u64 },
    #[error("expected distinct rows, got {row} twice")]
    Twice { row: u64 },
}

impl RowOrder {
    /// The order of `rows` rows that begins with `ranked`. It takes 16 bytes and a little more per ranked
    /// row.
    ///
    /// # Errors
    /// [`OrderError`] for a row that is past the table or listed twice.
    pub fn hottest_first(rows: u64, ranked: &[u64]) -> Result<Self, OrderError> {
        let mut pairs: Vec<(u64, u64)> = ranked.iter().copied().zip(0..).collect();
        pairs.sort_unstable();
        if let Some(&(row, _)) = pairs.last().filter(|&&(row, _)| row >= rows) {
            return Err(OrderError::PastEnd { row, rows });
        }
        if let Some(two) = pairs.windows(2).find(|two| two[0].0 == two[1].0) {
            return Err(OrderError::Twice { row: two[0].0 });
        }
        let (ranked, places): (Vec<u64>, Vec<u64>) = pairs.into_iter().unzip();
        let buckets = (ranked.len() / BUCKET) as u64 + 1;
        let shift = (0..u64::BITS - 1).find(|&shift| rows >> shift <= buckets).unwrap_or(u64::BITS - 1);
        let begins = (0..=(rows >> shift) + 1).map(|bucket| ranked.partition_point(|r| r >> shift < bucket));
        let begins = begins.collect();
        Ok(Self { rows, ranked, places, begins, shift })
    }

    /// Rows of the table.
    #[must_use]
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// The place of a row among the records of the table, from 0. The place of a row past the end is its
    /// number.
    #[must_use]
    #[inline]
    pub(crate) fn place(&self, row: u64) -> u64 {
        // For a row past the end this is the last bucket. All ranked rows are below that row, so the result
        // is its number.
        let bucket = (row.min(self.rows) >> self.shift) as usize;
        let (begin, end) = (self.begins[bucket], self.begins[bucket + 1]);
        match self.ranked[begin..end].binary_search(&row) {
            Ok(at) => self.places[begin + at],
            Err(at) => self.ranked.len() as u64 + (row - (begin + at) as u64),
        }
    }

    /// The ranked rows, by place.
    #[must_use]
    pub(crate) fn ranked(&self) -> Vec<u64> {
        let mut ranked = vec![0; self.ranked.len()];
        self.ranked.iter().zip(&self.places).for_each(|(&row, &place)| ranked[place as usize] = row);
        ranked
    }
}

#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages document the variants
pub(crate) enum OrderFileError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{}: {source}", path.display())]
    Form { path: PathBuf, source: FormError },
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub(crate) struct FormError {
    /// The metadata key or the tensor.
    pub field: String,
    /// What was expected and what was found.
    pub reason: String,
}

impl FormError {
    fn new(field: impl Into<String>, reason: impl ToString) -> Self {
        Self { field: field.into(), reason: reason.to_string() }
    }
}

/// Replaces the file at `path` by one with these orders, each under the name of its table
/// ([`crate::store::atomic_write`]). The directory is made if needed.
///
/// # Errors
/// [`OrderFileError`] for a name that is used twice or is `__metadata__`, and for errors of the file system.
/// The old file is then unchanged, unless only the last sync failed: then the new file is in place.
pub(crate) fn write_orders(path: &Path, orders: &[(&str, &RowOrder)]) -> Result<(), OrderFileError> {
    write_on(&SystemDisk, path, orders)
}

pub(crate) fn write_on(
    disk: &dyn Disk,
    path: &Path,
    orders: &[(&str, &RowOrder)],
) -> Result<(), OrderFileError> {
    let bytes = encode(orders).map_err(|source| OrderFileError::Form { path: path.to_owned(), source })?;
    atomic_write::replace(disk, path, |file, path| {
        bytes.chunks(CHUNK_BYTES).try_for_each(|chunk| disk.append(file, path, chunk))
    })?;
    Ok(())
}

/// Reads the orders of a model's tables, by table name; `None` if there is no file.
///
/// # Errors
/// [`OrderFileError`] when the file cannot be read or is malformed.
pub(crate) fn read_orders(path: &Path) -> Result<Option<BTreeMap<String, RowOrder>>, OrderFileError> {
    let at = |e| StoreError::at(path, e);
    let mut file = match crate::store::bytes::open_regular(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(at)?,
    };
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut file, &mut bytes).map_err(at)?;
    parse(&bytes).map(Some).map_err(|source| OrderFileError::Form { path: path.to_owned(), source })
}

fn encode(orders: &[(&str, &RowOrder)]) -> Result<Vec<u8>, FormError> {
    let about = [("format", FORMAT), ("version", VERSION)];
    let mut about: HashMap<_, _> = about.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let mut tensors = Vec::new();
    for &(name, order) in orders {
        if name == "__metadata__" || about.insert(rows_key(name), order.rows.to_string()).is_some() {
            return Err(FormError::new(field_of(name), "name is used twice or reserved"));
        }
        let bytes: Vec<u8> = order.ranked().iter().flat_map(|row| row.to_le_bytes()).collect();
        tensors.push((name, order.ranked.len(), bytes));
    }
    let view = |(name, len, bytes)| match TensorView::new(Dtype::U64, vec![len], bytes) {
        Ok(view) => Ok((name, view)),
        Err(error) => Err(FormError::new(field_of(name), error)),
    };
    let views = tensors.iter().map(|(name, len, bytes)| view((*name, *len, bytes.as_slice())));
    let views = views.collect::<Result<Vec<_>, _>>()?;
    serialize(views, Some(about)).map_err(|error| FormError::new("header", error))
}

fn parse(bytes: &[u8]) -> Result<BTreeMap<String, RowOrder>, FormError> {
    let foreign = |error| FormError::new("header", format!("not a safetensors file: {error}"));
    let (_, about) = SafeTensors::read_metadata(bytes).map_err(foreign)?;
    let tensors = SafeTensors::deserialize(bytes).map_err(foreign)?;
    let about = about.metadata().clone().unwrap_or_default();
    for (key, expected) in [("format", FORMAT), ("version", VERSION)] {
        let got = about.get(key).map_or("", String::as_str);
        if got != expected {
            return Err(FormError::new(key, format!("expected {expected:?}, got {got:?}")));
        }
    }
    let order = |(name, view): (String, TensorView<'_>)| {
        let wrong = |reason: String| FormError::new(field_of(&name), reason);
        if view.dtype() != Dtype::U64 || view.shape().len() != 1 {
            let (got, shape) = (view.dtype(), view.shape());
            return Err(wrong(format!("expected U64 of one dimension, got {got:?} of {shape:?}")));
        }
        let key = rows_key(&name);
        let got = about.get(&key).map_or("", String::as_str);
        let rows = got.parse();
        let rows = rows.map_err(|_| FormError::new(&key, format!("expected a number, got {got:?}")))?;
        let ranked: Vec<u64> = view.data().as_chunks().0.iter().map(|row| u64::from_le_bytes(*row)).collect();
        let order = RowOrder::hottest_first(rows, &ranked).map_err(|error| wrong(error.to_string()))?;
        Ok((name, order))
    };
    tensors.tensors().into_iter().map(order).collect()
}

fn rows_key(table: &str) -> String {
    format!("rows.{table}")
}

fn field_of(table: &str) -> String {
    format!("tensor {table:?}")
}

#[cfg(test)]
mod tests;
