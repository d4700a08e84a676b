//! The thread that writes versions while training goes on.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, SyncSender, sync_channel};
use std::time::Duration;

use rayon::ThreadPoolBuilder;

use super::cut::Cut;
use super::image::RowImage;
use super::{CutNotes, PublishOptions, Published};
use crate::bounded_thread::BoundedThread;
use crate::store::retention::{ChainBytes, chain_bytes, retain};
use crate::store::{self, Base, Numbering, Purpose, StoreError, Table, TableRows, Written};
use crate::trainer::TrainError;
use crate::trainer::checkpoint::{DenseCheckpoint, VersionParts};
use crate::types::{TableId, Version};

/// A complete cut to write.
pub(crate) struct Job {
    pub cut: Cut,
    /// The last version.
    pub base: Base,
}

/// A job that has ended.
pub(crate) struct Outcome {
    pub image: RowImage,
    pub dense: DenseCheckpoint,
    pub written: Result<(Base, Published), NotWritten>,
}

/// Why a version was not written.
pub(crate) struct NotWritten {
    pub error: TrainError,
    /// Whether another writer made a version, or the base is damaged, so that no delta can follow.
    pub base_lost: bool,
}

/// The thread has panicked. Its job and the rows of the job are lost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriterGone;

/// The thread. It ends when this is dropped, after the version that it is writing.
pub(crate) struct Writer {
    options: PublishOptions,
    jobs: Option<SyncSender<Box<Job>>>,
    outcomes: Receiver<Outcome>,
    thread: BoundedThread,
    /// How long the end of training waits for a version.
    pub patience: Duration,
    /// Whether the end of training has waited for `patience` without a result. Then it waits no more.
    pub gave_up: bool,
    /// Whether a version is being written, or its outcome waits to be taken.
    pub in_flight: bool,
    /// Whether Train has waited for the version in flight.
    pub waited: bool,
}

impl Writer {
    /// # Errors
    /// [`TrainError::Threads`].
    pub(crate) fn start(options: PublishOptions, patience: Duration) -> Result<Self, TrainError> {
        let (jobs, received) = sync_channel::<Box<Job>>(1);
        let (done, outcomes) = sync_channel(1);
        let of_thread = options.clone();
        // Threads for parallel work, as many as training has, and with its priority, which they inherit.
        let pool = ThreadPoolBuilder::new().num_threads(rayon::current_num_threads());
        let pool = pool.thread_name(|n| format!("publish-{n}")).build();
        let pool = pool.map_err(|e| TrainError::Threads { reason: e.to_string() })?;
        let thread = BoundedThread::start("publish", move || {
            for job in received {
                if done.send(pool.install(|| write(&of_thread, *job))).is_err() {
                    return;
                }
            }
        });
        let thread = thread.map_err(|e| TrainError::Threads { reason: e.to_string() })?;
        let (gave_up, in_flight, waited) = (false, false, false);
        Ok(Self { options, jobs: Some(jobs), outcomes, thread, patience, gave_up, in_flight, waited })
    }

    /// Hands over a job. There must be none in flight. If the thread has ended, another one is started.
    ///
    /// # Errors
    /// The job, if there is no thread.
    pub(crate) fn send(&mut self, job: Box<Job>) -> Result<(), Box<Job>> {
        let Err(job) = self.offer(job) else { return Ok(()) };
        match Self::start(self.options.clone(), self.patience) {
            Ok(another) => *self = another,
            Err(_) => return Err(job),
        }
        self.offer(job)
    }

    fn offer(&mut self, job: Box<Job>) -> Result<(), Box<Job>> {
        let Some(jobs) = &self.jobs else { return Err(job) };
        jobs.send(job).map_err(|SendError(job)| job)?;
        (self.in_flight, self.waited) = (true, false);
        Ok(())
    }

    /// The outcome of the job in flight, if it ends within `patience`.
    ///
    /// # Errors
    /// [`WriterGone`].
    pub(crate) fn wait(&mut self, patience: Duration) -> Result<Option<Outcome>, WriterGone> {
        match self.outcomes.recv_timeout(patience) {
            Ok(outcome) => {
                (self.in_flight, self.gave_up) = (false, false);
                Ok(Some(outcome))
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                self.in_flight = false;
                Err(WriterGone)
            }
        }
    }

    /// Removes the versions that `versions.keep` does not keep.
    pub(crate) fn retain(&self) {
        remove_old(&self.options);
    }

    /// Removes old versions if this error is that of a full disk.
    pub(crate) fn make_room(&self, error: &TrainError) {
        make_room(&self.options, error);
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.jobs = None;
        let patience = if self.gave_up { Duration::ZERO } else { self.patience };
        if !self.thread.wait(patience) {
            tracing::warn!(model = self.options.name, "a version is still being written");
        }
    }
}

