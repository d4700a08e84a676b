//! The order in which a table's records lie, the frequent rows first, so that what is read and written
//! together lies together (frequency-aware cache, section 4: reordering by rank).
//!
//! An order is a permutation, made of a ranked list of some rows: ranked row `i` has place `i`, and all
//! others follow in their own order. So it costs memory by the ranked rows, and not by all: the place of
//! any other row is its number, past the ranked rows and less those of them below it.
//!
//! **The file**, `models/<model>/state/order.safetensors`: for each table a tensor of its name, u64 of one
//! dimension, which holds its ranked rows by place. Its metadata are `format = "flechette-order"`,
//! `version = "1"`, and `rows.<table>`, the number of the table's rows. It says only where records lie in files
//! that a process makes for itself, so that any file of this form is as right as another.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};

use crate::store::disk::{Disk, SystemDisk};
use crate::store::{StoreError, atomic_write};

/// The file's name in a model's directory of state.
pub(crate) const FILE: &str = "order.safetensors";

const FORMAT: &str = "flechette-order";
const VERSION: &str = "1";
/// Ranked rows of a bucket, where they are spread evenly.
const BUCKET: usize = 8;
/// Bytes written at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// A permutation of a table's rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowOrder {
    rows: u64,
    /// The ranked rows, ascending.
    ranked: Vec<u64>,
    /// The place of each.
    places: Vec<u64>,
    /// Rows fall into buckets by their high bits. This is where in `ranked` each begins and the last one ends: a
    /// search through all of them would miss the processor's cache at every step.
    begins: Vec<usize>,
    /// Bits of a row within its bucket.
    shift: u32,
}

/// Why a ranked list makes no order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// No row of the table.
    #[error("expected a row below {rows}, got {row}")]
    PastEnd {
        /// The row.
        row: u64,
        /// How many there are.
        rows: u64,
    },
    /// A row that comes again.
    #[error("expected distinct rows, got {row} twice")]
    Twice {
        /// The row.
        row: u64,
    },
}

impl RowOrder {
    /// The order of a table of `rows` rows in which those of `ranked` come first, as they are there. It takes
    /// 16 bytes and a little more for each of them.
    ///
    /// # Errors
    /// [`OrderError`] for a row that is not of the table, or comes twice.
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

    /// How many rows the table has.
    #[must_use]
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// The place of a row among the table's records, from 0. A row past the end is its own.
    #[must_use]
    #[inline]
    pub(crate) fn place(&self, row: u64) -> u64 {
        // A row past the end finds no ranked row above it in the last bucket either.
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

    /// Bytes of memory.
    #[must_use]
    pub(crate) fn memory_bytes(&self) -> u64 {
        let words = self.ranked.capacity() + self.places.capacity() + self.begins.capacity();
        (words * size_of::<u64>()) as u64
    }
}

/// Why orders cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum OrderFileError {
    /// The system's refusal.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A file that is not of the form, or orders that none of the form can hold.
    #[error("{}: {source}", path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: FormError,
    },
}

/// What is wrong with a file of orders.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct FormError {
    /// Where: the metadata or the tensor.
    pub field: String,
    /// What was expected, and what was got.
    pub reason: String,
}

impl FormError {
    fn new(field: impl Into<String>, reason: impl ToString) -> Self {
        Self { field: field.into(), reason: reason.to_string() }
    }
}

/// Writes the orders of a model's tables, each by the table's name, in the place of the file at `path`:
/// aside, synced and renamed. The directory is made if need be.
///
/// # Errors
/// [`OrderFileError`] for a name that comes twice or is `__metadata__`, and for what the system refused; the
/// file before is untouched then, unless only the last sync failed.
pub fn write_orders(path: &Path, orders: &[(&str, &RowOrder)]) -> Result<(), OrderFileError> {
    write_on(&SystemDisk, path, orders)
}

pub(crate) fn write_on(
    disk: &dyn Disk,
    path: &Path,
    orders: &[(&str, &RowOrder)],
) -> Result<(), OrderFileError> {
    let bytes = encode(orders).map_err(|source| OrderFileError::Form { path: path.to_owned(), source })?;
    atomic_write::replace(disk, path, |file, atomic_write| {
        bytes.chunks(CHUNK_BYTES).try_for_each(|chunk| disk.append(file, atomic_write, chunk))
    })?;
    Ok(())
}

/// The orders of a model's tables, by the tables' names; `None` where there is no file.
///
/// # Errors
/// [`OrderFileError`] naming the file and its field, where it is not of the form or cannot be read.
pub fn read_orders(path: &Path) -> Result<Option<BTreeMap<String, RowOrder>>, OrderFileError> {
    let at = |e| StoreError::at(path, e);
    let mut file = match crate::store::table::open_regular(path) {
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
    let foreign = |error| FormError::new("header", format!("no safetensors file: {error}"));
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
