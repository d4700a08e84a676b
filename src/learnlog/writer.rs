//! The thread that writes the log of a model: group commit.
//!
//! Requests put their records into a queue. The thread takes all that are queued, writes them with one sync,
//! and answers them. Requests that arrive meanwhile wait for the next sync. So the number of syncs per second
//! does not depend on the number of requests.
//!
//! **Limits.** A record is queued only if it fits in `learn.max_bytes` together with the log and the queue,
//! and the queue itself has a limit, because the disk may hang. A request that was abandoned, because its
//! deadline has passed, is not written, unless it was taken from the queue before. A trainer may remove
//! segments at any time; they are counted again when the log seems full.
//!
//! The last segment always stays, whatever was trained. Its size is that of a segment and one record. So that
//! the log cannot stay full for ever, a record takes at most half of `learn.max_bytes` without a segment
//! ([`LearnerOptions::record_bytes`]): any record fits beside the last segment. A last segment from before
//! the limits were lowered may be larger; until the next start the limit is then what holds it and a record.
//!
//! Only the thread uses the disk. Requests run on the threads of the network, which must not wait for it, and
//! no lock is held meanwhile.

use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::full::show_full;
use super::room::Room;
use super::{LearnerOptions, Log, LogError, Position, Record};
use crate::metrics::ModelMetrics;
use crate::store::StoreError;
use crate::store::disk::SystemDisk;
use crate::sync::EvenPoisoned;

/// A group takes no more records after this many bytes.
pub(super) const GROUP_BYTES: u64 = 16 << 20;
/// How often the segments are counted again for the metric.
const MEASURE_EVERY: Duration = Duration::from_secs(5);

/// Why samples were not stored.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum LearnError {
    #[error(
        "learned samples: limit {limit} bytes (learn.max_bytes), the log has {kept}, request has {size}; \
         files of the log are removed when a version was trained on them"
    )]
    Full { limit: u64, kept: u64, size: u64 },
    #[error("learned samples: limit {limit} bytes that wait for the disk, {queued} wait, request has {size}")]
    Behind { limit: u64, queued: u64, size: u64 },
    #[error(
        "learned samples: limit {limit} bytes of a stored request \
         ((learn.max_bytes - learn.segment_bytes) / 2, and less than 4 GiB), got {size}"
    )]
    TooLarge { limit: u64, size: u64 },
    #[error("learned samples: the log is closed, because the server drains or begins the log again")]
    Closed,
    #[error("learned samples: the writing thread has failed; a restart of the server starts it again")]
    Failed,
    #[error("learned samples: {0}")]
    Log(Arc<LogError>),
    #[error(
        "learned samples: not on disk after {} s, so they may be stored later, or never: {}",
        .after.as_secs_f64(), .log.display()
    )]
    Slow { log: PathBuf, after: Duration },
}

impl LearnError {
    /// Whether there is no room, by a limit or on the disk.
    #[must_use]
    pub(crate) fn is_full(&self) -> bool {
        match self {
            Self::Full { .. } | Self::Behind { .. } | Self::TooLarge { .. } => true,
            Self::Closed | Self::Failed | Self::Slow { .. } => false,
            Self::Log(error) => matches!(**error, LogError::Store(StoreError::DiskFull { .. })),
        }
    }
}

/// Where a stored record is, or why it is not stored.
type Answer = oneshot::Receiver<Result<Position, LearnError>>;

/// Stores the samples of one model.
pub(crate) struct Learner {
    room: Arc<Room>,
    queue: Mutex<Option<Sender<Job>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A disk that takes longer is slow.
const SLOW: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 1000 });

/// What the thread is asked to do.
enum Job {
    Store(Waiting),
    /// Count the log, because it seems to have no room for this many bytes.
    Count(u64),
}

/// A request in the queue.
struct Waiting {
    record: Record,
    reply: oneshot::Sender<Result<Position, LearnError>>,
}

/// A call whose samples are not known to be durable. Counts them as refused at its end, also if the client or
/// a deadline ends the call after the disk was slow.
struct LearnCall<'m> {
    metrics: &'m ModelMetrics,
    samples: u64,
    began: Instant,
    failed: bool,
}

