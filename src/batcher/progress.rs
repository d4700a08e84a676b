//! When a worker has taken a request. The worker writes it, and whoever waits for the scores can read it at
//! any time: also of a request that has failed, or whose client is gone.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use tokio::sync::oneshot;

use super::BatchError;
use crate::types::Scores;

/// The way of a request through the queue.
#[derive(Debug)]
pub(crate) struct Progress {
    pub queued: Instant,
    taken: Arc<OnceLock<Instant>>,
}

impl Progress {
    /// When a worker took the request, or its first part.
    pub(crate) fn taken(&self) -> Option<Instant> {
        self.taken.get().copied()
    }
}

/// Answers a request once.
pub(crate) struct Reply {
    sender: oneshot::Sender<Result<Scores, BatchError>>,
    taken: Arc<OnceLock<Instant>>,
}

impl Reply {
    /// A reply to a request that is queued now, and what receives it.
    pub(crate) fn new(queued: Instant) -> (Self, oneshot::Receiver<Result<Scores, BatchError>>, Progress) {
        let (sender, answer) = oneshot::channel();
        let taken = Arc::new(OnceLock::new());
        (Self { sender, taken: taken.clone() }, answer, Progress { queued, taken })
    }

    /// Whether nobody waits for the answer any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// A worker has taken the request.
    pub(crate) fn taken(&self, now: Instant) {
        let _ = self.taken.set(now);
    }

    pub(crate) fn send(self, answer: Result<Scores, BatchError>) {
        // If the receiver is gone, the request was cancelled.
        let _ = self.sender.send(answer);
    }
}
