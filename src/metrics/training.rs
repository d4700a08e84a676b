//! A training in this process: its series, its state and its events.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::{EventKind, Events, TrainingMetrics};
use crate::sync::EvenPoisoned;

/// The state of a training in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) enum TrainingState {
    Running,
    Ended,
    Failed,
}

/// A training in this process.
pub(crate) struct Training {
    pub series: TrainingMetrics,
    state: Mutex<TrainingState>,
    model: String,
    events: Arc<Events>,
}

impl Training {
    /// A training that runs. Nothing is measured yet.
    pub(super) fn new(model: &str, series: TrainingMetrics, events: Arc<Events>) -> Self {
        let measured = [&series.auc, &series.log_loss, &series.calibration];
        measured.into_iter().for_each(|gauge| gauge.set(f64::NAN));
        let state = Mutex::new(TrainingState::Running);
        let training = Self { series, state, model: model.to_owned(), events };
        training.enter(TrainingState::Running);
        training
    }

    pub(crate) fn record(&self, kind: EventKind, text: impl AsRef<str>) {
        self.events.record(kind, &self.model, text);
    }

    /// Records what happened a moment ago.
    pub(crate) fn record_since(&self, kind: EventKind, text: impl AsRef<str>, at: Instant) {
        self.events.record_since(at, kind, &self.model, text);
    }

    pub(super) fn state(&self) -> TrainingState {
        *self.state.lock().even_poisoned()
    }

    /// Enters a state.
    pub(crate) fn enter(&self, state: TrainingState) {
        *self.state.lock().even_poisoned() = state;
        self.series.state.set(match state {
            TrainingState::Running => 1.0,
            TrainingState::Ended => 0.0,
            TrainingState::Failed => -1.0,
        });
    }
}
