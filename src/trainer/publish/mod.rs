//! Publishing versions while training goes on.
//!
//! The publisher remembers which rows each step changes. At a *cut*, between two steps, it takes that set and
//! copies the dense weights. [`due`] decides when. With rows in memory, the next steps copy the rows
//! ([`kept_rows`]). With a scratchpad, they were copied by the steps that changed them ([`capture`]).
//! Another thread writes them as a delta of the last version ([`writer`]), or as a full version when the
//! deltas have grown large. One version is in flight at a time. A cut that is due before it is written waits,
//! and then has the rows of both. If writing fails, the rows return to the set of changed rows, so the next
//! version has them.
//!
//! The first version of a run has no base on disk that deltas could apply to, so it has all rows. Train waits
//! until it is written.
//!
//! The copies take memory, which is kept for the next cut. [`changed_rows`] bounds it: when many rows have
//! changed, a cut is made before its time, and Train waits if the writer is still busy.
//!
//! - `runs`: runs of a trainer between two cuts; `finish`: the last version of a run;
//! - `rest`: pauses of training for the server of the same process;
//! - `shortage`: what a full log of learned samples asks for.

mod capture;
mod changed_rows;
mod cut;
mod due;
mod finish;
mod image;
mod kept_rows;
mod rest;
mod runs;
mod shortage;
mod writer;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::TrainError;
use super::checkpoint::DenseCheckpoint;
use super::train_state::TrainState;
use crate::schema;
use crate::store::disk::Disk;
use crate::store::{Base, Table, versions};
use crate::types::Version;
use changed_rows::ChangedRows;
use cut::Cut;
use due::Due;
pub(crate) use image::RecordParts;
use image::RowImage;
use kept_rows::CopyPace;
pub(crate) use kept_rows::KeptRows;
pub(crate) use rest::TakingOver;
pub(crate) use runs::{RunControl, RunObserver};
use shortage::FullLog;
use writer::{NotWritten, Outcome, Writer, WriterGone};

/// How often versions are published.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Every {
    Steps(u64),
    Time(Duration),
}

/// Where and how versions are published.
#[derive(Clone)]
pub(crate) struct PublishOptions {
    pub models: PathBuf,
    pub name: String,
    pub disk: Arc<dyn Disk + Send>,
    pub every: Every,
    /// The full versions that stay on disk.
    pub keep: usize,
    /// A full version is written when the deltas exceed this share of the last full version's bytes.
    pub compact_at: f64,
}

/// What the caller adds to a version at its cut.
#[derive(Clone)]
pub(crate) struct CutNotes {
    /// The position of training in its data, as JSON.
    pub cursor: Option<String>,
    /// Computes figures by name. This may take long, so the thread that writes does it.
    pub quality: Arc<dyn Fn() -> BTreeMap<String, f64> + Send + Sync>,
}

impl Default for CutNotes {
    fn default() -> Self {
        Self { cursor: None, quality: Arc::new(BTreeMap::new) }
    }
}

/// A published version.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub(crate) struct Published {
    pub version: Version,
    pub full: bool,
    pub rows: u64,
    pub bytes: u64,
    /// Just before its directory got its number: no server found it earlier.
    pub appeared: Instant,
    /// From the cut to the end of writing.
    pub took: Duration,
    /// How long the next step waited for the cut.
    pub pause: Duration,
    /// Steps of the optimizer at the cut.
    pub steps: u64,
    /// The position of training in its data, as JSON.
    pub cursor: Option<String>,
}

/// Called when a version was published, or could not be. In the latter case the text says why.
pub(crate) type OnPublish = dyn FnMut(Result<Published, String>) + Send;

/// Publishes the versions of one model in training.
pub(crate) struct Publisher {
    options: PublishOptions,
    changed: ChangedRows,
    /// The cut whose rows are being copied.
    cut: Option<Cut>,
    /// The dense weights of an earlier cut, whose memory the next one takes.
    spare_dense: Option<DenseCheckpoint>,
    due: Due,
    copy_pace: CopyPace,
    writer: Writer,
    last: LastVersion,
    full_log: FullLog,
    /// When the publisher last returned to training.
    returned: Instant,
    /// How long Train waits for a version in flight when the changed rows take their share of memory.
    slow_write: Duration,
    /// Whether the log says that cuts are made before their time.
    told_early: bool,
    on_publish: Box<OnPublish>,
    /// With a server in this process: training rests while a version is on its way to it.
    taking_over: Option<Box<TakingOver>>,
}

