//! Dynamic batching: requests are merged into batches, and each request gets its own scores.
//!
//! Each model has a [`Batcher`]. [`Batcher::submit`] puts a request into a bounded queue (`queue.rs`) and
//! returns a [`Ticket`] to await. Worker threads (`worker.rs`) take queued requests, merge them, call
//! [`Predict::predict`] and split the answer by sample range. A request costs one lock to queue and one
//! one-shot channel to answer. A sleeping worker is woken only if no other worker will take the request soon.
//!
//! Dropping a ticket cancels its request: it is not computed if no worker has taken it yet. A worker checks
//! the deadline of a request when it takes it, before any work.

mod overload;
mod queue;
mod worker;

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::Instant;

use tokio::sync::oneshot;

use crate::config::BatcherConfig;
use crate::metrics::ModelMetrics;
use crate::predict::{Predict, PredictError};
use crate::types::{Batch, Scores};

pub(crate) use overload::{Computed, TooLate};
pub(crate) use queue::{Entry, Limits, Next, Queue, Refused, Size, Taken};

/// Most bytes of a merged batch, so that the 32-bit offsets of [`crate::types::Jagged`] cannot overflow.
const BATCH_BYTES: usize = 256 << 20;

/// Answered batches that are kept to reuse their memory: most batches, and most bytes of each.
const SPARES: usize = 128;
const SPARE_BYTES: usize = 16 << 10;

/// Why a request got no scores.
#[allow(missing_docs)] // the error texts document the variants
#[derive(Debug, thiserror::Error)]
pub(crate) enum BatchError {
    #[error("batcher.queue_samples: limit {limit}, {queued} queued, request has {size}")]
    QueueSamples { limit: usize, queued: usize, size: usize },
    #[error("batcher.queue_bytes: limit {limit}, {queued} queued, request has {size}")]
    QueueBytes { limit: usize, queued: usize, size: usize },
    #[error(
        "batcher: overloaded: the requests before this one take about {} ms, it may wait {} ms (a twentieth \
         of its time until the deadline)", .0.wait.as_millis(), .0.limit.as_millis()
    )]
    Overloaded(TooLate),
    #[error("the server is draining, or the model is being unloaded: no more requests are accepted")]
    Closed,
    #[error("deadline passed after {waited_us} us in the queue, before any work")]
    Expired { waited_us: u128 },
    #[error(transparent)]
    Predict(#[from] PredictError),
    /// The model panicked, or returned another number of scores than samples.
    #[error("model failed: {0}")]
    Failed(String),
}

/// The future answer to one request. Dropping it cancels the request.
#[derive(Debug)]
pub(crate) struct Ticket(oneshot::Receiver<Result<Scores, BatchError>>);

impl Future for Ticket {
    type Output = Result<Scores, BatchError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // The sender is dropped without an answer only by a panic of its worker.
        let failed = |_| Err(BatchError::Failed("panic in its batch".to_owned()));
        Pin::new(&mut self.0).poll(cx).map(|answer| answer.unwrap_or_else(failed))
    }
}

type Reply = oneshot::Sender<Result<Scores, BatchError>>;

/// A queued request.
struct Job {
    batch: Batch,
    reply: Reply,
}

/// Shared by workers and callers.
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    model: Arc<dyn Predict>,
    metrics: Arc<ModelMetrics>,
    /// Answered batches, whose memory is reused.
    spares: Mutex<Vec<Batch>>,
}

struct State {
    queue: Queue<Job>,
    /// Workers that sleep without a time limit.
    asleep: usize,
    /// Workers that sleep until a batch is due.
    timed: usize,
}

impl State {
    /// Whether a sleeping worker should be woken for the queued requests.
    fn wants_a_worker(&self, now: Instant) -> bool {
        match self.queue.next(now) {
            Next::Work => self.asleep + self.timed > 0,
            // One worker must wait until the batch is due, in case the busy workers take longer.
            Next::Wait(_) => self.asleep > 0 && self.timed == 0,
            Next::Sleep | Next::Stop => false,
        }
    }
}

