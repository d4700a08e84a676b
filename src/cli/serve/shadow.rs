//! The engine of a shadow, which computes only when a processor is free.

use std::sync::Arc;

use crate::cli::background;
use crate::engine::Engine;
use crate::predict::{Description, Predict, PredictError};
use crate::types::{Batch, Scores};

/// An engine with a thread of its own. Only that thread waits for a free processor: its caller has locks that
/// requests need, too.
pub(crate) struct Background {
    engine: Engine,
    thread: Arc<rayon::ThreadPool>,
}

impl Background {
    /// # Errors
    /// When the system cannot start a thread.
    pub(crate) fn new(engine: Engine) -> anyhow::Result<Self> {
        let thread = Arc::new(background::idle_pool("shadow", 1, "the shadow computes")?);
        Ok(Self { engine: engine.with_threads(thread.clone()), thread })
    }
}

impl Predict for Background {
    fn predict(&self, batch: &Batch) -> Result<Scores, PredictError> {
        self.thread.install(|| self.engine.predict(batch))
    }

    fn describe(&self) -> Description {
        self.engine.describe()
    }

    fn ready(&self) -> bool {
        self.engine.ready()
    }
}
