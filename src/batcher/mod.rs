//! Dynamic batching: requests are merged into batches, and each request gets its own scores.
//!
//! Each model has a [`Batcher`]. [`Batcher::submit`] puts a request into a bounded queue (`queue.rs`) and
//! returns a [`Ticket`] to await. Worker threads (`worker.rs`) take queued requests, merge them, call
//! [`Predict::predict`] and split the answer by sample range. A request costs one lock to queue and one
//! one-shot channel to answer. A sleeping worker is woken only if no other worker will take the request soon.
//!
//! Dropping a ticket cancels its request: it leaves the queue, if no worker has taken it yet. A worker checks
//! the deadline of a request when it takes it, before any work: under overload also whether the request can
//! still be computed before it.

mod calls;
mod cores;
mod error;
mod overload;
mod progress;
mod queue;
mod split;
mod state;
mod worker;

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::config::BatcherConfig;
use crate::metrics::ModelMetrics;
use crate::predict::Predict;
use crate::sync::EvenPoisoned;
use crate::types::Batch;

use calls::Calls;
pub(crate) use cores::CORES;
use cores::Cores;
pub(crate) use error::BatchError;
pub(crate) use overload::{Computed, TooLate};
pub(crate) use progress::QueueProgress;
use progress::{Reply, RequestOutcome, send_all};
pub(crate) use queue::{Entry, Next, Priority, Queue, QueueLimits, Size, Taken, Terms, Turn, Turns};
use split::{Job, Split};
use state::{BatcherState, QueueState};

/// Most bytes of a merged batch, so that the 32-bit offsets of [`crate::types::Jagged`] cannot overflow.
const BATCH_BYTES: usize = 256 << 20;

/// A call of the model counts as stuck after this many times `batcher.default_deadline_ms`.
const PATIENCE: u32 = 6;

/// The future answer to one request. Dropping it cancels the request.
pub(crate) struct Ticket {
    answer: oneshot::Receiver<RequestOutcome>,
    /// `None` when it was taken out.
    progress: Option<QueueProgress>,
    state: Arc<BatcherState>,
    turns: Turns,
}

/// A request that is not queued yet.
struct NewRequest {
    entry: Entry<(Batch, Reply)>,
    answer: oneshot::Receiver<RequestOutcome>,
    progress: QueueProgress,
}

impl Ticket {
    /// Takes out the progress of the request, which may be asked for when the ticket is gone.
    pub(crate) fn take_progress(&mut self) -> Option<QueueProgress> {
        self.progress.take()
    }
}

impl Future for Ticket {
    type Output = RequestOutcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // The sender is dropped without an answer only by a panic of its worker.
        let failed = |_| Err(BatchError::Failed("panic in its batch".to_owned()));
        Pin::new(&mut self.answer).poll(cx).map(|answer| answer.unwrap_or_else(failed))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // Also closed after the answer was received.
        if self.answer.is_terminated() {
            return;
        }
        self.state.remove(self.turns);
    }
}

/// The queue and the workers of one model.
pub(crate) struct Batcher {
    state: Arc<BatcherState>,
    workers: Mutex<Vec<JoinHandle<()>>>,
}

