//! The progress of Train: Plan waits until an item has trained. When the run ends, a wait fails instead of
//! blocking for ever.

use std::sync::{Condvar, Mutex};

use super::super::TrainError;
use crate::sync::EvenPoisoned;

/// The progress of one run, which its stages share.
#[derive(Debug, Default)]
pub(crate) struct TrainProgress {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    trained: u64,
    stopped: bool,
    /// Whether a thread waits for an item that has not trained.
    #[cfg(test)]
    awaited: bool,
}

impl TrainProgress {
    /// The progress of a run that begins after item `trained`.
    pub(crate) fn at(trained: u64) -> Self {
        Self { state: Mutex::new(State { trained, ..State::default() }), changed: Condvar::new() }
    }

    /// Records that item `item` and all items before it have trained.
    pub(crate) fn trained(&self, item: u64) {
        self.change(|state| state.trained = item);
    }

    /// Records that no more items will train.
    pub(crate) fn stop(&self) {
        self.change(|state| state.stopped = true);
    }

    /// Waits until item `item` has trained.
    ///
    /// # Errors
    /// [`TrainError::Stopped`] if it will not train, because the run has ended.
    pub(crate) fn wait(&self, item: u64) -> Result<(), TrainError> {
        let mut state = self.state.lock().even_poisoned();
        while state.trained < item {
            if state.stopped {
                return Err(TrainError::Stopped);
            }
            #[cfg(test)]
            (state.awaited = true);
            state = self.changed.wait(state).even_poisoned();
        }
        Ok(())
    }

    /// Whether a thread is in [`Self::wait`], and neither [`Self::trained`] nor [`Self::stop`] has been
    /// called since.
    #[cfg(test)]
    pub(crate) fn is_awaited(&self) -> bool {
        self.state.lock().even_poisoned().awaited
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock().even_poisoned();
        change(&mut state);
        #[cfg(test)]
        (state.awaited = false);
        drop(state);
        self.changed.notify_all();
    }
}
