//! The state of a batcher. A worker answers requests with it, and puts parts of them back into the queue; a
//! caller cancels them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use super::calls::Calls;
use super::cores::Cores;
use super::progress::RequestOutcome;
use super::queue::{Next, Queue, Size, Turns};
use super::split::{AfterPart, Job, RequestPart};
use crate::metrics::ModelMetrics;
use crate::predict::Predict;
use crate::sync::EvenPoisoned;
use crate::types::Batch;

/// Answered batches that are kept to reuse their memory: most batches, and most bytes of each.
const SPARES: usize = 128;
const SPARE_BYTES: usize = 16 << 10;

/// What the workers and the callers of a batcher share.
pub(super) struct BatcherState {
    pub queue: Mutex<QueueState>,
    pub wake: Condvar,
    pub model: Arc<dyn Predict>,
    pub metrics: Arc<ModelMetrics>,
    /// Answered batches, whose memory is reused.
    pub spares: Mutex<Vec<Batch>>,
    /// Where tickets are awaited.
    pub runtime: OnceLock<Handle>,
    /// What the workers compute on; `None` if they only use a processor that is free.
    pub cores: Option<&'static Cores>,
    pub workers: usize,
    pub calls: Calls,
    /// [`super::Batcher::patience`] in microseconds.
    pub patience_us: AtomicU64,
}

/// What the lock of a batcher protects.
pub(super) struct QueueState {
    pub jobs: Queue<Job>,
    /// Workers that sleep without a time limit.
    pub asleep: usize,
    /// Workers that sleep until a batch is due.
    pub timed: usize,
}

impl QueueState {
    /// Whether a sleeping worker should be woken for the queued requests.
    pub(super) fn wants_a_worker(&self, now: Instant) -> bool {
        match self.jobs.next(now) {
            Next::Work => self.asleep + self.timed > 0,
            // One worker must wait until the batch is due, in case the busy workers take longer.
            Next::Wait(_) => self.asleep > 0 && self.timed == 0,
            Next::Sleep | Next::Stop => false,
        }
    }
}

impl BatcherState {
    pub(super) fn spares(&self) -> MutexGuard<'_, Vec<Batch>> {
        self.spares.lock().even_poisoned()
    }

    /// Keeps answered batches for their memory, if they are small and there are not too many.
    pub(super) fn recycle(&self, batches: impl Iterator<Item = Batch>) {
        let small = batches.filter(|batch| Size::of(batch, 0..batch.samples).bytes <= SPARE_BYTES);
        let mut spares = self.spares();
        let room = SPARES.saturating_sub(spares.len());
        spares.extend(small.take(room));
    }

    /// Answers a request, or continues it if this is one of its parts. Returns the batch for reuse.
    pub(super) fn answer(&self, job: Job, outcome: RequestOutcome) -> Option<Batch> {
        match job {
            Job::Part(part) => {
                self.finish(&part, outcome);
                None
            }
            Job::Whole(batch, reply) => {
                reply.send(outcome);
                Some(batch)
            }
        }
    }

    /// Continues a request after one of its parts.
    pub(super) fn finish(&self, part: &RequestPart, outcome: RequestOutcome) {
        match part.finish(outcome) {
            AfterPart::Nothing => {}
            AfterPart::Remove(turns) => self.remove(turns),
            // This worker, or those that it wakes, take them next.
            AfterPart::Repeat(entries) => {
                let mut queue = self.lock_queue();
                entries.into_iter().for_each(|(turn, entry)| queue.jobs.push_again(turn, entry));
            }
        }
    }

    /// Removes the entries of a request from the queue.
    pub(super) fn remove(&self, turns: Turns) {
        let mut queue = self.lock_queue();
        let removed = queue.jobs.remove_all(turns);
        self.set_queue_samples(&queue);
        drop(queue);
        drop(removed);
    }

    pub(super) fn set_queue_samples(&self, queue: &QueueState) {
        self.metrics.batches.queue_samples.set(queue.jobs.held().samples as f64);
    }

    /// As [`super::Batcher::patience`].
    pub(super) fn patience(&self) -> Duration {
        Duration::from_micros(self.patience_us.load(Ordering::Relaxed))
    }

    pub(super) fn lock_queue(&self) -> MutexGuard<'_, QueueState> {
        // No code panics while it holds the lock, so the queue is consistent.
        self.queue.lock().even_poisoned()
    }
}
