//! Shuts down engines that were removed from a model: joins their threads, with a time limit, and releases
//! their memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::serving_engine::ServingEngine;
use super::shadow::Shadowing;
use crate::bounded_thread::BoundedThread;

/// Engines that were removed from a model, and that no call finds any more.
#[derive(Default)]
pub(crate) struct RetiredEngines {
    pub engines: Vec<Arc<ServingEngine>>,
    pub shadow: Option<Arc<Shadowing>>,
}

impl RetiredEngines {
    /// Joins the threads of the engines, and releases their memory. Returns `false` if that takes longer than
    /// `limit`: a call of a model that is stuck cannot be ended, and the caller has other models to care for.
    pub(crate) fn join(self, model: &str, limit: Duration) -> bool {
        if self.engines.is_empty() && self.shadow.is_none() {
            return true;
        }
        let until = Instant::now() + limit;
        let logs: Vec<_> = self.engines.iter().filter_map(|served| served.learn_log.clone()).collect();
        // On its own thread: a batch that does not end must leave no log locked, and a disk that does not
        // answer no engine in memory.
        let closing = (!logs.is_empty()).then(|| {
            BoundedThread::start("close-learn-logs", move || logs.iter().for_each(|log| log.close()))
        });
        let joining = BoundedThread::start("end-engines", move || {
            self.engines.iter().for_each(|served| served.batcher.close());
            self.engines.iter().for_each(|served| served.batcher.join());
            self.shadow.iter().for_each(|shadow| shadow.end());
            // Before the end of the wait: who unloads a model wants its memory back.
            drop(self);
        });
        let in_time = joining.is_ok_and(|mut joining| joining.wait(limit));
        if !in_time {
            let seconds = limit.as_secs();
            tracing::warn!(model, "a call of the model has not ended after {seconds} s: its memory stays");
        }
        let left = until.saturating_duration_since(Instant::now());
        if closing.is_some_and(|closing| !closing.is_ok_and(|mut closing| closing.wait(left))) {
            let seconds = limit.as_secs();
            tracing::warn!(
                model,
                "the log of learned samples is not closed after {seconds} s: the disk is slow"
            );
        }
        in_time
    }
}