impl Batcher {
    /// Starts the workers of a model.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub(crate) fn start(
        model: Arc<dyn Predict>,
        metrics: Arc<ModelMetrics>,
        config: &BatcherConfig,
    ) -> std::io::Result<Self> {
        Self::start_on(Some(&CORES), model, metrics, config)
    }

    /// Starts the workers of a model that only uses processors that are free, so the network does not wait
    /// for it.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub(crate) fn start_idle(
        model: Arc<dyn Predict>,
        metrics: Arc<ModelMetrics>,
        config: &BatcherConfig,
    ) -> std::io::Result<Self> {
        Self::start_on(None, model, metrics, config)
    }

    fn start_on(
        cores: Option<&'static Cores>,
        model: Arc<dyn Predict>,
        metrics: Arc<ModelMetrics>,
        config: &BatcherConfig,
    ) -> std::io::Result<Self> {
        let description = model.describe();
        let samples = config.max_samples.min(description.max_samples).max(1);
        let limits = QueueLimits {
            queue: Size { samples: config.queue_samples, bytes: config.queue_bytes },
            batch: Size { samples, bytes: BATCH_BYTES },
            max_delay: config.max_delay,
            default_deadline: config.default_deadline,
            workers: config.workers.max(1),
        };
        let queue = QueueState { jobs: Queue::new(limits), asleep: 0, timed: 0 };
        let state = Arc::new(BatcherState {
            queue: Mutex::new(queue),
            wake: Condvar::new(),
            model,
            metrics,
            spares: Mutex::default(),
            runtime: OnceLock::new(),
            cores,
            workers: config.workers.max(1),
            calls: Calls::default(),
            patience_us: AtomicU64::new(patience_us(config)),
        });
        let batcher = Self { state, workers: Mutex::default() };
        for _ in 0..config.workers.max(1) {
            let state = batcher.state.clone();
            let name = format!("batch-{}", description.model);
            let worker = std::thread::Builder::new().name(name).spawn(move || worker::run(&state))?;
            batcher.workers.lock().even_poisoned().push(worker);
        }
        Ok(batcher)
    }

    /// A batch to be overwritten by the next request: an answered batch, for its memory, or a new one.
    #[must_use]
    pub(crate) fn spare(&self) -> Batch {
        self.state.spares().pop().unwrap_or_default()
    }

    /// Queues a batch, which must have the schema's shape and at least one sample. Called in a task, for that
    /// task or another one of the same runtime.
    ///
    /// # Errors
    /// [`BatchError::QueueSamples`], [`BatchError::QueueBytes`], [`BatchError::Overloaded`] or
    /// [`BatchError::Closed`]. The ticket returns all other errors.
    pub(crate) fn submit(&self, batch: Batch, terms: Terms) -> Result<Ticket, BatchError> {
        let request = self.request(batch, terms);
        self.push(request, self.state.lock_queue())
    }

    fn request(&self, batch: Batch, terms: Terms) -> NewRequest {
        if self.state.runtime.get().is_none()
            && let Ok(runtime) = Handle::try_current()
        {
            let _ = self.state.runtime.set(runtime);
        }
        let queued = Instant::now();
        let (reply, answer, progress) = Reply::new(queued);
        let size = Size::of(&batch, 0..batch.samples);
        NewRequest { entry: Entry { size, queued, terms, item: (batch, reply) }, answer, progress }
    }

    /// The queue is the last parameter, so that it is unlocked before a refused request is dropped.
    fn push(&self, request: NewRequest, mut queue: MutexGuard<'_, QueueState>) -> Result<Ticket, BatchError> {
        let Entry { size, queued, terms, .. } = request.entry;
        let QueueLimits { queue: limit, batch: most, .. } = queue.jobs.limits();
        let displaced =
            queue.jobs.admit(size, queued, terms).map_err(|refusal| BatchError::of(refusal, limit))?;
        let NewRequest { entry, answer, progress } = request;
        let turns = if size.samples > most.samples {
            Split::push(&mut queue.jobs, entry, most.samples)
        } else {
            let (batch, reply) = entry.item;
            let entry = Entry { size, queued, terms, item: Job::Whole(batch, reply) };
            Turns { first: queue.jobs.push(entry), count: 1 }
        };
        self.state.set_queue_samples(&queue);
        let wanted = queue.wants_a_worker(queued);
        drop(queue);
        if wanted {
            self.state.wake.notify_one();
        }
        for entry in displaced {
            self.state.answer(entry.item, Err(BatchError::Displaced));
        }
        Ok(Ticket { answer, progress: Some(progress), state: self.state.clone(), turns })
    }

    /// Changes the limits of the queue and the longest delay. The most samples of a batch stay, because the
    /// model has buffers of that size.
    pub(crate) fn set_queue(&self, config: &BatcherConfig) {
        let mut queue = self.state.lock_queue();
        let limits = QueueLimits {
            queue: Size { samples: config.queue_samples, bytes: config.queue_bytes },
            max_delay: config.max_delay,
            default_deadline: config.default_deadline,
            ..queue.jobs.limits()
        };
        queue.jobs.set_limits(limits);
        drop(queue);
        self.state.patience_us.store(patience_us(config), Ordering::Relaxed);
        // A worker may wait for the old delay.
        self.state.wake.notify_all();
    }

    /// How long a call of the model may take, and a client without a deadline waits for its scores.
    pub(crate) fn patience(&self) -> Duration {
        self.state.patience()
    }

    /// Whether each worker is in a call of the model that does not end.
    pub(crate) fn is_stuck(&self) -> bool {
        let since = Instant::now().checked_sub(self.patience());
        since.is_some_and(|since| self.state.calls.open_since(since) >= self.state.workers)
    }

    /// Refuses new requests. Queued requests are still computed.
    pub(crate) fn close(&self) {
        self.state.lock_queue().jobs.close();
        self.state.wake.notify_all();
    }

    /// Closes the queue, and waits until all requests are computed and the workers have ended. Blocks, so it
    /// must not be called in an async task.
    pub(crate) fn join(&self) {
        self.close();
        let workers = std::mem::take(&mut *self.workers.lock().even_poisoned());
        for worker in workers {
            // A worker catches panics of the model. If it panicked itself, there is nothing left to do.
            let _ = worker.join();
        }
    }

    /// Whether a ticket is left after [`Self::join`]. It has the model.
    pub(crate) fn is_awaited(&self) -> bool {
        Arc::strong_count(&self.state) > 1
    }

    /// Closes the queue and answers queued requests with [`BatchError::Closed`]. Returns their number.
    /// Workers still finish the batches that they are computing.
    pub(crate) fn abandon(&self) -> usize {
        self.close();
        let lost: Vec<Entry<Job>> = self.state.lock_queue().jobs.clear().collect();
        let mut count = 0;
        for entry in lost {
            count += usize::from(!entry.item.is_over());
            self.state.answer(entry.item, Err(BatchError::Closed));
        }
        count
    }
}

impl Drop for Batcher {
    fn drop(&mut self) {
        self.close();
    }
}

fn patience_us(config: &BatcherConfig) -> u64 {
    config.default_deadline.saturating_mul(PATIENCE).as_micros() as u64
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