/// What is known of the last version.
struct LastVersion {
    /// The last version, if deltas apply to it.
    base: Option<Base>,
    /// The highest version that was ever on disk, as far as is known. Its directory may be gone.
    highest: Option<Version>,
    /// The cursor of the last version that this run wrote. The end of an epoch changes the cursor without a
    /// step.
    cursor: Option<String>,
}

/// How long the publisher waits for the writer before it says so.
const SLOW_WRITE: Duration = Duration::from_secs(30);

impl Publisher {
    /// A publisher for the model of this state. `base` is the version that training continues from to the
    /// bit, if it is the highest.
    ///
    /// # Errors
    /// [`TrainError::Memory`] for the sets of changed rows, and [`TrainError::Threads`].
    pub(crate) fn new(
        options: PublishOptions,
        state: &TrainState,
        base: Option<Base>,
        on_publish: Box<OnPublish>,
    ) -> Result<Self, TrainError> {
        let record = |table: &schema::TableSchema| state.optimizer.kind.record_layout(table.dim);
        let tables = &state.schema.tables;
        let rows = tables.iter().map(|table| table.stored_rows()).collect();
        let changed = ChangedRows::new(tables.iter().map(record).collect(), rows)?;
        // If the directory cannot be read, writing to it fails too, and says why.
        let highest = versions(&options.models, &options.name).ok().and_then(|mut all| all.pop());
        let highest = highest.max(base.map(|base| base.version));
        Ok(Self {
            writer: Writer::start(options.clone(), finish::last_wait(changed.table_bytes()))?,
            due: Due::new(options.every, state.steps, base.is_some()),
            options,
            changed,
            cut: None,
            // So that the first cut need not wait for memory either.
            spare_dense: Some(state.checkpoint()),
            copy_pace: CopyPace::default(),
            last: LastVersion { base, highest, cursor: None },
            full_log: FullLog::default(),
            returned: Instant::now(),
            slow_write: SLOW_WRITE,
            told_early: false,
            on_publish,
            taking_over: None,
        })
    }

    /// Makes room for versions that a server of this process takes over.
    pub(crate) fn resting_while(mut self, taking_over: Box<TakingOver>) -> Self {
        (self.taking_over, self.copy_pace) = (Some(taking_over), CopyPace::FAST);
        self
    }

    /// Rests after a step if a version is on its way to the server of this process.
    fn rest(&mut self) {
        if let Some(taking_over) = &self.taking_over
            && (self.writer.in_flight || taking_over())
        {
            std::thread::sleep(rest::after(self.returned.elapsed(), self.due.last_cut.elapsed()));
        }
        self.returned = Instant::now();
    }

    /// The most steps that a run may take. A run on a working file ends at a cut, unless the rows are
    /// captured.
    fn steps_to_cut(&self, steps: u64) -> u64 {
        if self.changed.capture.is_none() { self.due.steps_to_cut(steps) } else { u64::MAX }
    }

    /// Begins to capture rows, if training shows them and the next version can be a delta. Without memory,
    /// the next cut reads its rows from the file.
    fn begin_capture(&mut self) {
        if self.last.base.is_some()
            && let Err(error) = self.changed.begin_capture()
        {
            tracing::warn!(model = self.options.name, %error, "rows are not captured");
        }
    }

    /// After a step on tables in memory: begins a cut if one is due, or hands over the present one if its
    /// rows are copied.
    ///
    /// # Errors
    /// [`TrainError::NotFinite`] of the last version, because no later one could be written either. A version
    /// that cannot be written for another reason is no error here.
    fn after_step(
        &mut self,
        state: &TrainState,
        tables: &[Table],
        notes: impl FnOnce() -> Result<CutNotes, String>,
    ) -> Result<(), TrainError> {
        self.poll()?;
        if self.cut.is_none() && self.may_cut(state.steps) {
            self.try_cut(state, notes, |publisher, start| publisher.begin_cut(state, tables, start))?;
        }
        if self.cut.as_ref().is_some_and(|cut| cut.image.is_complete()) {
            self.send();
        }
        self.rest();
        Ok(())
    }

    /// After a step, or a run, whose rows were captured: cuts if this is due.
    ///
    /// # Errors
    /// As [`Self::after_step`].
    fn after_captured(
        &mut self,
        state: &TrainState,
        notes: impl FnOnce() -> Result<CutNotes, String>,
    ) -> Result<(), TrainError> {
        self.poll()?;
        // The capture may have ended. Then the next cut reads its rows from the file.
        if self.changed.capture.is_some() && self.may_cut(state.steps) {
            self.try_cut(state, notes, |publisher, start| publisher.cut_captured(state, start))?;
        }
        self.rest();
        Ok(())
    }

