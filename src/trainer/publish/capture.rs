//! The rows of the next version, in training with a scratchpad.
//!
//! The current records of rows are then spread over the slots, the stages of the pipeline and the working
//! file, so they could not be copied after a cut. Instead, each step copies the records that it has updated.
//! At a cut the image is complete, and Train goes on with an empty one.
//!
//! A small table has the places of some rows. If it still has the place of an older record of the same row,
//! the new record overwrites that one. So rows that are updated often take little memory. Other rows may
//! occur several times in the image; only the last record counts ([`RowImage::sort`]).
//!
//! The threads that train copy the records, a table each, while these are still in the processor's caches. On
//! the host, if the batch is not split, others of them may update dense weights meanwhile.

use rayon::prelude::*;

use super::image::{AHEAD, RowImage, TableImage};
use crate::mem::prefetch::prefetch_line;
use crate::pace::give_way;
use crate::trainer::pipeline::train::{RowObserver, UpdatedRows};

/// The rows that changed since the last cut, and their records.
pub(crate) struct Capture {
    image: RowImage,
    places: Vec<RowPlaces>,
}

/// The places of a table's records in the image, by a hash of the row. A place may belong to another row or
/// to an earlier image; the row that is stored there shows that.
struct RowPlaces(Vec<u32>);

/// Places of all tables. They fit in a processor's cache.
const PLACES: u64 = 1 << 20;

/// The least places of a table that has more rows.
const LEAST_PLACES: u64 = 1 << 10;

impl Capture {
    /// A capture into an empty image, for tables of this many rows.
    pub(crate) fn new(image: RowImage, rows: &[u64]) -> Self {
        let all = rows.iter().map(|&rows| u128::from(rows)).sum::<u128>().max(1);
        let share = |rows: u64| (u128::from(rows) * u128::from(PLACES) / all) as u64;
        let places =
            |&rows: &u64| RowPlaces(vec![0; share(rows).max(LEAST_PLACES).min(rows).max(1) as usize]);
        Self { image, places: rows.iter().map(places).collect() }
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

impl RowObserver for Capture {
    fn rows(&mut self, updated: &[UpdatedRows<'_>]) {
        let Self { image, places } = self;
        let mut tables: Vec<_> = places.iter_mut().zip(image.tables_mut()).map(Some).collect();
        let to = |from: &UpdatedRows<'_>| tables.get_mut(from.table.index()).and_then(Option::take);
        let jobs: Vec<_> = updated.iter().map(to).zip(updated).collect();
        jobs.into_par_iter().with_max_len(1).for_each(|(to, from)| {
            give_way();
            if let Some((places, image)) = to {
                places.copy(from, image);
            }
        });
    }
}

impl RowPlaces {
    fn hash(&self, row: u64) -> usize {
        (row % self.0.len() as u64) as usize
    }

    fn copy(&mut self, UpdatedRows { rows, record, .. }: &UpdatedRows<'_>, image: &mut TableImage) {
        for (k, &row) in rows.iter().enumerate() {
            // Places and records are all over memory: without this, copying waits for most of them.
            if let Some(&row) = rows.get(k + 2 * AHEAD) {
                prefetch_line(&self.0[self.hash(row)]);
            }
            if let Some(&row) = rows.get(k + AHEAD) {
                image.prefetch(self.0[self.hash(row)] as usize);
            }
            let hash = self.hash(row);
            let mut at = self.0[hash] as usize;
            if image.rows().get(at) != Some(&row) {
                at = image.rows().len();
                // A place that does not fit is forgotten.
                self.0[hash] = at as u32;
            }
            image.set(at, row, record(k));
        }
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::store::{RecordLayout, RowSource, StateShape};
    use crate::types::TableId;

    proptest! {
        #[test]
        fn a_capture_has_the_last_record_of_each_row_in_ascending_order(
            updates in proptest::collection::vec((0_u64..40, any::<f32>()), 0..200), forgets in 1_usize..50
        ) {
            let layouts = [RecordLayout { dim: 2, states: vec![StateShape::new("sum", 1)] }];
            let empty = || RowImage::empty(&layouts, &[40]).unwrap();
            let (mut capture, mut expected) = (Capture::new(empty(), &[40]), BTreeMap::new());
            for (n, (row, value)) in updates.into_iter().enumerate() {
                if n % forgets == 0 {
                    capture.places[0].0.fill(0);
                }
                let record: &[f32] = &[value, 1.0, 2.0];
                let updated = UpdatedRows { table: TableId(0), rows: &[row], record: Box::new(|_| record) };
                capture.rows(&[updated]);
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
