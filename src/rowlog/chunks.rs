//! A whole table of a working file, a chunk at a time.

use std::ops::Range;

use rayon::prelude::*;

use super::region::{Placed, WorkingRows};
use super::{StoreError, WorkingFile};
use crate::types::TableId;

/// Bytes of a chunk, with what it takes to find its rows.
const CHUNK_BYTES: usize = 4 << 20;
/// Bytes between two written rows that are read with them: a disk takes no longer for them than for another request.
const GAP_BYTES: usize = 32 << 10;
/// Elements that one thread makes or checks at a time.
const PIECE_ELEMENTS: usize = 1 << 14;

impl WorkingFile {
    /// Hands all records of a table to `take`, in the order of rows and a few megabytes at a time: the number of
    /// the chunk's first row, and its records end to end. Rows that were never written are made and not read.
    /// No row of the table may be written meanwhile.
    ///
    /// # Errors
    /// [`StoreError::Working`] when there is no such table, what the system refused, and what `take` says.
    pub fn for_each_chunk(
        &self,
        table: TableId,
        mut take: impl FnMut(u64, &[f32]) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let rows = self.table(table)?;
        let step = chunk_rows(rows);
        let (mut records, mut placed) = (Vec::new(), Vec::new());
        let mut first = 0;
        while first < rows.rows() {
            let end = first.saturating_add(step as u64).min(rows.rows());
            records.resize((end - first) as usize * rows.width(), 0.0);
            self.read_range(rows, first..end, &mut records, &mut placed)?;
            take(first, &records)?;
            first = end;
        }
        Ok(())
    }

    /// The first row of a table with a weight that is no finite number, among those that were written; `None`
    /// where all are finite. No row of the table may be written meanwhile.
    ///
    /// # Errors
    /// Those of [`Self::for_each_chunk`].
    pub fn first_not_finite(&self, table: TableId) -> Result<Option<u64>, StoreError> {
        let rows = self.table(table)?;
        let (step, width) = (chunk_rows(rows), rows.width().max(1));
        let mut written = rows.written(&self.stripes, 0..rows.rows());
        let (mut chunk, mut placed, mut records) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            chunk.clear();
            placed.clear();
            for (index, (row, place)) in written.by_ref().take(step).enumerate() {
                chunk.push(row);
                placed.push(Placed { place, index });
            }
            if chunk.is_empty() {
                return Ok(None);
            }
            records.resize(chunk.len() * width, 0.0);
            self.read_placed(rows, &mut placed, &mut records, GAP_BYTES)?;
            let bad = |record: &[f32]| !record[..rows.dim()].iter().all(|x| x.is_finite());
            let records = records.par_chunks_exact(width).with_min_len(PIECE_ELEMENTS.div_ceil(width));
            if let Some(at) = records.position_first(bad) {
                return Ok(Some(chunk[at]));
            }
        }
    }

    /// The records of a range of rows; `placed` is room for where they lie.
    fn read_range(
        &self,
        table: &WorkingRows,
        rows: Range<u64>,
        records: &mut [f32],
        placed: &mut Vec<Placed>,
    ) -> Result<(), StoreError> {
        placed.clear();
        let written = table.written(&self.stripes, rows.clone());
        placed.extend(written.map(|(row, place)| Placed { place, index: (row - rows.start) as usize }));
        if (placed.len() as u64) < rows.end - rows.start {
            let width = table.width().max(1);
            let made = records.par_chunks_exact_mut(width).with_min_len(PIECE_ELEMENTS.div_ceil(width));
            made.enumerate().for_each(|(index, record)| {
                let row = rows.start + index as u64;
                if table.place(&self.stripes, row).is_none() {
                    table.first_value(row, record);
                }
            });
        }
        self.read_placed(table, placed, records, GAP_BYTES)
    }
}

/// Rows of a chunk: its records, and the number and place of each, are [`CHUNK_BYTES`].
fn chunk_rows(table: &WorkingRows) -> usize {
    let bytes = table.width() * size_of::<f32>() + size_of::<Placed>() + size_of::<u64>();
    (CHUNK_BYTES / bytes).max(1)
}
