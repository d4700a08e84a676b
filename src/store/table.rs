//! One embedding table: its rows and the optimizer state of each row, in memory or in a mapped file.
//!
//! Rows are numbered from 0 and stored end to end, so the offset of a row is one multiplication, and a
//! version is served from its mapped file without a copy. A table in training holds f32. A table of a version
//! may hold another element type; its rows were encoded when the version was written and are read-only.

use std::any::Any;
use std::hint::black_box;
use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

use super::bytes::Bytes;
use crate::mem::{HostMemory, OutOfHostMemory, fold};
use crate::schema::{self, Lookup, Schema};
use crate::types::{Batch, Element, RowError};

const PAGE_BYTES: usize = 4096;
/// Elements that one thread encodes at a time.
const CHUNK_ELEMENTS: usize = 1 << 16;

/// `rows x dim` elements of one type, and `rows x width` f32 for each kind of optimizer state.
#[derive(Debug)]
pub struct Table {
    rows: u64,
    dim: usize,
    element: Element,
    /// Rows end to end, each of `element.row_bytes(dim)` bytes; aligned for f32 if that is the element type.
    weight: Bytes,
    states: Vec<State>,
}

/// The first row of a table that the element type cannot hold.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("row {row}: {reason}")]
#[allow(missing_docs)]
pub struct BadRow {
    pub row: u64,
    pub reason: RowError,
}

/// One kind of optimizer state: `rows x width` f32.
#[derive(Debug)]
pub struct State {
    name: String,
    width: usize,
    data: Bytes,
}

impl State {
    /// `data` has `width` elements per row.
    #[must_use]
    pub(crate) fn new(name: impl Into<String>, width: usize, data: Bytes) -> Self {
        Self { name: name.into(), width, data }
    }

    /// PyTorch's name: `sum`, `exp_avg`, ...
    #[must_use]
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Elements per row: the table's dim or 1.
    #[must_use]
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// The state of all rows, end to end.
    #[must_use]
    pub(crate) fn as_slice(&self) -> &[f32] {
        self.data.floats()
    }

    /// `None` for a mapped file.
    pub fn rows_mut(&mut self) -> Option<&mut [f32]> {
        self.data.floats_mut()
    }
}

impl Table {
    /// A table of f32 zeros with zeroed states, each given as its name and its elements per row.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when an allocation fails.
    pub fn zeroed(
        memory: &dyn HostMemory,
        rows: u64,
        dim: usize,
        states: &[(&str, usize)],
    ) -> Result<Self, OutOfHostMemory> {
        let take = |width: usize| {
            let elements = usize::try_from(rows).ok().and_then(|rows| rows.checked_mul(width));
            let bytes = elements.and_then(|elements| elements.checked_mul(size_of::<f32>()));
            Bytes::zeroed(memory, bytes.ok_or(OutOfHostMemory { bytes: usize::MAX })?)
        };
        let weight = take(dim)?;
        let state = |&(name, width): &(&str, usize)| Ok(State::new(name, width, take(width)?));
        let states = states.iter().map(state).collect::<Result<_, _>>()?;
        Ok(Self { rows, dim, element: Element::F32, weight, states })
    }

    /// The table that the schema declares, with these rows and states. `None` when the length of one of them
    /// does not fit the declared number of rows, or f32 rows are not aligned.
    #[must_use]
    pub(crate) fn from_parts(declared: &schema::Table, weight: Bytes, states: Vec<State>) -> Option<Self> {
        let (rows, &schema::Table { dim, element, .. }) = (declared.stored_rows(), declared);
        let fits = |width: usize, length: usize| {
            usize::try_from(rows).ok()?.checked_mul(width).filter(|&n| n == length)
        };
        fits(element.row_bytes(dim), weight.as_slice().len())?;
        if element == Element::F32 {
            bytemuck::try_cast_slice::<u8, f32>(weight.as_slice()).ok()?;
        }
        states.iter().try_for_each(|state| fits(state.width, state.as_slice().len()).map(|_| ()))?;
        Some(Self { rows, dim, element, weight, states })
    }

    /// A copy of the rows in another element type, without optimizer state. Rows that are not f32 are decoded
    /// first.
    ///
    /// # Errors
    /// [`EncodeError`] for a row that the type cannot hold, and when the allocation fails.
    pub fn encoded(&self, element: Element, memory: &dyn HostMemory) -> Result<Self, EncodeError> {
        let row_bytes = element.row_bytes(self.dim);
        let bytes = usize::try_from(self.rows).ok().and_then(|rows| rows.checked_mul(row_bytes));
        let mut weight = Bytes::zeroed(memory, bytes.ok_or(OutOfHostMemory { bytes: usize::MAX })?)?;
        if let Some(to) = weight.as_mut_slice() {
            self.encode_rows(element, 0, to)?;
        }
        Ok(Self { rows: self.rows, dim: self.dim, element, weight, states: Vec::new() })
    }

