//! The thread that writes the log of a model: group commit.
//!
//! Requests put their records into a queue. The thread takes all that are queued, writes them with one sync,
//! and answers them. Requests that arrive meanwhile wait for the next sync. So the number of syncs per second
//! does not depend on the number of requests.
//!
//! **Limits.** A record is queued only if it fits in `learn.max_bytes` together with the log and the queue.
//! So the limit bounds disk and memory. A request that nobody waits for any more, because its deadline has
//! passed, is not written, unless it was taken from the queue before. A trainer may remove segments at any
//! time; they are counted again when the log seems full.

use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::full::show_full;
use super::{Log, LogError, Position, Record, kept_bytes};
use crate::metrics::ModelMetrics;
use crate::store::StoreError;
use crate::store::disk::SystemDisk;

/// A group takes no more records after this many bytes.
const GROUP_BYTES: u64 = 16 << 20;
/// How often the segments of a full log are counted again.
const RECOUNT_EVERY: Duration = Duration::from_millis(50);

/// Where a learner stores samples, and its limits.
#[derive(Clone, Debug)]
pub(crate) struct LearnerOptions {
    pub dir: PathBuf,
    pub max_bytes: u64,
    pub segment_bytes: u64,
}

/// Why samples were not stored.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum LearnError {
    #[error(
        "learned samples: limit {limit} bytes (learn.max_bytes), the log has {kept}, request has {size}; \
         files of the log are removed when a version was trained on them"
    )]
    Full { limit: u64, kept: u64, size: u64 },
    #[error("learned samples: the server is draining and accepts no more requests")]
    Closed,
    #[error("learned samples: {0}")]
    Log(Arc<LogError>),
    #[error(
        "learned samples: not on disk after {} s, so they may be stored later, or never: {}",
        .after.as_secs_f64(), .log.display()
    )]
    Slow { log: PathBuf, after: Duration },
}

impl LearnError {
    /// Whether there is no room, by the limit or on the disk.
    #[must_use]
    pub(crate) fn is_full(&self) -> bool {
        match self {
            Self::Full { .. } => true,
            Self::Closed | Self::Slow { .. } => false,
            Self::Log(error) => matches!(**error, LogError::Store(StoreError::DiskFull { .. })),
        }
    }
}

/// Stores the samples of one model.
pub(crate) struct Learner {
    room: Arc<Room>,
    queue: Mutex<Option<Sender<Waiting>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A request in the queue.
struct Waiting {
    record: Record,
    reply: oneshot::Sender<Result<Position, LearnError>>,
}

/// The bytes of the log and of the queue.
struct Room {
    options: LearnerOptions,
    metrics: Arc<ModelMetrics>,
    used: Mutex<Used>,
}

struct Used {
    log: u64,
    queued: u64,
    /// When the log was counted.
    counted: Instant,
    /// Whether trainers were told that there is no room.
    told_full: bool,
}

impl Room {
    fn used(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes bytes for the queue.
    fn reserve(&self, size: u64) -> Result<(), LearnError> {
        let limit = self.options.max_bytes;
        let mut used = self.used();
        if used.log + used.queued + size > limit && used.counted.elapsed() >= RECOUNT_EVERY {
            self.count(&mut used);
        }
        let kept = used.log + used.queued;
        if kept + size > limit {
            // No version makes room for a request that an empty log could not take.
            if size <= limit && !used.told_full {
                used.told_full = true;
                show_full(&self.options.dir, Some(limit));
            }
            return Err(LearnError::Full { limit, kept, size });
        }
        if used.told_full {
            used.told_full = false;
            show_full(&self.options.dir, None);
        }
        used.queued += size;
        Ok(())
    }

    /// Gives back the bytes of requests that left the queue, of which `stored` bytes are in the log now.
    fn leave(&self, size: u64, stored: u64) {
        let mut used = self.used();
        used.queued -= size;
        used.log += stored;
        self.metrics.learn.bytes.set(used.log as f64);
    }

    /// Counts the log again, in which a trainer may have removed segments.
    fn recount(&self) {
        self.count(&mut self.used());
    }

    fn count(&self, used: &mut Used) {
        match kept_bytes(&self.options.dir) {
            Ok(bytes) => used.log = bytes,
            Err(error) => tracing::warn!("learned samples: cannot be counted: {error}"),
        }
        used.counted = Instant::now();
        self.metrics.learn.bytes.set(used.log as f64);
    }
}

impl Learner {
    /// Opens the log and starts its thread.
    ///
    /// # Errors
    /// As [`Log::open`], and when the thread cannot be started.
    pub(crate) fn start(options: LearnerOptions, metrics: Arc<ModelMetrics>) -> Result<Self, LogError> {
        let log = Log::open(&SystemDisk, &options.dir, options.segment_bytes)?;
        Self::with_log(log, options, metrics)
    }

