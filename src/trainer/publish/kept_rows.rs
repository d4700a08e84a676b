//! What a step with rows in memory does for versions: it marks rows, and copies rows of the last cut.
//!
//! Each row that a step updates is marked as changed. If it is a row of the cut that is not copied yet, it is
//! copied just before its update (copy on write), which needs it in the processor's cache anyway. After its
//! updates, a step copies some more rows of the cut. So every row is copied as it was at the cut, without a
//! lock, by the threads that update rows, a table each.

use super::Publisher;
use super::image::{RecordParts, TableImage};
use crate::trainer::row_set::RowSet;

/// The marks and the present cut of one table.
pub(crate) struct KeptRows<'a> {
    marked: &'a mut RowSet,
    /// The table's rows in the present cut, if there is one.
    image: Option<&'a mut TableImage>,
    pace: CopyPace,
}

/// How many rows of each table a step copies that it does not update. By default 119 steps copied 760,000
/// rows, and took 1.3 times as long as others (26 tables of 700,000 rows, batch 128, 2 cores, Xeon,
/// 2026-11-29). With a `per_update` of 2, it took 230 steps, each 1.2 times as long.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyPace {
    /// For each row that it updates.
    pub per_update: usize,
    /// But at least this many.
    pub least: usize,
}

impl CopyPace {
    /// Beside a server, which is to serve the version soon. Its requests make steps several times as long, so
    /// few of them should copy.
    pub(super) const FAST: Self = Self { per_update: 32, least: 4096 };
}

impl Default for CopyPace {
    fn default() -> Self {
        Self { per_update: 4, least: 64 }
    }
}

impl Publisher {
    /// What the next step keeps, for each table. With rows in memory, every step must be given this.
    pub(super) fn kept(&mut self) -> impl Iterator<Item = KeptRows<'_>> + Send {
        let pace = self.copy_pace;
        let images = self.cut.iter_mut().flat_map(|cut| cut.image.tables_mut());
        let images = images.map(Some).chain(std::iter::repeat_with(|| None));
        let tables = self.changed.marked.iter_mut().zip(images);
        tables.map(move |(marked, image)| KeptRows { marked, image, pace })
    }
}

impl KeptRows<'_> {
    /// Before the update of a row with these parts.
    #[inline(always)]
    pub(crate) fn before_update<'r>(&mut self, row: u64, parts: impl FnOnce() -> RecordParts<'r>) {
        self.marked.insert(row);
        if let Some(image) = &mut self.image {
            image.copy_one(row, parts);
        }
    }

    /// After a step has updated this many rows.
    pub(crate) fn after_updates<'r>(self, rows: usize, parts: impl Fn(u64) -> RecordParts<'r>) {
        let CopyPace { per_update, least } = self.pace;
        if let Some(image) = self.image {
            image.copy_waiting((rows * per_update).max(least), parts);
        }
    }
}
