//! The rows of the next version, in training with a scratchpad.
//!
//! The current records of rows are then spread over the slots, the stages of the pipeline and the working
//! file, so nobody could copy them after a cut. Instead, Train copies the records that a step has updated
//! right after the step, over older records of the same rows. At a cut the image is complete, and Train goes
//! on with an empty one.

use std::collections::HashMap;

use foldhash::fast::FixedState;

use super::image::{RowImage, TableShape};
use crate::types::TableId;

/// The rows that changed since the last cut, and their records.
pub(crate) struct Capture {
    image: RowImage,
    /// For each table, the index of each captured row in the image.
    places: Vec<HashMap<u64, usize, FixedState>>,
}

impl Capture {
    pub(crate) fn new(shapes: &[TableShape]) -> Self {
        let places = shapes.iter().map(|_| HashMap::default()).collect();
        Self { image: RowImage::empty(shapes), places }
    }

    /// Copies the record of a row that a step has updated.
    pub(crate) fn copy(&mut self, table: TableId, row: u64, record: &[f32]) {
        let next = self.image.rows(table.index()).len();
        let at = *self.places[table.index()].entry(row).or_insert(next);
        self.image.set(table, at, (row, record));
    }

    /// The captured rows. They are in no order.
    pub(crate) fn image(&self) -> &RowImage {
        &self.image
    }

    /// Takes the captured rows.
    pub(crate) fn take(&mut self, shapes: &[TableShape]) -> RowImage {
        // A map keeps its memory, so it need not grow again during steps.
        self.places.iter_mut().for_each(HashMap::clear);
        std::mem::replace(&mut self.image, RowImage::empty(shapes))
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::store::RowSource;

    proptest! {
        #[test]
        fn a_capture_has_the_last_record_of_each_row_in_ascending_order(
            updates in proptest::collection::vec((0_u64..40, any::<f32>()), 0..200)
        ) {
            let shapes = [TableShape { dim: 2, states: vec![("sum", 1)] }];
            let (mut capture, mut expected) = (Capture::new(&shapes), BTreeMap::new());
            for (row, value) in updates {
                capture.copy(TableId(0), row, &[value, 1.0, 2.0]);
                expected.insert(row, [value.to_bits(), 1_f32.to_bits(), 2_f32.to_bits()]);
            }
            let mut image = capture.take(&shapes);
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