    pub(crate) fn with_log(
        log: Log,
        options: LearnerOptions,
        metrics: Arc<ModelMetrics>,
    ) -> Result<Self, LogError> {
        let used = Used { log: 0, queued: 0, counted: Instant::now(), told_full: false };
        // Of a process that was killed.
        show_full(&options.dir, None);
        let room = Arc::new(Room { options, metrics, used: Mutex::new(used) });
        room.recount();
        let (sender, receiver) = mpsc::channel();
        let writer = Writer { log, room: room.clone(), segment: 0 };
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
        let samples = u64::from(record.samples);
        let answer =
            self.submit(record).inspect_err(|_| self.room.metrics.learn.refused.increment(samples))?;
        match tokio::time::timeout(most, answer).await {
            // The thread answers every request, unless it panicked.
            Ok(answer) => answer.unwrap_or(Err(LearnError::Closed)),
            Err(_) => Err(LearnError::Slow { log: self.room.options.dir.clone(), after: most }),
        }
    }

    fn submit(&self, record: Record) -> Result<oneshot::Receiver<Result<Position, LearnError>>, LearnError> {
        let size = record.bytes();
        self.room.reserve(size)?;
        let (reply, answer) = oneshot::channel();
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        match queue.as_ref().map(|queue| queue.send(Waiting { record, reply })) {
            Some(Ok(())) => Ok(answer),
            Some(Err(_)) | None => {
                self.room.leave(size, 0);
                Err(LearnError::Closed)
            }
        }
    }

    /// Refuses further requests, and waits until the queued ones are answered.
    pub(crate) fn join(&self) {
        drop(self.queue.lock().unwrap_or_else(PoisonError::into_inner).take());
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
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
}

impl Writer {
    fn run(mut self, queue: &Receiver<Waiting>) {
        while let Ok(first) = queue.recv() {
            let mut size = first.record.bytes();
            let mut group = vec![first];
            while size < GROUP_BYTES
                && let Ok(next) = queue.try_recv()
            {
                size += next.record.bytes();
                group.push(next);
            }
            self.write(group, size);
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
        let (kept, lost) = records.split_at(positions.len());
        let samples = |records: &[Record]| records.iter().map(|record| u64::from(record.samples)).sum();
        self.room.metrics.learn.samples.increment(samples(kept));
        self.room.metrics.learn.refused.increment(samples(lost));
        let stored = kept.iter().map(Record::bytes).sum();
        self.room.leave(size, stored);
        if let Some(last) = positions.last().filter(|last| last.segment != self.segment) {
            self.segment = last.segment;
            self.room.recount();
        }
        let error = result.err().map(|error| {
            tracing::warn!("learned samples: {error}");
            LearnError::Log(Arc::new(error))
        });
        let mut positions = positions.into_iter();
        for reply in replies {
            let answer = match (positions.next(), &error) {
                (Some(position), _) => Ok(position),
                (None, Some(error)) => Err(error.clone()),
                (None, None) => Err(LearnError::Closed),
            };
            // The client may be gone.
            let _ = reply.send(answer);
        }
    }
}
