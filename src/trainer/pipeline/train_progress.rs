//! How far Train is, for Plan to wait on; and whether a stage has failed, so that nobody waits for ever.

use std::sync::{Condvar, Mutex, PoisonError};

use super::super::TrainError;

/// Shared by the stages of one run.
#[derive(Debug, Default)]
pub(crate) struct TrainProgress {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    trained: u64,
    stopped: bool,
}

impl TrainProgress {
    /// At the item that was trained last.
    pub(crate) fn at(trained: u64) -> Self {
        Self { state: Mutex::new(State { trained, stopped: false }), changed: Condvar::new() }
    }

    /// Item `item`, and all before it, have trained.
    pub(crate) fn trained(&self, item: u64) {
        self.change(|state| state.trained = item);
    }

    /// No item will train any more.
    pub(crate) fn stop(&self) {
        self.change(|state| state.stopped = true);
    }

    /// Waits until item `item` has trained.
    ///
    /// # Errors
    /// [`TrainError::Stopped`] when it never will.
    pub(crate) fn wait(&self, item: u64) -> Result<(), TrainError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.trained < item {
            if state.stopped {
                return Err(TrainError::Stopped);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }
}
