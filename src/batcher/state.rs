//! What the workers and the callers of a batcher share: the queue, the model, and batches to be reused.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use super::calls::Calls;
use super::cores::Cores;
use super::progress::Outcome;
use super::queue::{Next, Queue, Size, Turns};
use super::split::{Job, RequestPart, Then};
use crate::metrics::ModelMetrics;
use crate::predict::Predict;
use crate::sync::EvenPoisoned;
use crate::types::Batch;

/// Answered batches that are kept to reuse their memory: most batches, and most bytes of each.
const SPARES: usize = 128;
const SPARE_BYTES: usize = 16 << 10;

/// What the workers and the callers of a batcher share.
pub(super) struct BatcherState {
    pub state: Mutex<QueueState>,
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
    pub queue: Queue<Job>,
    /// Workers that sleep without a time limit.
    pub asleep: usize,
    /// Workers that sleep until a batch is due.
    pub timed: usize,
}

impl QueueState {
    /// Whether a sleeping worker should be woken for the queued requests.
    pub(super) fn wants_a_worker(&self, now: Instant) -> bool {
        match self.queue.next(now) {
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
    pub(super) fn answer(&self, job: Job, outcome: Outcome) -> Option<Batch> {
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
    pub(super) fn finish(&self, part: &RequestPart, outcome: Outcome) {
        match part.finish(outcome) {
            Then::Nothing => {}
            Then::Remove(turns) => self.remove(turns),
            // This worker, or those that it wakes, take them next.
            Then::Repeat(entries) => {
                let mut state = self.state();
                entries.into_iter().for_each(|(turn, entry)| state.queue.push_again(turn, entry));
            }
        }
    }

    /// Removes the entries of a request that is not awaited any more.
    pub(super) fn cancel(&self, turns: Turns) {
        // A worker that only runs when a processor is free may hold the lock for long. It skips the request,
        // because its answer cannot be sent.
        let state = if self.cores.is_some() { Some(self.state()) } else { self.try_state() };
        if let Some(state) = state {
            self.remove_from(state, turns);
        }
    }

    /// Removes the entries of a request from the queue.
    pub(super) fn remove(&self, turns: Turns) {
        self.remove_from(self.state(), turns);
    }

    pub(super) fn remove_from(&self, mut state: MutexGuard<'_, QueueState>, turns: Turns) {
        let removed = state.queue.remove_all(turns);
        self.set_queue_samples(&state);
        drop(state);
        drop(removed);
    }

    pub(super) fn set_queue_samples(&self, state: &QueueState) {
        self.metrics.batches.queue_samples.set(state.queue.held().samples as f64);
    }

    /// As [`super::Batcher::patience`].
    pub(super) fn patience(&self) -> Duration {
        Duration::from_micros(self.patience_us.load(Ordering::Relaxed))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, QueueState> {
        // No code panics while it holds the lock, so the state is consistent.
        self.state.lock().even_poisoned()
    }

    /// `None` while another thread holds the lock.
    pub(super) fn try_state(&self) -> Option<MutexGuard<'_, QueueState>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}