    /// Decodes all rows into `out`, end to end.
    ///
    /// # Panics
    /// When `out` does not have `rows x dim` elements.
    pub(crate) fn decode(&self, out: &mut [f32]) {
        let row_bytes = self.element.row_bytes(self.dim);
        assert_eq!(out.len() / self.dim.max(1), self.as_bytes().len() / row_bytes.max(1), "rows");
        let rows = self.as_bytes().par_chunks_exact(row_bytes.max(1));
        out.par_chunks_exact_mut(self.dim.max(1)).zip(rows).for_each(|(out, row)| {
            self.element.decode(row, out);
        });
    }

    /// Encodes the rows from `first` on, until `out` is full.
    ///
    /// # Errors
    /// [`BadRow`] with the first row that the type cannot hold.
    ///
    /// # Panics
    /// When the table ends before `out` is full.
    pub(crate) fn encode_rows(&self, element: Element, first: u64, out: &mut [u8]) -> Result<(), BadRow> {
        let (dim, row_bytes) = (self.dim, element.row_bytes(self.dim));
        let chunk_rows = CHUNK_ELEMENTS.div_ceil(dim.max(1));
        let chunks = out.par_chunks_mut((chunk_rows * row_bytes).max(1)).enumerate();
        let encoded = chunks.map(|(chunk, out)| {
            let first = first + (chunk * chunk_rows) as u64;
            let mut values = vec![0.0; dim];
            for (row, out) in (first..).zip(out.chunks_exact_mut(row_bytes)) {
                self.element.decode(&self.as_bytes()[self.byte_range(row)], &mut values);
                element.encode(&values, out).map_err(|reason| BadRow { row, reason })?;
            }
            Ok(())
        });
        // Collected first, so that the error is that of the first bad row and not of the first thread to
        // fail.
        encoded.collect::<Vec<_>>().into_iter().collect()
    }

    /// A copy in `memory`, with optimizer state. Its rows can be written if they are f32.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when an allocation fails.
    pub(crate) fn copied(&self, memory: &dyn HostMemory) -> Result<Self, OutOfHostMemory> {
        let state = |s: &State| Ok(State::new(s.name.clone(), s.width, s.data.copied(memory)?));
        let states = self.states.iter().map(state).collect::<Result<_, _>>()?;
        Ok(Self { states, ..self.rows_copied(memory)? })
    }

    /// A copy of the rows in `memory`, without optimizer state.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when an allocation fails.
    pub(crate) fn rows_copied(&self, memory: &dyn HostMemory) -> Result<Self, OutOfHostMemory> {
        let weight = self.weight.copied(memory)?;
        Ok(Self { rows: self.rows, dim: self.dim, element: self.element, weight, states: Vec::new() })
    }

    /// The rows without their optimizer state.
    #[must_use]
    pub(crate) fn without_states(self) -> Self {
        Self { states: Vec::new(), ..self }
    }

    /// Whether the rows are in owned memory and not in a mapped file.
    #[must_use]
    pub(crate) fn in_ram(&self) -> bool {
        self.weight.is_owned()
    }

    /// A handle that keeps the memory of the rows alive while a device reads it; `None` if devices cannot
    /// read it. The rows are read-only afterwards.
    #[must_use]
    pub(crate) fn shared_rows(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        self.weight.shared()
    }

    /// Number of rows.
    #[must_use]
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// Elements per row.
    #[must_use]
    pub(crate) fn dim(&self) -> usize {
        self.dim
    }

    /// Type of the elements.
    #[must_use]
    pub(crate) fn element(&self) -> Element {
        self.element
    }

    /// The bytes of a row; `None` past the end. For many ids, [`rows_of`] is faster.
    #[must_use]
    pub fn row(&self, id: u64) -> Option<&[u8]> {
        self.view().row(id)
    }

    /// The elements of a row; `None` past the end, or when they are not f32.
    #[must_use]
    pub(crate) fn row_values(&self, id: u64) -> Option<&[f32]> {
        self.values()?.get(self.range(id)?)
    }

