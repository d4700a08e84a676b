//! How much memory the copies of changed rows may take.
//!
//! When the changed rows take a sixteenth of the tables' bytes, and at least [`LEAST_COPIED`], a cut is made
//! before its time. If no version is published then, because a gate refuses it or the disk does not answer,
//! training goes on and more rows change. Beyond twice that limit no rows are copied: a capture ends, and the
//! next version has all rows, which are written from where they are. Until then, a changed row takes one bit.

use super::image::RowImage;
use super::{Publisher, TrainError};

/// A cut is made before its time when the changed rows take this share of the tables' bytes, but not below
/// [`LEAST_COPIED`] bytes.
const MOST_COPIED: usize = 16;
const LEAST_COPIED: usize = 64 << 20;

/// Bytes of changed rows at which a cut is made before its time, for tables of this many bytes.
pub(super) fn most_copied(tables: usize) -> usize {
    (tables / MOST_COPIED).max(LEAST_COPIED)
}

impl Publisher {
    /// The most bytes of rows that are copied for a version.
    pub(super) fn most_held(&self) -> usize {
        2 * self.most_copied
    }

    /// Whether the changed rows take their share of memory.
    pub(super) fn holds_most(&self) -> bool {
        let captured = self.capture.as_ref().map_or(0, |capture| capture.image().bytes());
        captured + self.marked_bytes() >= self.most_copied
    }

    /// Bytes that a copy of the marked rows would take.
    pub(super) fn marked_bytes(&self) -> usize {
        let marked = self.changed.iter().zip(&self.shapes);
        marked.map(|(rows, shape)| rows.len() * shape.record_bytes()).sum()
    }

    /// Whether the next version has all rows: no delta can follow the last version, or the changed rows are
    /// too many to be copied.
    pub(super) fn needs_all(&self) -> bool {
        self.base.is_none() || self.marked_bytes() > self.most_held()
    }

    /// Ends a capture that has grown too large.
    pub(super) fn bound_capture(&mut self) {
        let most = self.most_held();
        if self.capture.as_ref().is_some_and(|capture| capture.image().bytes() > most) {
            self.end_capture();
        }
    }

    /// An image without rows. It has the memory of an earlier one, if there was one.
    ///
    /// # Errors
    /// [`TrainError::Memory`].
    pub(super) fn empty_image(&mut self) -> Result<RowImage, TrainError> {
        match self.spare.take() {
            Some(image) => Ok(image),
            None => Ok(RowImage::empty(&self.shapes, &self.rows)?),
        }
    }

    /// Keeps the memory of an image for the next cut, unless it is more than a version should take.
    pub(super) fn recycle(&mut self, mut image: RowImage) {
        if image.bytes() <= self.most_held() {
            image.clear();
            self.spare = Some(image);
        }
    }
}
