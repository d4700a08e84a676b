//! Reads a whole table of a working file, a chunk at a time.

use std::ops::Range;

use rayon::prelude::*;

use super::log::RowPlace;
use super::region::{Placed, WorkingRows};
use super::{StoreError, WorkingFile};
use crate::store::{RowSource, SourceShape, TakeChunk};
use crate::types::{Element, TableId};

/// Bytes of a chunk, including the number and place of each row.
const CHUNK_BYTES: usize = 4 << 20;
/// Gaps of up to this many bytes between two written rows are read too, because that takes a disk no longer
/// than a separate request.
const GAP_BYTES: usize = 32 << 10;
/// Elements that one thread computes or checks at a time.
const PIECE_ELEMENTS: usize = 1 << 14;

impl WorkingFile {
    /// Implements [`RowSource::for_each_chunk`], in chunks of a few megabytes. Rows that were never written
    /// are computed and not read. No row of the table may be written during the call.
    ///
    /// # Errors
    /// [`StoreError::Working`] when the table does not exist, errors of the file system, and those of `take`.
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

    /// The lowest-numbered row that was ever written and has a weight or a state that is not finite; `None`
    /// if there is none. No row of the table may be written during the call.
    ///
    /// # Errors
    /// Those of [`Self::for_each_chunk`].
    pub(crate) fn first_not_finite(&self, table: TableId) -> Result<Option<u64>, StoreError> {
        let rows = self.table(table)?;
        let (step, width) = (chunk_rows(rows), rows.width().max(1));
        let mut written = rows.written(&self.stripes, 0..rows.rows());
        let (mut chunk, mut placed, mut records) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            chunk.clear();
            placed.clear();
            for (index, RowPlace { row, place }) in written.by_ref().take(step).enumerate() {
                chunk.push(row);
                placed.push(Placed { place, index });
            }
            if chunk.is_empty() {
                return Ok(None);
            }
            records.resize(chunk.len() * width, 0.0);
            self.read_placed(rows, &mut placed, &mut records, GAP_BYTES)?;
            let bad = |record: &[f32]| !record.iter().all(|x| x.is_finite());
            let records = records.par_chunks_exact(width).with_min_len(PIECE_ELEMENTS.div_ceil(width));
            if let Some(at) = records.position_first(bad) {
                return Ok(Some(chunk[at]));
            }
        }
    }

    /// Reads the records of a range of rows; `placed` is scratch memory.
    fn read_range(
        &self,
        table: &WorkingRows,
        rows: Range<u64>,
        records: &mut [f32],
        placed: &mut Vec<Placed>,
    ) -> Result<(), StoreError> {
        placed.clear();
        let written = table.written(&self.stripes, rows.clone());
        placed.extend(
            written.map(|RowPlace { row, place }| Placed { place, index: (row - rows.start) as usize }),
        );
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

impl RowSource for WorkingFile {
    fn shape(&self, table: TableId) -> Result<SourceShape<'_>, StoreError> {
        let table = self.table(table)?;
        Ok(SourceShape { rows: table.rows(), element: Element::F32, record: table.record().clone() })
    }

    fn for_each_chunk(&self, table: TableId, take: &mut TakeChunk<'_>) -> Result<(), StoreError> {
        Self::for_each_chunk(self, table, take)
    }

    fn first_not_finite(&self, table: TableId) -> Result<Option<u64>, StoreError> {
        Self::first_not_finite(self, table)
    }
}

/// Rows per chunk of [`CHUNK_BYTES`].
fn chunk_rows(table: &WorkingRows) -> usize {
    let bytes = table.width() * size_of::<f32>() + size_of::<Placed>() + size_of::<u64>();
    (CHUNK_BYTES / bytes).max(1)
}