    /// The bytes of all rows, end to end.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.weight.as_slice()
    }

    /// The elements of all rows, end to end; `None` when they are not f32.
    #[must_use]
    pub fn values(&self) -> Option<&[f32]> {
        (self.element == Element::F32).then(|| self.weight.floats())
    }

    /// The elements of a row, to write; `None` past the end, and when [`Self::rows_mut`] returns `None`.
    #[cfg(test)]
    pub(crate) fn row_mut(&mut self, id: u64) -> Option<&mut [f32]> {
        let range = self.range(id)?;
        self.rows_mut()?.get_mut(range)
    }

    /// The elements of all rows, to write; `None` when they are mapped, shared with a device, or not f32.
    pub fn rows_mut(&mut self) -> Option<&mut [f32]> {
        Some(self.parts_mut()?.0)
    }

    /// The states, in the order given when the table was made.
    #[must_use]
    pub(crate) fn states(&self) -> &[State] {
        &self.states
    }

    /// Rows and optimizer state, to write; `None` when [`Self::rows_mut`] returns `None`.
    pub fn parts_mut(&mut self) -> Option<(&mut [f32], &mut [State])> {
        let rows = if self.element == Element::F32 { self.weight.floats_mut() } else { None };
        Some((rows?, &mut self.states))
    }

    /// Size of rows and optimizer state, in bytes.
    #[must_use]
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> u64 {
        let states: usize = self.states.iter().map(|s| size_of_val(s.as_slice())).sum();
        (self.as_bytes().len() + states) as u64
    }

    /// Advises the system not to read ahead in a mapped file. Has no effect on owned memory.
    pub(crate) fn expect_random_reads(&self) {
        self.weight.expect_random_reads();
    }

    /// Starts reading a row of a mapped file from disk and does not wait. Has no effect on owned memory.
    pub(crate) fn fetch(&self, id: u64) {
        if id < self.rows {
            self.weight.fetch(self.byte_range(id));
        }
    }

    /// Reads one byte of every page of the rows (not of the state), so that no first request waits for the
    /// disk.
    pub(crate) fn prefault(&self) {
        self.as_bytes().par_iter().step_by(PAGE_BYTES).for_each(|x| {
            black_box(*x);
        });
    }

    fn range(&self, id: u64) -> Option<Range<usize>> {
        // For an id below `rows` this cannot overflow: the end is at most the length of all rows.
        (id < self.rows).then(|| id as usize * self.dim..(id as usize + 1) * self.dim)
    }

    /// `id` must be below `rows`.
    fn byte_range(&self, id: u64) -> Range<usize> {
        let row_bytes = self.element.row_bytes(self.dim);
        id as usize * row_bytes..(id as usize + 1) * row_bytes
    }

    fn view(&self) -> TableView<'_> {
        let row_bytes = self.element.row_bytes(self.dim);
        TableView { bytes: self.as_bytes(), rows: self.rows, row_bytes }
    }
}

/// The rows of one lookup of a batch: a function from the index of an id, among the feature's ids in the
/// batch, to the bytes of its row. An id past the table reads the default row; `None` is a row of zeros.
///
/// # Panics
/// When the table or the feature does not exist.
pub fn rows_of<'t>(
    tables: &'t [Table],
    schema: &Schema,
    lookup: &Lookup,
    batch: &'t Batch,
) -> impl Fn(usize) -> Option<&'t [u8]> + use<'t> {
    let (table, ids) = (&tables[lookup.table.index()], &batch.features[lookup.feature].ids);
    let shape = &schema.tables[lookup.table.index()];
    debug_assert_eq!(lookup.element, table.element, "the lookup has the element type of its table");
    let rows = table.view();
    // `u64::MAX` is past every table, so `row_of` gives the default row of absent ids.
    let absent = shape.row_of(u64::MAX).and_then(|row| rows.row(row));
    let (bits, declared) = (shape.lossy_bits, shape.rows);
    move |i| {
        let row = match bits {
            None => ids[i],
            Some(bits) if ids[i] < declared => fold(ids[i], bits),
            Some(_) => return absent,
        };
        rows.row(row).or(absent)
    }
}

/// The rows of a table as a slice that is resolved once, so that reading a row needs no virtual call into the
/// owner of the memory.
#[derive(Clone, Copy)]
struct TableView<'t> {
    bytes: &'t [u8],
    rows: u64,
    row_bytes: usize,
}

impl<'t> TableView<'t> {
    /// `None` past the end.
    #[inline(always)]
    fn row(self, id: u64) -> Option<&'t [u8]> {
        // For an id below `rows` this cannot overflow: the end is at most the length of `bytes`.
        let start = (id < self.rows).then(|| id as usize * self.row_bytes)?;
        self.bytes.get(start..start + self.row_bytes)
    }
}

#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum EncodeError {
    #[error(transparent)]
    Row(#[from] BadRow),
    #[error(transparent)]
    Memory(#[from] OutOfHostMemory),
}

#[cfg(test)]
mod tests;
