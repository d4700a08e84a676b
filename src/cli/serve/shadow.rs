//! The engine of a shadow: its thread runs only when a processor is free.

use std::cell::Cell;

use crate::cli::background;
use crate::engine::Engine;
use crate::predict::{Description, Predict, PredictError};
use crate::types::{Batch, Scores};

/// An engine whose callers are threads of the shadow, which call nothing else. It must compute on the calling
/// thread alone.
pub(crate) struct Background(pub Engine);

thread_local! {
    static IS_IDLE: Cell<bool> = const { Cell::new(false) };
}

impl Predict for Background {
    fn predict(&self, batch: &Batch) -> Result<Scores, PredictError> {
        if !IS_IDLE.replace(true) {
            background::only_when_idle("the shadow computes");
        }
        self.0.predict(batch)
    }

    fn describe(&self) -> Description {
        self.0.describe()
    }

    fn ready(&self) -> bool {
        self.0.ready()
    }
}