impl Drop for LearnCall<'_> {
    fn drop(&mut self) {
        if self.failed || self.began.elapsed() >= SLOW {
            self.metrics.learn.refused.increment(self.samples);
        }
    }
}

impl Learner {
    /// Opens the log, after a wait of at most `wait` for another process, and starts its thread.
    ///
    /// # Errors
    /// As [`Log::open`], and when the thread cannot be started.
    pub(crate) fn start(
        options: LearnerOptions,
        metrics: Arc<ModelMetrics>,
        wait: Duration,
    ) -> Result<Self, LogError> {
        let log = Log::open_within(wait, &SystemDisk, &options.dir, options.segment_bytes)?;
        Self::with_log(log, options, metrics)
    }

    pub(crate) fn with_log(
        log: Log,
        options: LearnerOptions,
        metrics: Arc<ModelMetrics>,
    ) -> Result<Self, LogError> {
        // A process that was killed may have left the file `full`.
        show_full(&options.dir, None);
        let room = Arc::new(Room::new(options, log.last_bytes(), metrics));
        let (sender, receiver) = mpsc::channel();
        let writer = Writer { log, room: room.clone(), segment: 0, shown_full: false };
        let thread = std::thread::Builder::new().name("learn-write".into());
        let thread = thread.spawn(move || writer.run(&receiver));
        let thread = thread.map_err(|e| LogError::io(&room.options.dir, e))?;
        Ok(Self { room, queue: Mutex::new(Some(sender)), thread: Mutex::new(Some(thread)) })
    }

    /// Stores a record. The answer comes when it is durable, or after this time. If the future is dropped
    /// before, the record may be stored.
    ///
    /// # Errors
    /// [`LearnError`]. The samples are not stored, except that after [`LearnError::Slow`] they may be.
    pub(crate) async fn learn(&self, record: Record, most: Duration) -> Result<Position, LearnError> {
        let (samples, began) = (record.samples.into(), Instant::now());
        let mut call = LearnCall { metrics: &self.room.metrics, samples, began, failed: false };
        let stored = tokio::time::timeout(most, async {
            // The thread answers every request, unless it panicked.
            self.submit(record).await?.await.unwrap_or(Err(LearnError::Failed))
        });
        let stored = stored
            .await
            .unwrap_or_else(|_| Err(LearnError::Slow { log: self.room.options.dir.clone(), after: most }));
        match stored {
            Ok(_) => call.samples = 0,
            Err(_) => call.failed = true,
        }
        stored
    }

    /// Puts a record into the queue.
    async fn submit(&self, record: Record) -> Result<Answer, LearnError> {
        let size = record.bytes();
        let mut reserved = self.room.reserve(size);
        if matches!(reserved, Err(LearnError::Full { .. })) && self.recount(size).await {
            reserved = self.room.reserve(size);
        }
        reserved?;
        let (reply, answer) = oneshot::channel();
        match self.send(Job::Store(Waiting { record, reply })) {
            Ok(()) => Ok(answer),
            Err(error) => {
                self.room.leave(size, 0);
                Err(error)
            }
        }
    }

    /// Lets the thread count a log that seems to have no room for this many bytes, and waits for that.
    /// Returns `false` if it was counted just now.
    async fn recount(&self, size: u64) -> bool {
        let counted = self.room.counted.notified();
        {
            let mut used = self.room.used();
            if self.room.is_known(&used) {
                return false;
            }
            if !used.counting && self.send(Job::Count(size)).is_err() {
                return false;
            }
            used.counting = true;
        }
        counted.await;
        true
    }

    /// Why nothing can be stored any more; `None` as far as is known. The log can be opened again, after
    /// [`Self::join`].
    pub(crate) fn gone(&self) -> Option<&str> {
        // The thread ends only with this, or if it panics.
        let ended = || self.thread.lock().even_poisoned().as_ref().is_some_and(JoinHandle::is_finished);
        match self.room.gone.get() {
            Some(reason) => Some(reason),
            None => ended().then_some("the thread that writes the log has panicked"),
        }
    }

    fn send(&self, job: Job) -> Result<(), LearnError> {
        let queue = self.queue.lock().even_poisoned();
        let queue = queue.as_ref().ok_or(LearnError::Closed)?;
        queue.send(job).map_err(|_| LearnError::Failed)
    }

