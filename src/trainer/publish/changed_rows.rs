//! The rows that changed since the last cut, and how much memory their copies may take.
//!
//! When the changed rows take a sixteenth of the tables' bytes, and at least [`EARLY_CUT_BYTES_MIN`], a cut
//! is made before its time. If no version is published then, because a gate refuses it or the disk does not
//! answer, training goes on and more rows change. Beyond twice that limit no rows are copied: a capture ends,
//! and the next version has all rows, which are written from where they are. Until then, a changed row takes
//! one bit.

use super::TrainError;
use super::capture::Capture;
use super::image::RowImage;
use crate::store::RecordLayout;
use crate::trainer::casting::Casting;
use crate::trainer::row_set::RowSet;

/// A cut is made before its time when the changed rows take one part in this many of the tables' bytes.
const EARLY_CUT_SHARE: usize = 16;
/// The least bytes of changed rows for which a cut is made before its time.
const EARLY_CUT_BYTES_MIN: usize = 64 << 20;

/// The rows that changed since the last cut.
pub(super) struct ChangedRows {
    /// By table.
    records: Vec<RecordLayout<'static>>,
    /// The number of rows of each table.
    pub rows: Vec<u64>,
    /// The rows that changed, except those in `capture`.
    pub marked: Vec<RowSet>,
    /// With rows in a working file: the rows that changed since the last cut, with their records. `None`:
    /// the next cut reads its rows from the file.
    pub capture: Option<Capture>,
    /// Whether the trainer passes updated records to the publisher.
    pub may_capture: bool,
    /// The image of an earlier cut, without its rows.
    pub spare: Option<RowImage>,
    /// Bytes of changed rows at which a cut is made before its time.
    pub early_cut_bytes: usize,
}

impl ChangedRows {
    /// No rows of tables with these records and numbers of rows.
    ///
    /// # Errors
    /// [`TrainError::Memory`] for the sets of changed rows.
    pub(super) fn new(records: Vec<RecordLayout<'static>>, rows: Vec<u64>) -> Result<Self, TrainError> {
        let mut changed = Self {
            marked: rows.iter().map(|&rows| RowSet::new(rows)).collect::<Result<_, _>>()?,
            capture: None,
            may_capture: false,
            spare: Some(RowImage::empty(&records, &rows)?),
            early_cut_bytes: 0,
            records,
            rows,
        };
        changed.early_cut_bytes = (changed.table_bytes() / EARLY_CUT_SHARE).max(EARLY_CUT_BYTES_MIN);
        Ok(changed)
    }

    /// Bytes of the records of all tables.
    pub(super) fn table_bytes(&self) -> usize {
        let tables = self.rows.iter().zip(&self.records);
        tables.map(|(&rows, record)| rows as usize * record.bytes()).sum()
    }

    /// With rows in a working file: remembers the rows that a step updates, unless they are captured.
    pub(super) fn mark(&mut self, casting: &Casting) {
        if self.capture.is_some() {
            return;
        }
        for (marked, casted) in self.marked.iter_mut().zip(casting.tables()) {
            casted.rows().iter().for_each(|&row| marked.insert(row));
        }
    }

    /// Marks the rows of an image, and keeps its memory.
    pub(super) fn mark_image(&mut self, image: RowImage) {
        for (t, marked) in self.marked.iter_mut().enumerate() {
            image.all_rows(t).for_each(|row| marked.insert(row));
        }
        self.recycle(image);
    }

    /// Takes the marked rows into an image, whose records are not copied yet.
    ///
    /// # Errors
    /// [`TrainError::Memory`].
    pub(super) fn take_marked(&mut self) -> Result<RowImage, TrainError> {
        let mut image = self.empty_image()?;
        image.take_rows(&mut self.marked);
        Ok(image)
    }

    /// Begins to capture rows, if training shows them and none are marked. From now on every changed row must
    /// be shown.
    ///
    /// # Errors
    /// [`TrainError::Memory`].
    pub(super) fn begin_capture(&mut self) -> Result<(), TrainError> {
        let none_marked = self.marked.iter().all(|rows| rows.len() == 0);
        if self.may_capture && self.capture.is_none() && none_marked {
            self.capture = Some(Capture::new(self.empty_image()?, &self.rows));
        }
        Ok(())
    }

    /// Takes the captured rows with their records, and goes on capturing. `None` if rows are not captured.
    ///
    /// # Errors
    /// [`TrainError::Memory`].
    pub(super) fn take_captured(&mut self) -> Result<Option<RowImage>, TrainError> {
        let empty = self.empty_image()?;
        Ok(self.capture.as_mut().map(|capture| capture.take(empty)))
    }

    /// Marks the captured rows instead, so that the next cut reads them from the file.
    pub(super) fn end_capture(&mut self) {
        if let Some(capture) = self.capture.take() {
            self.mark_image(capture.into_image());
        }
    }

    /// Ends a capture that has grown too large.
    pub(super) fn bound_capture(&mut self) {
        if self.captured_bytes() > self.copied_bytes_max() {
            self.end_capture();
        }
    }

    /// Whether a cut is made before its time, because of the memory that the changed rows take.
    pub(super) fn reach_early_cut(&self) -> bool {
        self.captured_bytes() + self.marked_bytes() >= self.early_cut_bytes
    }

    /// Whether the marked rows are too many to be copied.
    pub(super) fn exceed_copies(&self) -> bool {
        self.marked_bytes() > self.copied_bytes_max()
    }

    /// The most bytes of rows that are copied for a version.
    pub(super) fn copied_bytes_max(&self) -> usize {
        2 * self.early_cut_bytes
    }

    fn captured_bytes(&self) -> usize {
        self.capture.as_ref().map_or(0, |capture| capture.image().bytes())
    }

    /// Bytes that a copy of the marked rows would take.
    pub(super) fn marked_bytes(&self) -> usize {
        let marked = self.marked.iter().zip(&self.records);
        marked.map(|(rows, record)| rows.len() * record.bytes()).sum()
    }

    /// An image without rows. It has the memory of an earlier one, if there was one.
    fn empty_image(&mut self) -> Result<RowImage, TrainError> {
        match self.spare.take() {
            Some(image) => Ok(image),
            None => Ok(RowImage::empty(&self.records, &self.rows)?),
        }
    }

    /// Keeps the memory of an image for the next cut, unless it is more than a version should take.
    pub(super) fn recycle(&mut self, mut image: RowImage) {
        if image.bytes() <= self.copied_bytes_max() {
            image.clear();
            self.spare = Some(image);
        }
    }
}
