//! The rows of the next version, in training with a scratchpad.
//!
//! The current records of rows are then spread over the slots, the stages of the pipeline and the working
//! file, so nobody could copy them after a cut. Instead, Train copies the records that a step has updated
//! right after the step. At a cut the image is complete, and Train goes on with an empty one.
//!
//! A record is copied over an older record of the same row if that is found in a small table, which forgets.
//! So rows that are updated often take little memory. Other rows may occur several times in the image; only
//! the last record counts ([`RowImage::sort`]).

use super::image::{AHEAD, RowImage};
use crate::mem::mix64;
use crate::mem::prefetch::prefetch_line;
use crate::types::{RowId, TableId};

/// The rows that changed since the last cut, and their records.
pub(crate) struct Capture {
    image: RowImage,
    /// By a hash of a row, the place of its record in the image. Places of other rows, and of earlier images,
    /// are told by the row at the place.
    places: Vec<u32>,
}

/// Places that are remembered. They fit in a processor's cache.
const PLACES: usize = 1 << 20;

/// The index of a row's place.
fn hash(table: TableId, row: u64) -> usize {
    mix64(RowId::new(table, row).number()) as usize % PLACES
}

impl Capture {
    /// A capture into an empty image.
    pub(crate) fn new(image: RowImage) -> Self {
        Self { image, places: vec![0; PLACES] }
    }

    /// Copies the records of rows that a step has updated.
    pub(crate) fn copy_all<'r>(&mut self, table: TableId, rows: &[u64], record: impl Fn(usize) -> &'r [f32]) {
        for (k, &row) in rows.iter().enumerate() {
            // Places and records are all over memory: without this, copying waits for most of them.
            if let Some(&row) = rows.get(k + 2 * AHEAD) {
                prefetch_line(&self.places[hash(table, row)]);
            }
            if let Some(&row) = rows.get(k + AHEAD) {
                self.image.prefetch(table, self.places[hash(table, row)] as usize);
            }
            self.copy(table, row, record(k));
        }
    }

    fn copy(&mut self, table: TableId, row: u64, record: &[f32]) {
        let hash = hash(table, row);
        let rows = self.image.rows(table.index());
        let mut at = self.places[hash] as usize;
        if rows.get(at) != Some(&row) {
            at = rows.len();
            // A place that does not fit is forgotten.
            self.places[hash] = at as u32;
        }
        self.image.set(table, at, (row, record));
    }

    /// The captured rows. They are in no order, and a row may occur several times.
    pub(crate) fn image(&self) -> &RowImage {
        &self.image
    }

    /// Takes the captured rows, and goes on with an empty image.
    pub(crate) fn take(&mut self, empty: RowImage) -> RowImage {
        std::mem::replace(&mut self.image, empty)
    }

    /// The captured rows.
    pub(crate) fn into_image(self) -> RowImage {
        self.image
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::image::TableShape;
    use super::*;
    use crate::store::RowSource;

    proptest! {
        #[test]
        fn a_capture_has_the_last_record_of_each_row_in_ascending_order(
            updates in proptest::collection::vec((0_u64..40, any::<f32>()), 0..200), forgets in 1_usize..50
        ) {
            let shapes = [TableShape { dim: 2, states: vec![("sum", 1)] }];
            let empty = || RowImage::empty(&shapes, &[40]).unwrap();
            let (mut capture, mut expected) = (Capture::new(empty()), BTreeMap::new());
            for (n, (row, value)) in updates.into_iter().enumerate() {
                if n % forgets == 0 {
                    capture.places.fill(0);
                }
                capture.copy(TableId(0), row, &[value, 1.0, 2.0]);
                expected.insert(row, [value.to_bits(), 1_f32.to_bits(), 2_f32.to_bits()]);
            }
            let mut image = capture.take(empty());
            prop_assert_eq!(capture.image().len(), 0);
            image.sort();
            prop_assert!(image.rows(0).iter().eq(expected.keys()));
            let mut records = Vec::new();
            let read = image.for_each_chunk(TableId(0), &mut |_, chunk| {
                records.extend(chunk.iter().map(|x| x.to_bits()));
                Ok(())
            });
            prop_assert!(read.is_ok() && records.iter().eq(expected.values().flatten()));
        }
    }
}
