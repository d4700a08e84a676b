//! The log of the samples that clients send for a model. The model is served without it if it cannot be
//! opened, for example because another process writes it or because it is damaged. It is then tried again. A
//! log that was deleted is begun again at the next look at the directory.

use std::sync::{Arc, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use super::status::CallError;
use crate::learnlog::{LearnError, Learner, LearnerOptions};
use crate::metrics::ModelMetrics;
use crate::sync::EvenPoisoned;

/// How long the first opening waits for another process: one that repairs the log has it for a moment.
const REPAIR_WAIT: Duration = Duration::from_millis(300);

/// How often it is tried to open the log. That costs the read of its last segment.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// The log of a model that takes samples.
pub(crate) struct LearnLog {
    model: String,
    options: LearnerOptions,
    metrics: Arc<ModelMetrics>,
    state: RwLock<State>,
}

enum State {
    Open(Arc<Learner>),
    Failed(Failure),
    Closed,
}

/// Why the log could not be opened, and when that is tried again.
#[derive(Clone)]
struct Failure {
    reason: String,
    again: Instant,
}

impl LearnLog {
    /// Opens the log. A failure is logged.
    pub(crate) fn open(model: &str, options: LearnerOptions, metrics: Arc<ModelMetrics>) -> Self {
        let state = match Learner::start(options.clone(), metrics.clone(), REPAIR_WAIT) {
            Ok(learner) => State::Open(Arc::new(learner)),
            Err(error) => State::Failed(failure(model, error.to_string(), None)),
        };
        Self { model: model.to_owned(), options, metrics, state: RwLock::new(state) }
    }

    /// Opens the log if that has failed some time before, or if the log is gone. Waits for the disk.
    pub(crate) fn retry(&self) {
        self.close_if_gone();
        let before = match &*self.state() {
            State::Failed(before) if before.again <= Instant::now() => before.clone(),
            _ => return,
        };
        // Not under the lock, for which requests would wait.
        let opened = Learner::start(self.options.clone(), self.metrics.clone(), Duration::ZERO);
        let mut state = self.state.write().even_poisoned();
        if matches!(*state, State::Closed) {
            return;
        }
        *state = match opened {
            Ok(learner) => {
                tracing::info!(model = self.model, "the model takes learned samples again");
                State::Open(Arc::new(learner))
            }
            Err(error) => State::Failed(failure(&self.model, error.to_string(), Some(&before))),
        };
    }

    /// Closes the log if its files are gone.
    fn close_if_gone(&self) {
        let (learner, reason) = match &*self.state() {
            State::Open(learner) => match learner.gone() {
                Some(reason) => (learner.clone(), reason.to_owned()),
                None => return,
            },
            _ => return,
        };
        // It may have the lock of a log of which only some files are gone.
        learner.join();
        let mut state = self.state.write().even_poisoned();
        if matches!(&*state, State::Open(now) if Arc::ptr_eq(now, &learner)) {
            let failure = failure(&self.model, reason, None);
            *state = State::Failed(Failure { again: Instant::now(), ..failure });
        }
    }

    fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().even_poisoned()
    }

    /// Why the log could not be opened.
    pub(crate) fn failure(&self) -> Option<String> {
        match &*self.state() {
            State::Failed(failure) => Some(failure.reason.clone()),
            State::Open(_) | State::Closed => None,
        }
    }

    /// # Errors
    /// When the log is not open.
    pub(crate) fn learner(&self) -> Result<Arc<Learner>, CallError> {
        match &*self.state() {
            State::Open(learner) => Ok(learner.clone()),
            State::Failed(Failure { reason, .. }) => {
                Err(CallError::NoLearnLog { model: self.model.clone(), reason: reason.clone() })
            }
            State::Closed => Err(LearnError::Closed.into()),
        }
    }

    /// Counts samples that were sent while the log was not open.
    pub(crate) fn count_refused(&self, samples: usize) {
        self.metrics.learn.refused.increment(samples as u64);
    }

    /// Refuses further samples, and waits until the queued ones are on disk.
    pub(crate) fn close(&self) {
        let state = {
            let mut state = self.state.write().even_poisoned();
            std::mem::replace(&mut *state, State::Closed)
        };
        if let State::Open(learner) = state {
            learner.join();
        }
    }
}

/// Logs a failure, unless it is the same as before.
fn failure(model: &str, reason: String, before: Option<&Failure>) -> Failure {
    if before.is_none_or(|before| before.reason != reason) {
        tracing::warn!(model, reason, "the model takes no learned samples; its log is tried again");
    }
    Failure { reason, again: Instant::now() + RETRY_AFTER }
}
