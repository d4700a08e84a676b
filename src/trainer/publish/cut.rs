//! A cut: the state of training after a step, to be written as a version.

use std::time::{Duration, Instant};

use super::image::RowImage;
use super::writer::Job;
use super::{CutNotes, Published, Publisher};
use crate::rowlog::WorkingFile;
use crate::store::{Numbering, Table, TableRows, Written};
use crate::trainer::TrainError;
use crate::trainer::checkpoint::{DenseCheckpoint, VersionParts};
use crate::trainer::row_set::RowSet;
use crate::trainer::train_state::TrainState;
use crate::types::TableId;

/// A cut that begins.
pub(crate) struct CutStart {
    pub notes: CutNotes,
    pub begun: Instant,
}

impl CutStart {
    pub(crate) fn now(notes: CutNotes) -> Self {
        Self { notes, begun: Instant::now() }
    }
}

/// A cut whose rows may not all be copied.
pub(crate) struct Cut {
    pub image: RowImage,
    pub dense: DenseCheckpoint,
    pub notes: CutNotes,
    pub begun: Instant,
    /// How long the next step waited for it.
    pub pause: Duration,
}

impl Cut {
    fn new(image: RowImage, dense: DenseCheckpoint, start: CutStart) -> Self {
        let CutStart { notes, begun } = start;
        Self { image, dense, notes, begun, pause: begun.elapsed() }
    }
}

impl Publisher {
    /// Makes a cut, unless no version may be published now. A version that cannot be written, or for which
    /// there is no memory, is reported, and is no error: the next cut has its rows.
    pub(crate) fn try_cut(
        &mut self,
        state: &TrainState,
        notes: impl FnOnce() -> Result<CutNotes, String>,
        cut: impl FnOnce(&mut Self, CutStart) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let begun = Instant::now();
        if !self.told_early && !self.is_due(state.steps) {
            self.told_early = true;
            let (model, most) = (&self.options.name, self.changed.early_cut_bytes);
            tracing::info!(model, most, "versions come early: the changed rows take the most bytes allowed");
        }
        let reason = match notes() {
            Ok(notes) => match cut(self, CutStart { notes, begun }) {
                Err(error) if error.is_of_version() => {
                    self.due.note_cut(state.steps);
                    self.due.owed = true;
                    error.to_string()
                }
                made => return made,
            },
            Err(reason) => {
                self.due.note_refused(state.steps);
                self.full_log.refused(reason)
            }
        };
        (self.on_publish)(Err(reason));
        Ok(())
    }

    /// Begins a cut of tables in memory. Their rows are copied later.
    pub(crate) fn begin_cut(
        &mut self,
        state: &TrainState,
        tables: &[Table],
        start: CutStart,
    ) -> Result<(), TrainError> {
        if self.needs_all() {
            let rows = tables.iter().map(TableRows::from).collect();
            return self.publish_all(state, rows, start);
        }
        let (dense, image) = (self.copy_dense(state), self.take_changed(state)?);
        self.cut = Some(Cut::new(image, dense, start));
        Ok(())
    }

    /// Cuts with the captured rows.
    pub(crate) fn cut_captured(&mut self, state: &TrainState, start: CutStart) -> Result<(), TrainError> {
        let dense = self.copy_dense(state);
        let Some(image) = self.changed.take_captured()? else { return Ok(()) };
        self.due.note_cut(state.steps);
        self.cut = Some(Cut::new(image, dense, start));
        self.send();
        Ok(())
    }

    /// Cuts with rows of a working file, which holds the current rows.
    pub(crate) fn cut_file(
        &mut self,
        state: &TrainState,
        file: &WorkingFile,
        start: CutStart,
    ) -> Result<(), TrainError> {
        if self.needs_all() {
            let rows =
                (0..self.changed.rows.len()).map(|t| TableRows::Source(file, TableId(t as u32))).collect();
            return self.publish_all(state, rows, start);
        }
        let (dense, mut image) = (self.copy_dense(state), self.take_changed(state)?);
        if let Err(error) = image.fill(|table, rows, records| file.read(table, rows, records)) {
            self.take_back(image);
            return Err(error.into());
        }
        self.cut = Some(Cut::new(image, dense, start));
        self.send();
        self.begin_capture();
        Ok(())
    }

    /// Copies the dense weights into the memory of an earlier cut.
    fn copy_dense(&mut self, state: &TrainState) -> DenseCheckpoint {
        state.checkpoint_in(self.spare_dense.take())
    }

    /// Takes the changed rows into an image, and notes that a cut was made.
    fn take_changed(&mut self, state: &TrainState) -> Result<RowImage, TrainError> {
        let image = self.changed.take_marked()?;
        self.due.note_cut(state.steps);
        Ok(image)
    }

    /// Writes a version with all rows. After a failure, the next cut tries again.
    fn publish_all(
        &mut self,
        state: &TrainState,
        rows: Vec<TableRows<'_>>,
        start: CutStart,
    ) -> Result<(), TrainError> {
        let dense = self.copy_dense(state);
        let CutStart { notes: CutNotes { cursor, quality }, begun } = start;
        let (numbering, cursor_text) =
            (self.last.highest.map_or(Numbering::Next, Numbering::Above), cursor.as_deref());
        let parts = VersionParts { rows, numbering, cursor: cursor_text, quality: quality() };
        let options = &self.options;
        let written = dense.publish(&*options.disk, &options.models, &options.name, parts);
        let took = begun.elapsed();
        self.due.note_cut(state.steps);
        let Written { base, appeared, bytes } = written.inspect_err(|error| self.writer.make_room(error))?;
        self.changed.marked.iter_mut().for_each(RowSet::clear);
        let rows = self.changed.rows.iter().sum();
        let (version, steps) = (base.version, state.steps);
        let published =
            Published { version, full: true, rows, bytes, appeared, took, pause: took, steps, cursor };
        self.spare_dense = Some(dense);
        self.writer.retain();
        self.written(base, published);
        self.begin_capture();
        Ok(())
    }

    /// Hands a complete image to the writer. If that fails, this is reported, and the rows stay changed.
    pub(crate) fn send(&mut self) {
        let Some(cut) = self.cut.take() else { return };
        let Some(base) = self.last.base else { return self.take_back(cut.image) };
        if let Err(job) = self.writer.send(Box::new(Job { cut, base })) {
            self.take_back(job.cut.image);
            self.writer_gone();
        }
    }
}
