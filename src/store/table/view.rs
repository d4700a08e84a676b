//! Reads rows of a table at random, as fast as the memory allows.

use super::Table;
use crate::mem::fold;
use crate::schema::{Lookup, Schema};
use crate::store::overlay::Overlay;
use crate::types::Batch;

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
pub(super) struct TableView<'t> {
    /// The base rows.
    pub bytes: &'t [u8],
    pub rows: u64,
    pub row_bytes: usize,
    pub overlay: Option<&'t Overlay>,
}

impl<'t> TableView<'t> {
    /// `None` past the end.
    #[inline(always)]
    pub(super) fn row(self, id: u64) -> Option<&'t [u8]> {
        if id >= self.rows {
            return None;
        }
        let (bytes, row) = match self.overlay {
            Some(overlay) => self.overlaid(overlay, id),
            None => (self.bytes, id as usize),
        };
        // This cannot overflow: the end is at most the length of `bytes`.
        let start = row * self.row_bytes;
        bytes.get(start..start + self.row_bytes)
    }

    /// The bytes that hold a row, and its position in them. Not inlined, so that tables without an overlay
    /// are read as fast as if there were none.
    #[inline(never)]
    fn overlaid(self, overlay: &'t Overlay, id: u64) -> (&'t [u8], usize) {
        match overlay.find(id) {
            Some(place) => (place.delta.weight.as_slice(), place.at),
            None => (self.bytes, id as usize),
        }
    }
}