fn write(options: &PublishOptions, job: Job) -> Outcome {
    let Job { cut: Cut { mut image, dense, notes, begun, pause }, base } = job;
    image.sort();
    let (full, cursor) = (needs_full(options, base, &image), notes.cursor.clone());
    let version = UnwrittenVersion { image: &image, dense: &dense, notes, base, full };
    let written = match publish(options, version) {
        Ok(Written { base, appeared, bytes }) => {
            let (took, steps) = (begun.elapsed(), dense.training.steps);
            remove_old(options);
            let (version, rows) = (base.version, image.len() as u64);
            let published = Published { version, full, rows, bytes, appeared, took, pause, steps, cursor };
            Ok((base, published))
        }
        Err(error) => {
            make_room(options, &error);
            use StoreError::{Base as BadBase, BaseDiffers, BaseOvertaken, MissingDirectory, MissingFile};
            let base_lost = matches!(
                error,
                TrainError::Store(
                    BaseOvertaken { .. }
                        | BaseDiffers { .. }
                        | BadBase { .. }
                        | MissingDirectory { .. }
                        | MissingFile { .. }
                )
            );
            Err(NotWritten { error, base_lost })
        }
    };
    Outcome { image, dense, written }
}

/// Removes old versions if a version could not be written because the disk is full. One that was in use when
/// the last version was published may be free now.
fn make_room(options: &PublishOptions, error: &TrainError) {
    if matches!(error, TrainError::Store(StoreError::DiskFull { .. })) {
        remove_old(options);
    }
}

fn remove_old(options: &PublishOptions) {
    if let Err(error) = retain(&options.models, &options.name, options.keep) {
        tracing::warn!(model = options.name, %error, "old versions are not removed");
    }
}

/// Most deltas of a chain, and most files of all its deltas together. A reader maps each file, and systems
/// limit the mappings of a process, by default to 65,530 on Linux.
const MOST_DELTAS: usize = 100;
const MOST_FILES: usize = 8192;

/// Whether the next version must be full: the deltas, with this one, exceed their share of the last full
/// version, or they are too many, or one of them was removed, so that no later one could be opened.
fn needs_full(options: &PublishOptions, base: Base, image: &RowImage) -> bool {
    let most = (MOST_FILES / image.tables().max(1)).clamp(1, MOST_DELTAS);
    let chain = chain_bytes(&options.models, &options.name, base.version);
    chain.map_or(true, |ChainBytes { full, deltas, length }| {
        length >= most || (deltas + image.bytes() as u64) as f64 > options.compact_at * full as f64
    })
}

/// A version to write.
struct UnwrittenVersion<'a> {
    /// The rows that changed since `base`.
    image: &'a RowImage,
    dense: &'a DenseCheckpoint,
    notes: CutNotes,
    base: Base,
    /// With all rows, otherwise a delta of `base`.
    full: bool,
}

fn publish(options: &PublishOptions, next: UnwrittenVersion<'_>) -> Result<Written, TrainError> {
    let UnwrittenVersion { image, dense, notes, base, full } = next;
    let (models, name) = (&options.models, options.name.as_str());
    let tables = if full { merged(options, base, image)? } else { Vec::new() };
    let changed = |t: usize| TableRows::Changed(image.rows(t), image, TableId(t as u32));
    let parts = VersionParts {
        rows: if full {
            tables.iter().map(TableRows::from).collect()
        } else {
            (0..image.tables()).map(changed).collect()
        },
        numbering: if full { Numbering::Above(base.version) } else { Numbering::DeltaOf(base) },
        cursor: notes.cursor.as_deref(),
        quality: (notes.quality)(),
    };
    dense.publish(&*options.disk, models, name, parts)
}

/// The tables of the base with the image's rows in front.
fn merged(options: &PublishOptions, base: Base, image: &RowImage) -> Result<Vec<Table>, TrainError> {
    store::check_base(&options.models, &options.name, base)?;
    let (models, name, base) = (&options.models, &options.name, base.version);
    let opened = store::open(models, name, base, Purpose::Train).map_err(|error| match error {
        StoreError::Memory(_) => error,
        // It is not read again, whatever is wrong with it: training has all of its rows.
        error => StoreError::Base { path: models.join(name), base, source: Box::new(error) },
    })?;
    let mut tables = opened.store.into_tables();
    for (t, table) in tables.iter_mut().enumerate() {
        table.add_changed(Version(base.0.saturating_add(1)), image.rows(t), image, TableId(t as u32))?;
    }
    Ok(tables)
}
