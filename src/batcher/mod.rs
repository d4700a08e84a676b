//! Dynamic batching: many requests in, few calls of the model, each request's own scores out.
//!
//! One [`Batcher`] a model. [`Batcher::submit`] puts a request into a bounded queue (`queue.rs`,
//! pure) and gives a [`Ticket`] to await; worker threads (`worker.rs`) take what is queued, merge
//! it, call [`Predict::predict`] and split the answer by sample range. A request costs one lock to
//! queue and one one-shot channel to answer; a sleeping worker is woken only when none is awake to
//! take the request soon.
//!
//! Dropping a ticket cancels its request: it is not computed if no worker has taken it yet. A
//! deadline is looked at when a worker takes the request, before any work.

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

pub(crate) use queue::{Entry, Limits, Next, Queue, Refused, Size, Taken};

/// Most bytes of converted samples in one merged batch. Keeps the 32-bit offsets of
/// [`crate::types::Jagged`] far from their end.
const BATCH_BYTES: usize = 256 << 20;

/// Batches that are kept for their memory: most of them, and most bytes of one.
const SPARES: usize = 128;
const SPARE_BYTES: usize = 16 << 10;

/// Why a request got no scores.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// The queue holds too many samples.
    #[error("batcher.queue_samples: limit {limit}, {queued} queued, request has {came}")]
    QueueSamples {
        /// The limit.
        limit: usize,
        /// What waited.
        queued: usize,
        /// What came.
        came: usize,
    },
    /// The queue holds too many bytes.
    #[error("batcher.queue_bytes: limit {limit}, {queued} queued, request has {came}")]
    QueueBytes {
        /// The limit.
        limit: usize,
        /// What waited.
        queued: usize,
        /// What came.
        came: usize,
    },
    /// The server is draining.
    #[error("the server is draining and takes no more requests")]
    Closed,
    /// The deadline passed while the request waited.
    #[error("deadline passed after {waited_us} us in the queue, before any work")]
    Expired {
        /// How long it had waited, in microseconds.
        waited_us: u128,
    },
    /// The model refused this request.
    #[error(transparent)]
    Predict(#[from] PredictError),
    /// The model panicked on this request, or answered for another number of samples.
    #[error("model failed: {0}")]
    Failed(String),
}

/// The answer to one request, to be awaited. Dropping it cancels the request.
#[derive(Debug)]
pub struct Ticket(oneshot::Receiver<Result<Scores, BatchError>>);

impl Future for Ticket {
    type Output = Result<Scores, BatchError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // A sender that is dropped without an answer belongs to a queue that was given up.
        Pin::new(&mut self.0).poll(cx).map(|answer| answer.unwrap_or(Err(BatchError::Closed)))
    }
}

/// Where a request's answer goes.
type Reply = oneshot::Sender<Result<Scores, BatchError>>;

/// A request in the queue.
struct Job {
    batch: Batch,
    reply: Reply,
}

/// What the workers and the callers share.
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    model: Arc<dyn Predict>,
    metrics: Arc<ModelMetrics>,
    /// Batches whose request is answered, for their memory.
    spares: Mutex<Vec<Batch>>,
}

struct State {
    queue: Queue<Job>,
    /// Workers that sleep until they are woken.
    asleep: usize,
    /// Workers that sleep until a batch is due.
    watching: usize,
}

impl State {
    /// Whether a sleeping worker should be woken for what waits.
    fn wants_a_worker(&self, now: Instant) -> bool {
        match self.queue.next(now) {
            Next::Work => self.asleep + self.watching > 0,
            // Somebody must watch the clock in case the busy workers take longer than the delay.
            Next::Wait(_) => self.asleep > 0 && self.watching == 0,
            Next::Sleep | Next::Stop => false,
        }
    }
}