    /// Refuses further requests, and waits until the queued ones are answered.
    pub(crate) fn join(&self) {
        drop(self.queue.lock().even_poisoned().take());
        let thread = self.thread.lock().even_poisoned().take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("learned samples: the writing thread panicked");
        }
    }
}

/// The state of the thread.
struct Writer {
    log: Log,
    room: Arc<Room>,
    /// The segment of the last record.
    segment: u64,
    /// Whether trainers were told that there is no room.
    shown_full: bool,
}

impl Writer {
    fn run(mut self, queue: &Receiver<Job>) {
        loop {
            match queue.recv_timeout(MEASURE_EVERY) {
                Ok(first) => self.work(first, queue),
                Err(RecvTimeoutError::Timeout) => match self.log.check() {
                    Ok(()) => self.room.count(),
                    Err(error) => self.note(&error),
                },
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Does all that is queued, up to the size of a group.
    fn work(&mut self, first: Job, queue: &Receiver<Job>) {
        let (mut group, mut size, mut counted_for) = (Vec::new(), 0, None);
        let mut next = Some(first);
        while let Some(job) = next.take() {
            match job {
                Job::Store(waiting) => {
                    size += waiting.record.bytes();
                    group.push(waiting);
                }
                Job::Count(size) => counted_for = Some(size),
            }
            if size < GROUP_BYTES {
                next = queue.try_recv().ok();
            }
        }
        if !group.is_empty() {
            self.write(group, size);
        }
        if let Some(size) = counted_for {
            self.count_for(size);
        }
        self.show_full();
    }

    /// Notes why the log must be opened again, if it must.
    fn note(&self, error: &LogError) {
        if matches!(error, LogError::Gone { .. }) {
            self.room.gone.get_or_init(|| error.to_string());
        }
    }

    /// Counts the log for requests that wait for it.
    fn count_for(&mut self, size: u64) {
        self.room.count();
        let mut used = self.room.used();
        used.counting = false;
        used.full |= used.log + used.queued + size > self.room.limit;
        drop(used);
        // Whoever is refused may look for the file.
        self.show_full();
        self.room.counted.notify_waiters();
    }

    /// Tells trainers whether there is no room, if that has changed.
    fn show_full(&mut self) {
        let full = self.room.used().full;
        let shown = full.then_some(self.room.limit);
        if full != self.shown_full && show_full(&self.room.options.dir, shown) {
            self.shown_full = full;
        }
    }

    /// Writes a group of requests, and answers each of them.
    fn write(&mut self, mut group: Vec<Waiting>, size: u64) {
        group.retain(|waiting| !waiting.reply.is_closed());
        let (records, replies): (Vec<Record>, Vec<_>) =
            group.into_iter().map(|waiting| (waiting.record, waiting.reply)).unzip();
        let began = Instant::now();
        let (positions, result) = self.log.append(&records);
        if !records.is_empty() {
            self.room.metrics.learn.sync_seconds.record(began.elapsed());
        }
        let kept = &records[..positions.len()];
        let samples = kept.iter().map(|record| u64::from(record.samples)).sum();
        self.room.metrics.learn.samples.increment(samples);
        let stored = kept.iter().map(Record::bytes).sum();
        self.room.leave(size, stored);
        // The old file `full` is removed before requests that found room are answered.
        self.show_full();
        let new_segment = positions.last().is_some_and(|last| last.segment != self.segment);
        if let Some(last) = positions.last() {
            self.segment = last.segment;
        }
        if new_segment || self.room.used().counted.elapsed() >= MEASURE_EVERY {
            self.room.count();
        }
        let error = result.err().map(|error| {
            tracing::warn!("learned samples: {error}");
            self.note(&error);
            LearnError::Log(Arc::new(error))
        });
        let mut positions = positions.into_iter();
        for reply in replies {
            let answer = match (positions.next(), &error) {
                (Some(position), _) => Ok(position),
                (None, Some(error)) => Err(error.clone()),
                (None, None) => Err(LearnError::Failed),
            };
            // The client may be gone.
            let _ = reply.send(answer);
        }
    }
}

impl Drop for Writer {
    /// Releases the requests that wait for a count, also after a panic.
    fn drop(&mut self) {
        self.room.used().counting = false;
        self.room.counted.notify_waiters();
    }
}
