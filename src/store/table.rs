//! One embedding table: its rows and the optimizer state of each row, in memory or in a mapped file.
//!
//! Rows are numbered from 0 and stored end to end, so the offset of a row is one multiplication, and a
//! version is served from its file, mapped or read into memory as it is. The rows that deltas changed are in
//! an overlay in front of these base rows, which several versions of a chain share. A table in training holds
//! f32. A table of a version may hold another element type; its rows were encoded when the version was
//! written and are read-only.

mod copy;
mod deltas;
mod view;

use std::any::Any;
use std::hint::black_box;
use std::sync::Arc;

use rayon::prelude::*;

use super::bytes::Bytes;
use super::link::LinkHold;
use super::overlay::Overlay;
use super::record::RowFormat;
use super::{RecordLayout, StateShape};
use crate::mem::{HostMemory, OutOfHostMemory};
use crate::schema;
use crate::types::{Element, RowError};
use view::TableView;
pub use view::rows_of;

const PAGE_BYTES: usize = 4096;

/// `rows x dim` elements of one type, and `rows x width` f32 for each kind of optimizer state.
#[derive(Clone, Debug)]
pub struct Table {
    rows: u64,
    dim: usize,
    element: Element,
    /// Rows end to end, each of `element.row_bytes(dim)` bytes; aligned for f32 if that is the element type.
    /// All versions of a chain share them.
    weight: Arc<Bytes>,
    states: Arc<Vec<State>>,
    /// The rows that differ from `weight`, if the table belongs to a delta.
    overlay: Option<Arc<Overlay>>,
    /// Of a table without its store: the versions whose files it maps. They keep their directories.
    _links: Vec<Arc<LinkHold>>,
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

    /// Elements per row: the table's dim or 1.
    #[must_use]
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// Its name and width.
    pub(crate) fn shape(&self) -> StateShape<'_> {
        StateShape { name: &self.name, width: self.width }
    }

    /// The state of all rows, end to end, without the overlay of their table.
    #[must_use]
    pub(crate) fn as_slice(&self) -> &[f32] {
        self.data.floats()
    }

    /// The state of the row at this position.
    fn at(&self, position: usize) -> &[f32] {
        &self.as_slice()[position * self.width..][..self.width]
    }

    /// `None` for a file.
    pub fn rows_mut(&mut self) -> Option<&mut [f32]> {
        self.data.floats_mut()
    }
}

impl Table {
    /// A table of f32 zeros with zeroed states.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when an allocation fails.
    pub fn zeroed(
        memory: &dyn HostMemory,
        rows: u64,
        dim: usize,
        states: &[StateShape<'_>],
    ) -> Result<Self, OutOfHostMemory> {
        let take = |width: usize| {
            let elements = usize::try_from(rows).ok().and_then(|rows| rows.checked_mul(width));
            let bytes = elements.and_then(|elements| elements.checked_mul(size_of::<f32>()));
            Bytes::zeroed(memory, bytes.ok_or(OutOfHostMemory { bytes: usize::MAX })?)
        };
        let weight = take(dim)?;
        let state = |shape: &StateShape<'_>| Ok(State::new(shape.name, shape.width, take(shape.width)?));
        let states = states.iter().map(state).collect::<Result<_, _>>()?;
        Ok(Self::of(rows, RowFormat { element: Element::F32, dim }, weight, states))
    }

    fn of(rows: u64, format: RowFormat, weight: Bytes, states: Vec<State>) -> Self {
        let RowFormat { element, dim } = format;
        let (weight, states) = (Arc::new(weight), Arc::new(states));
        Self { rows, dim, element, weight, states, overlay: None, _links: Vec::new() }
    }

    /// The table, which keeps these versions in use.
    #[must_use]
    pub(super) fn holding(self, links: &[Arc<LinkHold>]) -> Self {
        Self { _links: links.to_vec(), ..self }
    }

    /// The table that the schema declares, with these rows of this element type and these states. `None` when
    /// the length of one of them does not fit the declared number of rows, or f32 rows are not aligned.
    #[must_use]
    pub(crate) fn from_parts(
        declared: &schema::TableSchema,
        element: Element,
        weight: Bytes,
        states: Vec<State>,
    ) -> Option<Self> {
        let (rows, format) = (declared.stored_rows(), RowFormat { element, dim: declared.dim });
        let fits = |width: usize, length: usize| {
            usize::try_from(rows).ok()?.checked_mul(width).filter(|&n| n == length)
        };
        fits(format.row_bytes(), weight.as_slice().len())?;
        if element == Element::F32 {
            bytemuck::try_cast_slice::<u8, f32>(weight.as_slice()).ok()?;
        }
        states.iter().try_for_each(|state| fits(state.width, state.as_slice().len()).map(|_| ()))?;
        Some(Self::of(rows, format, weight, states))
    }

    /// Whether both tables have the same base rows in memory or in the same mapping.
    pub(super) fn shares_base(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.weight, &other.weight)
    }

    /// The rows without their optimizer state.
    #[must_use]
    pub(crate) fn without_states(self) -> Self {
        Self { states: Arc::default(), ..self }
    }

    /// Whether all rows are in owned memory and not in a file.
    #[must_use]
    pub(crate) fn is_owned(&self) -> bool {
        self.weight.is_owned() && self.overlay.is_none()
    }

