//! Publishing versions while training goes on.
//!
//! The publisher remembers which rows each step changes. At a *cut*, between two steps, it takes that set and
//! copies the dense weights. The rows are copied between the next steps ([`image`]), and another thread
//! writes them as a delta of the last version ([`writer`]), or as a full version when the deltas have grown
//! large. One version is in flight at a time. A cut that is due before it is written waits, and then has the
//! rows of both. If writing fails, the rows return to the set of changed rows, so the next version has them.
//!
//! The first version of a run has no base on disk that deltas could apply to, so it has all rows. Train waits
//! until it is written.

mod image;
mod row_set;
mod segments;
mod writer;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::TrainError;
use super::casting::Casting;
use super::checkpoint::{DenseCheckpoint, VersionParts, row_states};
use super::train_state::TrainState;
use crate::rowlog::WorkingFile;
use crate::store::{Base, Rows, Table};
use crate::types::TableId;
use image::{RowImage, TableShape};
use row_set::RowSet;
pub(crate) use segments::RunObserver;
use writer::{Job, Outcome, Writer, WriterGone};

/// How often versions are published.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Every {
    Steps(u64),
    Time(Duration),
}

/// Where and how versions are published.
#[derive(Clone, Debug)]
pub(crate) struct PublishOptions {
    pub models: PathBuf,
    pub name: String,
    /// `None`: only at the end.
    pub every: Option<Every>,
    /// The full versions that stay on disk.
    pub keep: usize,
    /// A full version is written when the deltas exceed this share of the last full version's bytes.
    pub compact_at: f64,
}

/// What the caller adds to a version at its cut.
#[derive(Clone, Debug, Default)]
pub(crate) struct CutNotes {
    /// The position of training in its data, as JSON.
    pub cursor: Option<String>,
    pub quality: BTreeMap<String, f64>,
}

/// A published version.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub(crate) struct Published {
    pub version: u64,
    pub full: bool,
    pub rows: u64,
    pub bytes: u64,
    /// From the cut to the end of writing.
    pub took: Duration,
    /// The longest that a step waited for the cut.
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
    shapes: Vec<TableShape>,
    rows: Vec<u64>,
    /// The rows that changed since the last cut.
    changed: Vec<RowSet>,
    /// The last version, if deltas apply to it.
    base: Option<Base>,
    /// The cut whose rows are being copied.
    cut: Option<Cut>,
    writer: Writer,
    in_flight: bool,
    /// Bytes of rows that are copied between two steps.
    block_bytes: usize,
    /// Steps at the last cut, and when it was.
    last_steps: u64,
    last_cut: Instant,
    /// Steps of the last version that was written.
    published_steps: Option<u64>,
    /// The cursor of the last version that this run wrote. It may move on without a step, at the end of an
    /// epoch.
    published_cursor: Option<String>,
    on_publish: Box<OnPublish>,
}

/// A cut whose rows are not all copied.
struct Cut {
    image: RowImage,
    dense: DenseCheckpoint,
    notes: CutNotes,
    begun: Instant,
    pause: Duration,
}

/// Copying this many bytes takes about as long as a small step.
const BLOCK_BYTES: usize = 256 << 10;

/// How long the publisher waits for the writer before it says so.
const SLOW_WRITE: Duration = Duration::from_secs(30);