impl Shared {
    fn spares(&self) -> MutexGuard<'_, Vec<Batch>> {
        self.spares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps answered batches for their memory, if they are small and there are not too many.
    fn recycle(&self, batches: impl Iterator<Item = Batch>) {
        let small = batches.filter(|batch| bytes(batch) <= SPARE_BYTES);
        let mut spares = self.spares();
        let room = SPARES.saturating_sub(spares.len());
        spares.extend(small.take(room));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock, so the state is consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The queue and the workers of one model.
pub(crate) struct Batcher {
    shared: Arc<Shared>,
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
        let description = model.describe();
        let samples = config.max_samples.min(description.max_samples).max(1);
        let limits = Limits {
            queue: Size { samples: config.queue_samples, bytes: config.queue_bytes },
            batch: Size { samples, bytes: BATCH_BYTES },
            max_delay: config.max_delay,
            default_deadline: config.default_deadline,
            workers: config.workers.max(1),
        };
        let state = State { queue: Queue::new(limits), asleep: 0, timed: 0 };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            wake: Condvar::new(),
            model,
            metrics,
            spares: Mutex::default(),
        });
        let batcher = Self { shared, workers: Mutex::default() };
        for _ in 0..config.workers.max(1) {
            let shared = batcher.shared.clone();
            let name = format!("batch-{}", description.model);
            let worker = std::thread::Builder::new().name(name).spawn(move || worker::run(&shared))?;
            batcher.workers.lock().unwrap_or_else(PoisonError::into_inner).push(worker);
        }
        Ok(batcher)
    }

    /// A batch to be overwritten by the next request: an answered batch, for its memory, or a new one.
    #[must_use]
    pub(crate) fn spare(&self) -> Batch {
        self.shared.spares().pop().unwrap_or_default()
    }

    /// Queues a batch, which must have the schema's shape and at least one sample.
    ///
    /// # Errors
    /// [`BatchError::QueueSamples`], [`BatchError::QueueBytes`], [`BatchError::Overloaded`] or
    /// [`BatchError::Closed`]. The ticket returns all other errors.
    pub(crate) fn submit(&self, batch: Batch, deadline: Option<Instant>) -> Result<Ticket, BatchError> {
        let (reply, answer) = oneshot::channel();
        let size = Size { samples: batch.samples, bytes: bytes(&batch) };
        let queued = Instant::now();
        let entry = Entry { size, queued, deadline, item: Job { batch, reply } };
        let mut state = self.shared.state();
        let limit = state.queue.limits().queue;
        state.queue.push(entry).map_err(|refused| refusal(refused, limit))?;
        self.shared.metrics.batches.queue_samples.set(state.queue.held().samples as f64);
        let wanted = state.wants_a_worker(queued);
        drop(state);
        if wanted {
            self.shared.wake.notify_one();
        }
        Ok(Ticket(answer))
    }

    /// Changes the limits of the queue and the longest delay. The most samples of a batch stay, because the
    /// model has buffers of that size.
    pub(crate) fn set_queue(&self, config: &BatcherConfig) {
        let mut state = self.shared.state();
        let queue = Size { samples: config.queue_samples, bytes: config.queue_bytes };
        let limits = Limits {
            queue,
            max_delay: config.max_delay,
            default_deadline: config.default_deadline,
            ..state.queue.limits()
        };
        state.queue.set_limits(limits);
        drop(state);
        // A worker may wait for the old delay.
        self.shared.wake.notify_all();
    }

    /// Refuses new requests. Queued requests are still computed.
    pub(crate) fn close(&self) {
        self.shared.state().queue.close();
        self.shared.wake.notify_all();
    }

    /// Closes the queue, and waits until all requests are answered and the workers have ended. Blocks, so it
    /// must not be called in an async task.
    pub(crate) fn join(&self) {
        self.close();
        let workers = std::mem::take(&mut *self.workers.lock().unwrap_or_else(PoisonError::into_inner));
        for worker in workers {
            // A worker catches panics of the model. If it panicked itself, there is nothing left to do.
            let _ = worker.join();
        }
    }

    /// Closes the queue and answers queued requests with [`BatchError::Closed`]. Returns their number.
    /// Workers still finish the batches that they are computing.
    pub(crate) fn abandon(&self) -> usize {
        self.close();
        let lost: Vec<Entry<Job>> = self.shared.state().queue.clear().collect();
        let count = lost.len();
        lost.into_iter().for_each(|entry| worker::answer(entry.item.reply, Err(BatchError::Closed)));
        count
    }
}

impl Drop for Batcher {
    fn drop(&mut self) {
        self.close();
    }
}

fn refusal(refused: Refused, limit: Size) -> BatchError {
    match refused {
        Refused::Closed => BatchError::Closed,
        Refused::TooLate(late) => BatchError::Overloaded(late),
        Refused::Full { queued, size } if queued.samples + size.samples > limit.samples => {
            BatchError::QueueSamples { limit: limit.samples, queued: queued.samples, size: size.samples }
        }
        Refused::Full { queued, size } => {
            BatchError::QueueBytes { limit: limit.bytes, queued: queued.bytes, size: size.bytes }
        }
    }
}

/// Bytes of a batch's values and offsets.
fn bytes(batch: &Batch) -> usize {
    let columns = batch.features.iter().map(|f| 8 * f.ids.len() + 4 * f.offsets.len());
    4 * batch.dense.len() + columns.sum::<usize>()
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
