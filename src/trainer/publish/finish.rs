//! The last version of a run.

use std::time::{Duration, Instant};

use super::cut::CutStart;
use super::{CutNotes, PublishOptions, Publisher, SLOW_WRITE};
use crate::store::retention::chain_bytes;
use crate::store::{Base, Table, check_base};
use crate::trainer::train_state::TrainState;
use crate::trainer::{Pipeline, TrainError};

/// Attempts to write the last version.
const LAST_ATTEMPTS: u32 = 3;

/// The end of training waits for a version this long, and as long as a slow disk needs for all tables.
const LAST_WAIT: Duration = Duration::from_secs(600);
const SLOW_DISK_BYTES_PER_S: usize = 8 << 20;

/// How long the end of training waits for a version of tables of this many bytes.
pub(super) fn last_wait(tables: usize) -> Duration {
    LAST_WAIT + Duration::from_secs((tables / SLOW_DISK_BYTES_PER_S) as u64)
}

impl Publisher {
    /// Publishes the last state of training with rows in memory, and waits until it is written. Returns the
    /// version.
    ///
    /// # Errors
    /// [`TrainError::NotFinite`], [`TrainError::StillWriting`], and when the version cannot be written.
    pub(crate) fn finish(
        &mut self,
        state: &TrainState,
        tables: &[Table],
        notes: &CutNotes,
    ) -> Result<Base, TrainError> {
        self.finish_with(state, notes, |publisher| {
            publisher.begin_cut(state, tables, CutStart::now(notes.clone()))?;
            if let Some(cut) = &mut publisher.cut {
                cut.image.copy_all(tables);
                publisher.send();
            }
            Ok(())
        })
    }

    /// [`Self::finish`] with rows in a scratchpad and a working file, whose disk may be full too.
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub(crate) fn finish_on_disk(
        &mut self,
        state: &TrainState,
        pipeline: &mut Pipeline,
        notes: &CutNotes,
    ) -> Result<Base, TrainError> {
        self.finish_with(state, notes, |publisher| {
            pipeline.flush()?;
            publisher.changed.end_capture();
            publisher.cut_file(state, pipeline.store(), CutStart::now(notes.clone()))
        })
    }

    fn finish_with(
        &mut self,
        state: &TrainState,
        notes: &CutNotes,
        mut cut: impl FnMut(&mut Self) -> Result<(), TrainError>,
    ) -> Result<Base, TrainError> {
        // The rows of a cut that is being copied stay changed: the last version has them.
        if let Some(cut) = self.cut.take() {
            self.take_back(cut.image);
        }
        let (mut failed, mut damaged) = (None, None);
        for attempt in 0..=LAST_ATTEMPTS {
            failed = self.wait_for_writer()?.or(failed);
            if let Some(error @ TrainError::NotFinite { .. }) = failed {
                return Err(error);
            }
            if let Some(base) = self
                .last
                .base
                .filter(|_| self.due.published_steps == Some(state.steps) && self.last.cursor == notes.cursor)
            {
                let PublishOptions { models, name, .. } = &self.options;
                let chain = chain_bytes(models, name, base.version);
                match chain.and_then(|_| check_base(models, name, base)) {
                    Ok(()) => return Ok(base),
                    Err(error) => {
                        tracing::warn!(%error, "the last version is damaged or gone: it is written again");
                        (damaged, self.last.base) = (Some(error.into()), None);
                    }
                }
            }
            if attempt == LAST_ATTEMPTS {
                break;
            }
            if failed.is_some() {
                std::thread::sleep(self.due.retry_after);
            }
            match cut(self) {
                Err(error) if error.is_of_version() => failed = Some(error),
                done => done?,
            }
        }
        Err(failed.or(damaged).unwrap_or(TrainError::Stopped))
    }

    /// Ends publishing. The version in flight is waited for, and reported as all are.
    pub(crate) fn end(&mut self) {
        // After the writer's patience, its drop says that it still writes.
        let _ = self.wait_for_writer();
    }

    /// Removes the versions that `versions.keep` does not keep.
    pub(crate) fn retain(&self) {
        self.writer.retain();
    }

    /// Waits for the version in flight. Returns why it could not be written.
    ///
    /// # Errors
    /// [`TrainError::StillWriting`] after the writer's patience.
    fn wait_for_writer(&mut self) -> Result<Option<TrainError>, TrainError> {
        let (begun, patience) = (Instant::now(), self.writer.patience);
        let mut failed = None;
        while self.writer.in_flight {
            let left = patience.saturating_sub(begun.elapsed());
            if left.is_zero() {
                // Its drop must not wait again.
                self.writer.gave_up = true;
                return Err(TrainError::StillWriting {
                    path: self.options.models.join(&self.options.name),
                    seconds: patience.as_secs(),
                    steps: self.due.published_steps.unwrap_or(0),
                    version: self.last.base.map_or(0, |base| base.version.0),
                });
            }
            failed = self.collect(left.min(SLOW_WRITE)).or(failed);
        }
        Ok(failed)
    }
}