/// Attempts to write the last version of a run, and the time between them.
const LAST_ATTEMPTS: u32 = 3;
const RETRY_AFTER: Duration = Duration::from_secs(1);

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
        let tables = &state.schema.tables;
        let rows: Vec<u64> = tables.iter().map(|table| table.stored_rows()).collect();
        let shape = |dim| TableShape { dim, states: row_states(state.optimizer.kind, dim) };
        Ok(Self {
            shapes: tables.iter().map(|table| shape(table.dim)).collect(),
            changed: no_rows(&rows)?,
            rows,
            base,
            cut: None,
            writer: Writer::start(options.clone())?,
            options,
            in_flight: false,
            block_bytes: BLOCK_BYTES,
            last_steps: state.steps,
            last_cut: Instant::now(),
            published_steps: base.map(|_| state.steps),
            published_cursor: None,
            on_publish,
        })
    }

    /// How many more steps may be taken before a cut is due; `None` if time decides.
    pub(crate) fn steps_to_cut(&self, steps: u64) -> Option<u64> {
        match self.options.every {
            Some(Every::Steps(every)) => Some(every - steps % every),
            _ => None,
        }
    }

    /// When a cut is due by time.
    pub(crate) fn cut_at(&self) -> Option<Instant> {
        match self.options.every {
            Some(Every::Time(every)) => Some(self.last_cut + every),
            _ => None,
        }
    }

    /// Copies the rows that a step is about to update, if a cut needs them. With rows in memory it must be
    /// called before every step.
    pub(crate) fn before_step(&mut self, tables: &[Table], casting: &Casting) {
        let Some(cut) = &mut self.cut else { return };
        let begun = Instant::now();
        cut.image.copy_before(tables, casting);
        cut.pause = cut.pause.max(begun.elapsed());
    }

    /// Remembers the rows that a step has updated.
    pub(crate) fn mark(&mut self, casting: &Casting) {
        for (changed, casted) in self.changed.iter_mut().zip(casting.tables()) {
            casted.rows().iter().for_each(|&row| changed.insert(row));
        }
    }

    /// After a step on tables in memory: begins a cut if one is due, or copies some rows of the present one.
    ///
    /// # Errors
    /// [`TrainError::NotFinite`] for dense weights. A version that cannot be written is no error here.
    pub(crate) fn after_step(
        &mut self,
        state: &TrainState,
        tables: &[Table],
        notes: impl FnOnce() -> Result<CutNotes, String>,
    ) -> Result<(), TrainError> {
        self.collect(None);
        if let Some(cut) = &mut self.cut {
            let begun = Instant::now();
            cut.image.copy_block(tables, self.block_bytes);
            cut.pause = cut.pause.max(begun.elapsed());
        } else if self.is_due(state.steps) && !self.in_flight {
            match notes() {
                Ok(notes) => {
                    let begun = self.begin_cut(state, notes, tables);
                    self.report(begun)?;
                }
                Err(reason) => self.refuse(state, reason),
            }
        }
        if self.cut.as_ref().is_some_and(|cut| cut.image.is_complete()) {
            self.send();
        }
        Ok(())
    }

    /// After the last step of a segment of training with rows in a working file, which holds the current
    /// rows: publishes if a cut is due.
    ///
    /// # Errors
    /// As [`Self::after_step`], and [`TrainError::Store`] when rows cannot be read.
    pub(crate) fn after_segment(
        &mut self,
        state: &TrainState,
        file: &WorkingFile,
        notes: impl FnOnce() -> Result<CutNotes, String>,
        begun: Instant,
    ) -> Result<(), TrainError> {
        self.collect(None);
        if !self.is_due(state.steps) || self.in_flight {
            return Ok(());
        }
        match notes() {
            Ok(notes) => {
                let cut = self.cut_file(state, file, notes, begun);
                self.report(cut)
            }
            Err(reason) => {
                self.refuse(state, reason);
                Ok(())
            }
        }
    }

    /// Between two runs of a trainer with rows in memory: as [`Self::after_step`], but copies all rows of the
    /// present cut.
    ///
    /// # Errors
    /// As [`Self::after_step`].
    pub(crate) fn settle(
        &mut self,
        state: &TrainState,
        tables: &[Table],
        notes: impl FnOnce() -> Result<CutNotes, String>,
    ) -> Result<(), TrainError> {
        self.after_step(state, tables, notes)?;
        if let Some(cut) = &mut self.cut {
            cut.image.copy_block(tables, usize::MAX);
            self.send();
        }
        Ok(())
    }

    /// Whether the publisher waits for the next step, to copy rows, to cut, or to report.
    fn waits(&self, steps: u64) -> bool {
        let by_time = matches!(self.options.every, Some(Every::Time(_)));
        self.cut.is_some() || self.in_flight || by_time && steps > self.last_steps
    }

    /// Notes that a version may not be published. The next one is tried when it is due.
    fn refuse(&mut self, state: &TrainState, reason: String) {
        (self.last_steps, self.last_cut) = (state.steps, Instant::now());
        (self.on_publish)(Err(reason));
    }

    /// A version that could not be written is reported, and is no error: the next cut has its rows.
    fn report(&mut self, cut: Result<(), TrainError>) -> Result<(), TrainError> {
        match cut {
            Err(TrainError::Store(error)) => {
                (self.on_publish)(Err(error.to_string()));
                Ok(())
            }
            cut => cut,
        }
    }

    /// Publishes the last state of training with rows in memory, and waits until it is written. Returns the
    /// version.
    ///
    /// # Errors
    /// As [`Self::after_step`], and when the version cannot be written.
    pub(crate) fn finish(
        &mut self,
        state: &TrainState,
        tables: &[Table],
        notes: &CutNotes,
    ) -> Result<Base, TrainError> {
        self.finish_with(state, notes, |publisher| {
            publisher.begin_cut(state, notes.clone(), tables)?;
            if let Some(cut) = &mut publisher.cut {
                cut.image.copy_block(tables, usize::MAX);
                publisher.send();
            }
            Ok(())
        })
    }

    /// [`Self::finish`] with rows in a working file.
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
            publisher.cut_file(state, file, notes.clone(), Instant::now())
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
            self.take_back(&cut.image);
        }
        let mut failed = None;
        for attempt in 0..=LAST_ATTEMPTS {
            if self.in_flight {
                failed = self.collect(Some(SLOW_WRITE)).or(failed);
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
                std::thread::sleep(RETRY_AFTER);
            }
            match cut(self) {
                Err(TrainError::Store(error)) => failed = Some(TrainError::Store(error)),
                done => done?,
            }
        }
        Err(failed.unwrap_or(TrainError::Stopped))
    }

    fn is_due(&self, steps: u64) -> bool {
        match self.options.every {
            None => false,
            // A step whose cut had to wait for the writer is not forgotten.
            Some(Every::Steps(every)) => steps / every > self.last_steps / every,
            Some(Every::Time(every)) => steps > self.last_steps && self.last_cut.elapsed() >= every,
        }
    }

    fn begin_cut(&mut self, state: &TrainState, notes: CutNotes, tables: &[Table]) -> Result<(), TrainError> {
        let begun = Instant::now();
        if self.base.is_none() {
            let rows = tables.iter().map(Rows::from).collect();
            return self.publish_all(state, rows, notes, begun);
        }
        let (dense, changed) = (state.checkpoint()?, self.take_changed(state)?);
        let image = RowImage::new(&self.shapes, changed);
        self.cut = Some(Cut { image, dense, notes, begun, pause: begun.elapsed() });
        Ok(())
    }

    fn cut_file(
        &mut self,
        state: &TrainState,
        file: &WorkingFile,
        notes: CutNotes,
        begun: Instant,
    ) -> Result<(), TrainError> {
        if self.base.is_none() {
            let rows = (0..self.rows.len()).map(|t| Rows::Source(file, TableId(t as u32))).collect();
            return self.publish_all(state, rows, notes, begun);
        }
        let (dense, changed) = (state.checkpoint()?, self.take_changed(state)?);
        let mut image = RowImage::new(&self.shapes, changed);
        if let Err(error) = image.fill(|table, rows, records| file.read(table, rows, records)) {
            self.take_back(&image);
            return Err(error.into());
        }
        self.cut = Some(Cut { image, dense, notes, begun, pause: begun.elapsed() });
        self.send();
        Ok(())
    }

    /// Takes the changed rows, and notes that a cut was made.
    fn take_changed(&mut self, state: &TrainState) -> Result<Vec<RowSet>, TrainError> {
        let none = no_rows(&self.rows)?;
        (self.last_steps, self.last_cut) = (state.steps, Instant::now());
        Ok(std::mem::replace(&mut self.changed, none))
    }

    /// Writes a version with all rows. After a failure, the next cut tries again.
    fn publish_all(
        &mut self,
        state: &TrainState,
        rows: Vec<Rows<'_>>,
        notes: CutNotes,
        begun: Instant,
    ) -> Result<(), TrainError> {
        let dense = state.checkpoint()?;
        let CutNotes { cursor, quality } = notes;
        let parts = VersionParts { rows, base: None, cursor: cursor.as_deref(), quality };
        let written = dense.publish(&self.options.models, &self.options.name, parts);
        let took = begun.elapsed();
        (self.last_steps, self.last_cut) = (state.steps, Instant::now());
        let base = written?;
        self.changed = no_rows(&self.rows)?;
        let (rows, bytes) = (self.rows.iter().sum(), self.writer.bytes(base));
        let (version, steps) = (base.version, state.steps);
        let pause = took;
        let published = Published { version, full: true, rows, bytes, took, pause, steps, cursor };
        self.written(base, published);
        Ok(())
    }

    /// Hands a complete image to the writer.
    fn send(&mut self) {
        let (Some(cut), Some(base)) = (self.cut.take(), self.base) else { return };
        let Cut { image, dense, notes, begun, pause } = cut;
        self.in_flight = self.writer.send(Job { image, dense, notes, base, begun, pause });
    }

    /// Takes the writer's outcome, if there is one; with `patience`, waits for it. Returns why writing
    /// failed.
    fn collect(&mut self, patience: Option<Duration>) -> Option<TrainError> {
        while self.in_flight {
            let outcome = match self.writer.wait(patience.unwrap_or_default()) {
                Ok(Some(outcome)) => outcome,
                Ok(None) if patience.is_none() => return None,
                Ok(None) => {
                    tracing::warn!("still writing the last version");
                    continue;
                }
                Err(WriterGone) => {
                    // Its rows are lost, so the next version must have all rows.
                    (self.in_flight, self.base) = (false, None);
                    let reason = "the thread that publishes versions has ended".to_owned();
                    (self.on_publish)(Err(reason.clone()));
                    return Some(TrainError::Threads { reason });
                }
            };
            self.in_flight = false;
            match outcome {
                Outcome::Written { base, published } => self.written(base, published),
                Outcome::Failed { image, error, overtaken } => {
                    self.take_back(&image);
                    if overtaken {
                        // Another writer made a version, so the next one must have all rows.
                        self.base = None;
                    }
                    (self.on_publish)(Err(error.to_string()));
                    return Some(error);
                }
            }
        }
        None
    }

    fn written(&mut self, base: Base, published: Published) {
        self.base = Some(base);
        self.published_steps = Some(published.steps);
        self.published_cursor.clone_from(&published.cursor);
        (self.on_publish)(Ok(published));
    }

    /// Returns the rows of an image to the changed rows.
    fn take_back(&mut self, image: &RowImage) {
        for (t, changed) in self.changed.iter_mut().enumerate() {
            image.rows(t).iter().for_each(|&row| changed.insert(row));
        }
    }
}

fn no_rows(rows: &[u64]) -> Result<Vec<RowSet>, TrainError> {
    Ok(rows.iter().map(|&rows| RowSet::new(rows)).collect::<Result<_, _>>()?)
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
