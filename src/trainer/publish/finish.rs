//! The last version of a run.

use std::time::Instant;

use super::{CutNotes, Publisher, SLOW_WRITE};
use crate::rowlog::WorkingFile;
use crate::store::{Base, Table};
use crate::trainer::TrainError;
use crate::trainer::train_state::TrainState;

/// Attempts to write the last version.
const LAST_ATTEMPTS: u32 = 3;

impl Publisher {
    /// Publishes the last state of training with rows in memory, and waits until it is written. Returns the
    /// version.
    ///
    /// # Errors
    /// [`TrainError::NotFinite`] for weights, and when the version cannot be written.
    pub(crate) fn finish(
        &mut self,
        state: &TrainState,
        tables: &[Table],
        notes: &CutNotes,
    ) -> Result<Base, TrainError> {
        self.finish_with(state, notes, |publisher| {
            publisher.begin_cut(state, (notes.clone(), Instant::now()), tables)?;
            if let Some(cut) = &mut publisher.cut {
                cut.image.copy_block(tables, usize::MAX);
                publisher.send();
            }
            Ok(())
        })
    }

    /// [`Self::finish`] with rows in a working file, which holds the current rows.
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub(crate) fn finish_file(
        &mut self,
        state: &TrainState,
        file: &WorkingFile,
        notes: &CutNotes,
    ) -> Result<Base, TrainError> {
        self.finish_with(state, notes, |publisher| {
            publisher.end_capture();
            publisher.cut_file(state, file, (notes.clone(), Instant::now()))
        })
    }

    fn finish_with(
        &mut self,
        state: &TrainState,
        notes: &CutNotes,
        cut: impl Fn(&mut Self) -> Result<(), TrainError>,
    ) -> Result<Base, TrainError> {
        // The rows of a cut that is being copied stay changed: the last version has them.
        if let Some(cut) = self.cut.take() {
            self.take_back(cut.image);
        }
        let mut failed = None;
        for attempt in 0..=LAST_ATTEMPTS {
            while self.in_flight {
                failed = self.collect(SLOW_WRITE).or(failed);
            }
            if let Some(base) = self.base.filter(|_| {
                self.published_steps == Some(state.steps) && self.published_cursor == notes.cursor
            }) {
                return Ok(base);
            }
            if attempt == LAST_ATTEMPTS {
                break;
            }
            if failed.is_some() {
                std::thread::sleep(self.retry_after);
            }
            match cut(self) {
                Err(TrainError::Store(error)) => failed = Some(TrainError::Store(error)),
                done => done?,
            }
        }
        Err(failed.unwrap_or(TrainError::Stopped))
    }
}