    /// A handle that keeps the memory of the rows alive while a device reads it; `None` if devices cannot
    /// read all of them. The rows are read-only afterwards.
    #[must_use]
    pub(crate) fn shared_rows(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        if self.overlay.is_none() { self.weight.shared() } else { None }
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

    /// Prefetches the entry of the overlay that [`Self::row`] reads first for this row.
    pub(crate) fn prefetch_overlay(&self, id: u64) {
        self.overlay.iter().for_each(|overlay| overlay.prefetch(id));
    }

    /// The elements of a row; `None` past the end, or when they are not f32.
    #[must_use]
    pub(crate) fn row_values(&self, id: u64) -> Option<&[f32]> {
        if self.element != Element::F32 {
            return None;
        }
        bytemuck::try_cast_slice(self.row(id)?).ok()
    }

    /// The state of kind `state` of a row.
    ///
    /// # Panics
    /// When the table has no such row or state.
    #[must_use]
    pub(crate) fn state(&self, state: usize, id: u64) -> &[f32] {
        match self.overlay.as_deref().and_then(|overlay| overlay.find(id)) {
            Some(place) => place.delta.states[state].at(place.at),
            None => self.states[state].at(id as usize),
        }
    }

    /// The bytes of all rows, end to end; `None` if some of them are in deltas.
    #[must_use]
    pub fn as_bytes(&self) -> Option<&[u8]> {
        self.overlay.is_none().then(|| self.weight.as_slice())
    }

    /// Size of all rows without optimizer state, in bytes.
    pub(crate) fn weight_bytes(&self) -> u64 {
        self.weight.as_slice().len() as u64
    }

    /// The elements of all rows, end to end; `None` when they are not f32, or some of them are in deltas.
    #[must_use]
    pub fn values(&self) -> Option<&[f32]> {
        (self.element == Element::F32 && self.overlay.is_none()).then(|| self.weight.floats())
    }

    /// The elements of all rows, to write; `None` when they are mapped, shared with a device or with another
    /// version, or not f32.
    pub fn rows_mut(&mut self) -> Option<&mut [f32]> {
        Some(self.parts_mut()?.0)
    }

    /// The states, in the order given when the table was made.
    #[must_use]
    pub(crate) fn states(&self) -> &[State] {
        &self.states
    }

    /// The weights and states of a row as a trainer has them.
    pub(crate) fn record_layout(&self) -> RecordLayout<'_> {
        RecordLayout { dim: self.dim, states: self.states.iter().map(State::shape).collect() }
    }

    /// Rows and optimizer state, to write; `None` when [`Self::rows_mut`] returns `None`.
    pub fn parts_mut(&mut self) -> Option<(&mut [f32], &mut [State])> {
        if self.element != Element::F32 || self.overlay.is_some() {
            return None;
        }
        let rows = Arc::get_mut(&mut self.weight)?.floats_mut()?;
        Some((rows, Arc::get_mut(&mut self.states)?))
    }

    /// The bytes of the rows: those of the base and of each delta in front of it.
    pub(crate) fn row_parts(&self) -> impl Iterator<Item = &Bytes> {
        self.deltas().iter().map(|delta| &delta.weight).chain([&*self.weight])
    }

    /// Advises the system not to read ahead in a mapped file. Has no effect on rows in memory.
    pub(crate) fn expect_random_reads(&self) {
        self.row_parts().for_each(Bytes::expect_random_reads);
    }

    /// Starts reading a row of a mapped file from disk and does not wait. Has no effect on rows in memory.
    pub(crate) fn fetch(&self, id: u64) {
        if id >= self.rows {
            return;
        }
        let row_bytes = self.row_bytes();
        let range = |row: usize| row * row_bytes..(row + 1) * row_bytes;
        match self.overlay.as_deref().and_then(|overlay| overlay.find(id)) {
            Some(place) => place.delta.weight.fetch(range(place.at)),
            None => self.weight.fetch(range(id as usize)),
        }
    }

    /// Reads one byte of every page of mapped rows (not of the state), so that no first request waits for the
    /// disk.
    pub(crate) fn prefault(&self) {
        for bytes in self.row_parts().filter(|bytes| bytes.is_mapped()) {
            bytes.as_slice().par_iter().step_by(PAGE_BYTES).for_each(|x| {
                black_box(*x);
            });
        }
    }

    pub(super) fn row_bytes(&self) -> usize {
        self.element.row_bytes(self.dim)
    }

    fn view(&self) -> TableView<'_> {
        TableView {
            bytes: self.weight.as_slice(),
            rows: self.rows,
            row_bytes: self.row_bytes(),
            overlay: self.overlay.as_deref(),
        }
    }
}

#[cfg(test)]
impl Table {
    /// The elements of a row, to write; `None` past the end, and when [`Self::rows_mut`] returns `None`.
    pub(crate) fn row_mut(&mut self, id: u64) -> Option<&mut [f32]> {
        let dim = self.dim;
        self.rows_mut()?.chunks_exact_mut(dim).nth(id as usize)
    }

    /// Size of rows and optimizer state, in bytes.
    #[must_use]
    pub(crate) fn bytes(&self) -> u64 {
        let states: usize = self.states.iter().map(|s| size_of_val(s.as_slice())).sum();
        self.weight_bytes() + states as u64
    }
}

#[cfg(test)]
mod tests;
