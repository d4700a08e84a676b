//! The limits of a log of samples and of its queue, and how many bytes both have.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::kept_bytes;
use super::writer::{GROUP_BYTES, LearnError};
use crate::metrics::ModelMetrics;
use crate::sync::EvenPoisoned;

/// Most bytes of the queue, but it always takes one record.
const QUEUE_BYTES: u64 = if cfg!(test) { 256 << 10 } else { 4 * GROUP_BYTES };
/// Most bytes of a record: its head has their number in 32 bits.
const RECORD_BYTES: u64 = u32::MAX as u64;
/// How often the segments of a full log are counted again for a request.
const RECOUNT_EVERY: Duration = Duration::from_millis(50);

/// Where a learner stores samples, and its limits.
#[derive(Clone, Debug)]
pub(crate) struct LearnerOptions {
    pub dir: PathBuf,
    pub max_bytes: u64,
    pub segment_bytes: u64,
}

impl LearnerOptions {
    /// Most bytes of a record.
    pub(super) fn record_bytes(&self) -> u64 {
        (self.max_bytes.saturating_sub(self.segment_bytes) / 2).min(RECORD_BYTES)
    }
}

/// The bytes of the log and of the queue.
pub(super) struct Room {
    pub options: LearnerOptions,
    /// Most bytes of the log and the queue: `learn.max_bytes`, unless that cannot hold the last segment.
    pub limit: u64,
    pub metrics: Arc<ModelMetrics>,
    used: Mutex<Used>,
    /// Notified when the log was counted for a request, and when the thread ends.
    pub counted: Notify,
    /// Why the log must be opened again.
    pub gone: OnceLock<String>,
}

/// What the log and its queue take now.
pub(super) struct Used {
    pub log: u64,
    pub queued: u64,
    /// When the log was counted.
    pub counted: Instant,
    /// Whether the thread was asked to count the log.
    pub counting: bool,
    /// Whether trainers should know that there is no room.
    pub full: bool,
}

impl Room {
    /// The room of a log whose last segment has this many bytes. Counts the log.
    pub(super) fn new(options: LearnerOptions, last: u64, metrics: Arc<ModelMetrics>) -> Self {
        let limit = options.max_bytes.max(last + options.record_bytes());
        if limit > options.max_bytes {
            tracing::warn!(
                "learned samples: {}: the last file has {last} bytes, so the limit is {limit} bytes until \
                 the next start, instead of learn.max_bytes {}",
                options.dir.display(),
                options.max_bytes
            );
        }
        let used = Used { log: 0, queued: 0, counted: Instant::now(), counting: false, full: false };
        let (used, counted, gone) = (Mutex::new(used), Notify::new(), OnceLock::new());
        let room = Self { options, limit, metrics, used, counted, gone };
        room.count();
        room
    }

    pub(super) fn used(&self) -> MutexGuard<'_, Used> {
        self.used.lock().even_poisoned()
    }

    /// Takes bytes for the queue.
    pub(super) fn reserve(&self, size: u64) -> Result<(), LearnError> {
        let most = self.options.record_bytes();
        if size > most {
            return Err(LearnError::TooLarge { limit: most, size });
        }
        let limit = self.limit;
        let mut used = self.used();
        let (queued, kept) = (used.queued, used.log + used.queued);
        if kept + size > limit {
            return Err(LearnError::Full { limit, kept, size });
        }
        if queued > 0 && queued + size > QUEUE_BYTES {
            return Err(LearnError::Behind { limit: QUEUE_BYTES, queued, size });
        }
        used.full = false;
        used.queued += size;
        Ok(())
    }

    /// Releases `size` bytes of requests that left the queue. `stored` bytes of them are in the log now.
    pub(super) fn leave(&self, size: u64, stored: u64) {
        let mut used = self.used();
        used.queued -= size;
        used.log += stored;
        self.metrics.learn.bytes.set(used.log as f64);
    }

    /// Counts the log again, in which a trainer may have removed segments. Waits for the disk.
    pub(super) fn count(&self) {
        let counted = kept_bytes(&self.options.dir);
        let mut used = self.used();
        match counted {
            Ok(bytes) => used.log = bytes,
            Err(error) => tracing::warn!("learned samples: cannot be counted: {error}"),
        }
        used.counted = Instant::now();
        self.metrics.learn.bytes.set(used.log as f64);
    }

    /// Whether the log was counted just now, and trainers know that it is full.
    pub(super) fn is_known(&self, used: &Used) -> bool {
        used.counted.elapsed() < RECOUNT_EVERY && used.full
    }
}
