//! How far a request has come. Its workers write it, and whoever waits for its scores can read it at any
//! time: also of a request that has failed, or whose client is gone.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tokio::sync::oneshot;

use super::BatchError;
use crate::types::{Scores, Times};

/// The steps of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Steps {
    pub queued: Instant,
    /// When a worker took it, or its first part.
    pub taken: Option<Instant>,
    /// When a worker answered it.
    pub answered: Option<Instant>,
    /// What its batches took, which other requests may share.
    pub times: Times,
}

/// The steps of a request that goes on.
#[derive(Clone, Debug)]
pub(crate) struct Progress(Arc<Mutex<Steps>>);

impl Progress {
    pub(crate) fn steps(&self) -> Steps {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update(&self, change: impl FnOnce(&mut Steps)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Answers a request once.
pub(crate) struct Reply {
    sender: oneshot::Sender<Result<Scores, BatchError>>,
    progress: Progress,
}

impl Reply {
    /// A reply to a request that is queued now, and what receives it.
    pub(crate) fn new(queued: Instant) -> (Self, oneshot::Receiver<Result<Scores, BatchError>>, Progress) {
        let (sender, answer) = oneshot::channel();
        let steps = Steps { queued, taken: None, answered: None, times: Times::default() };
        let progress = Progress(Arc::new(Mutex::new(steps)));
        (Self { sender, progress: progress.clone() }, answer, progress)
    }

    /// Whether nobody waits for the answer any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// A worker has taken the request.
    pub(crate) fn taken(&self, now: Instant) {
        self.progress.update(|steps| steps.taken = Some(now));
    }

    pub(crate) fn send(self, answer: Result<Scores, BatchError>) {
        self.progress.update(|steps| {
            steps.answered = Some(Instant::now());
            steps.times = answer.as_ref().map(|scores| scores.times).unwrap_or_default();
        });
        // If the receiver is gone, the request was cancelled.
        let _ = self.sender.send(answer);
    }
}
