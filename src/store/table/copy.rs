//! Copies of a table: in another element type, in other memory, or a part of it.

use std::sync::Arc;

use rayon::prelude::*;

use super::{BadRow, State, Table};
use crate::mem::{HostMemory, OutOfHostMemory};
use crate::store::bytes::Bytes;
use crate::store::record::RowFormat;
use crate::types::Element;

/// Elements that one thread encodes at a time.
const CHUNK_ELEMENTS: usize = 1 << 16;

impl Table {
    /// A copy of the rows in another element type, without optimizer state. Rows that are not f32 are decoded
    /// first.
    ///
    /// # Errors
    /// [`RowEncodeError`] for a row that the type cannot hold, and when the allocation fails.
    pub fn encoded(&self, element: Element, memory: &dyn HostMemory) -> Result<Self, RowEncodeError> {
        let row_bytes = element.row_bytes(self.dim);
        let bytes = usize::try_from(self.rows).ok().and_then(|rows| rows.checked_mul(row_bytes));
        let mut weight = Bytes::zeroed(memory, bytes.ok_or(OutOfHostMemory { bytes: usize::MAX })?)?;
        if let Some(to) = weight.as_mut_slice() {
            self.encode_rows(element, 0, to)?;
        }
        Ok(Self::of(self.rows, RowFormat { element, dim: self.dim }, weight, Vec::new()))
    }

    /// Decodes all rows into `out`, end to end.
    ///
    /// # Panics
    /// When `out` does not have `rows x dim` elements.
    pub(crate) fn decode(&self, out: &mut [f32]) {
        assert_eq!(out.len() as u64, self.rows * self.dim as u64, "elements");
        let rows = self.view();
        out.par_chunks_exact_mut(self.dim.max(1)).enumerate().for_each(|(row, out)| {
            rows.row(row as u64).into_iter().for_each(|row| self.element.decode(row, out));
        });
    }

    /// Encodes the rows from `first` on, until `out` is full. Rows that already have this type are copied.
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
            let (rows, mut values) = (self.view(), vec![0.0; dim]);
            for (row, out) in (first..).zip(out.chunks_exact_mut(row_bytes.max(1))) {
                let bytes = rows.row(row).unwrap_or_else(|| panic!("the table has no row {row}"));
                if element == self.element {
                    out.copy_from_slice(bytes);
                    continue;
                }
                self.element.decode(bytes, &mut values);
                element.encode(&values, out).map_err(|reason| BadRow { row, reason })?;
            }
            Ok(())
        });
        // Collected first, so that the error is that of the first bad row and not of the first thread to
        // fail.
        encoded.collect::<Vec<_>>().into_iter().collect()
    }

    /// Copies the state of kind `state` of the rows from `first` on, until `out` is full.
    ///
    /// # Panics
    /// When the table ends before `out` is full, or has no such state.
    pub(crate) fn copy_states(&self, state: usize, first: u64, out: &mut [f32]) {
        let width = self.states[state].width;
        out.par_chunks_exact_mut(width.max(1)).enumerate().for_each(|(row, out)| {
            out.copy_from_slice(self.state(state, first + row as u64));
        });
    }

    /// A copy in `memory`, with optimizer state and without an overlay. Its rows can be written if they are
    /// f32.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when an allocation fails.
    pub(crate) fn copied(&self, memory: &dyn HostMemory) -> Result<Self, OutOfHostMemory> {
        let copy = |(i, state): (usize, &State)| {
            let mut data = state.data.copied(memory)?;
            if self.overlay.is_some()
                && let Some(out) = data.floats_mut()
            {
                self.copy_states(i, 0, out);
            }
            Ok(State::new(state.name.clone(), state.width, data))
        };
        let states = self.states.iter().enumerate().map(copy).collect::<Result<_, _>>()?;
        Ok(Self { states: Arc::new(states), ..self.rows_copied(memory)? })
    }

    /// A copy of the rows in `memory`, without optimizer state and without an overlay.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when an allocation fails.
    pub(crate) fn rows_copied(&self, memory: &dyn HostMemory) -> Result<Self, OutOfHostMemory> {
        let mut weight = self.weight.copied(memory)?;
        if self.overlay.is_some()
            && let Some(out) = weight.as_mut_slice()
        {
            let (row_bytes, rows) = (self.row_bytes().max(1), self.view());
            out.par_chunks_exact_mut(row_bytes).enumerate().for_each(|(row, out)| {
                rows.row(row as u64).into_iter().for_each(|row| out.copy_from_slice(row));
            });
        }
        Ok(Self::of(self.rows, RowFormat { element: self.element, dim: self.dim }, weight, Vec::new()))
    }
}

/// Why a table cannot be copied in another element type.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum RowEncodeError {
    #[error(transparent)]
    Row(#[from] BadRow),
    #[error(transparent)]
    Memory(#[from] OutOfHostMemory),
}