    /// Between two runs of a trainer with rows in memory: as [`Self::after_step`], but copies all rows of the
    /// present cut.
    ///
    /// # Errors
    /// As [`Self::after_step`].
    fn settle(
        &mut self,
        state: &TrainState,
        tables: &[Table],
        notes: impl FnOnce() -> Result<CutNotes, String>,
    ) -> Result<(), TrainError> {
        self.after_step(state, tables, notes)?;
        if let Some(cut) = &mut self.cut {
            cut.image.copy_all(tables);
            self.send();
        }
        Ok(())
    }

    /// Whether the publisher waits for the next step, to copy rows, to cut, or to report.
    fn waits(&self, steps: u64) -> bool {
        self.cut.is_some() || self.writer.in_flight || self.due.waits(steps)
    }

    /// As [`Self::waits`], with a scratchpad. Batches may be held in the stages until more data comes, so a
    /// cut may be due although no step was taken.
    fn waits_on_disk(&self) -> bool {
        self.writer.in_flight || self.due.may_wait()
    }

    /// Whether a cut should be made now and the writer is free.
    fn may_cut(&self, steps: u64) -> bool {
        // If the next version has all rows, none are copied, so nothing is gained by making it early.
        let early = || !self.needs_all() && self.changed.reach_early_cut() && self.due.may_come_early();
        !self.writer.in_flight && (self.is_due(steps) || early())
    }

    /// Whether the next version has all rows: no delta can follow the last version, or the changed rows are
    /// too many to be copied.
    fn needs_all(&self) -> bool {
        self.last.base.is_none() || self.changed.exceed_copies()
    }

    /// Whether the time or the step of the next cut has come.
    fn is_due(&self, steps: u64) -> bool {
        self.full_log.needs_version(steps, &self.due) || self.due.is_time(steps)
    }

    /// Takes the writer's outcome if there is one. Waits for it, once, if the changed rows take their share
    /// of memory. With captured rows, it must be called after every step.
    ///
    /// # Errors
    /// [`TrainError::NotFinite`].
    fn poll(&mut self) -> Result<(), TrainError> {
        let mut failed = self.collect(Duration::ZERO);
        if self.writer.in_flight && !self.writer.waited && self.changed.reach_early_cut() {
            self.writer.waited = true;
            failed = self.collect(self.slow_write);
        }
        self.changed.bound_capture();
        match failed {
            Some(error @ TrainError::NotFinite { .. }) => Err(error),
            _ => Ok(()),
        }
    }

    /// Takes the writer's outcome, waiting for it at most this long. Returns why writing failed.
    fn collect(&mut self, patience: Duration) -> Option<TrainError> {
        if !self.writer.in_flight {
            return None;
        }
        let outcome = match self.writer.wait(patience) {
            Ok(Some(outcome)) => outcome,
            Ok(None) => {
                if !patience.is_zero() {
                    tracing::warn!(model = self.options.name, "still writing the last version");
                }
                return None;
            }
            Err(WriterGone) => return Some(self.writer_gone()),
        };
        let Outcome { image, dense, written } = outcome;
        self.spare_dense = Some(dense);
        match written {
            Ok((base, mut published)) => {
                self.changed.recycle(image);
                if published.full {
                    published.rows = self.changed.rows.iter().sum();
                }
                self.written(base, published);
                None
            }
            Err(NotWritten { error, base_lost }) => {
                self.due.owed = true;
                self.take_back(image);
                if base_lost {
                    // The next version must have all rows.
                    self.last.base = None;
                }
                (self.on_publish)(Err(error.to_string()));
                Some(error)
            }
        }
    }

    /// Goes on without the rows of the last cut, so the next version must have all rows.
    fn writer_gone(&mut self) -> TrainError {
        (self.last.base, self.due.owed) = (None, true);
        self.changed.end_capture();
        let reason = "the thread that publishes versions has ended".to_owned();
        (self.on_publish)(Err(reason.clone()));
        TrainError::Threads { reason }
    }

    fn written(&mut self, base: Base, published: Published) {
        self.last.base = Some(base);
        self.last.highest = self.last.highest.max(Some(base.version));
        self.due.published_steps = Some(published.steps);
        self.last.cursor.clone_from(&published.cursor);
        self.full_log.told = None;
        (self.on_publish)(Ok(published));
    }

    /// Returns the rows of an image to the changed rows. Their records may be older than captured ones, so
    /// the next cut reads them from memory or from the file.
    fn take_back(&mut self, image: RowImage) {
        self.changed.end_capture();
        self.changed.mark_image(image);
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