impl Shared {
    fn spares(&self) -> MutexGuard<'_, Vec<Batch>> {
        self.spares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the memory of answered requests that are small, and of no more than a few.
    fn recycle(&self, batches: impl Iterator<Item = Batch>) {
        let small = batches.filter(|batch| bytes(batch) <= SPARE_BYTES);
        let mut spares = self.spares();
        let room = SPARES.saturating_sub(spares.len());
        spares.extend(small.take(room));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock, and the state is whole between two calls.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The queue and the workers of one model.
pub struct Batcher {
    shared: Arc<Shared>,
    limits: Limits,
    workers: Mutex<Vec<JoinHandle<()>>>,
}

impl Batcher {
    /// Starts the workers of a model.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(
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
        };
        let state = State { queue: Queue::new(limits), asleep: 0, watching: 0 };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            wake: Condvar::new(),
            model,
            metrics,
            spares: Mutex::default(),
        });
        let batcher = Self { shared, limits, workers: Mutex::default() };
        for _ in 0..config.workers.max(1) {
            let shared = batcher.shared.clone();
            let name = format!("batch-{}", description.model);
            let worker = std::thread::Builder::new().name(name).spawn(move || worker::run(&shared))?;
            batcher.workers.lock().unwrap_or_else(PoisonError::into_inner).push(worker);
        }
        Ok(batcher)
    }

    /// A batch to write the next request over: the memory of one that was answered, if there is one.
    #[must_use]
    pub(crate) fn spare(&self) -> Batch {
        self.shared.spares().pop().unwrap_or_default()
    }

    /// Queues a batch that has the schema's shape and at least one sample.
    ///
    /// # Errors
    /// [`BatchError::QueueSamples`], [`BatchError::QueueBytes`] or [`BatchError::Closed`], at once.
    /// Every other error comes from the ticket.
    pub fn submit(&self, batch: Batch, deadline: Option<Instant>) -> Result<Ticket, BatchError> {
        let (reply, answer) = oneshot::channel();
        let size = Size { samples: batch.samples, bytes: bytes(&batch) };
        let queued = Instant::now();
        let entry = Entry { size, queued, deadline, item: Job { batch, reply } };
        let mut state = self.shared.state();
        state.queue.push(entry).map_err(|refused| self.refusal(refused))?;
        self.shared.metrics.queue_samples.set(state.queue.held().samples as f64);
        let wanted = state.wants_a_worker(queued);
        drop(state);
        if wanted {
            self.shared.wake.notify_one();
        }
        Ok(Ticket(answer))
    }

    /// Takes no more requests; what is queued is still computed.
    pub fn close(&self) {
        self.shared.state().queue.close();
        self.shared.wake.notify_all();
    }

    /// Closes the queue, waits until everything in it is answered and the workers are gone.
    /// Blocks; call it outside of an async task.
    pub fn join(&self) {
        self.close();
        let workers = std::mem::take(&mut *self.workers.lock().unwrap_or_else(PoisonError::into_inner));
        for worker in workers {
            // A worker catches the model's panics; one that died all the same has nothing left to do.
            let _ = worker.join();
        }
    }

    /// Closes the queue and gives up what waits, each with [`BatchError::Closed`]. Says how many
    /// requests that were. What is being computed goes on.
    pub fn abandon(&self) -> usize {
        self.close();
        let lost: Vec<Entry<Job>> = self.shared.state().queue.clear().collect();
        lost.len()
    }

    fn refusal(&self, refused: Refused) -> BatchError {
        let limit = self.limits.queue;
        match refused {
            Refused::Closed => BatchError::Closed,
            Refused::Full { queued, came } if queued.samples + came.samples > limit.samples => {
                BatchError::QueueSamples { limit: limit.samples, queued: queued.samples, came: came.samples }
            }
            Refused::Full { queued, came } => {
                BatchError::QueueBytes { limit: limit.bytes, queued: queued.bytes, came: came.bytes }
            }
        }
    }
}

impl Drop for Batcher {
    fn drop(&mut self) {
        self.close();
    }
}

/// Bytes of a batch's values and offsets.
fn bytes(batch: &Batch) -> usize {
    let columns = batch.features.iter().map(|f| 8 * f.ids.len() + 4 * f.offsets.len());
    4 * batch.dense.len() + columns.sum::<usize>()
}
