//! Shuts down engines that were removed from a model: joins their threads, and releases their memory. That
//! unmaps tables, waits for threads and perhaps for a disk, so a thread of its own does it, and never the
//! thread of the network that ends the last call.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::serving_engine::ServingEngine;
use super::shadow::Shadowing;
use crate::bounded_thread::BoundedThread;

/// The first and the longest pause between two looks whether calls still use an engine.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// Engines that were removed from a model, and that no call finds any more.
#[derive(Default)]
pub(crate) struct RetiredEngines {
    pub engines: Vec<Arc<ServingEngine>>,
    pub shadow: Option<Arc<Shadowing>>,
}

impl RetiredEngines {
    /// Joins the threads of the engines, and releases their memory when no call uses them any more. Returns
    /// `false` if that takes longer than `limit`, and goes on: a call of a model that is stuck cannot be
    /// ended, and the caller has other models to care for. Also if no thread can be started for it.
    pub(crate) fn join(self, model: &str, limit: Duration) -> bool {
        if self.engines.is_empty() && self.shadow.is_none() {
            return true;
        }
        let until = Instant::now() + limit;
        let logs: Vec<_> = self.engines.iter().filter_map(|engine| engine.learn_log.clone()).collect();
        // On its own thread: a batch that does not end must leave no log locked, and a disk that does not
        // answer no engine in memory.
        let closing = (!logs.is_empty()).then(|| {
            BoundedThread::start("close-learn-logs", move || logs.iter().for_each(|log| log.close()))
        });
        let joining = BoundedThread::start("end-engines", move || {
            self.engines.iter().for_each(|engine| engine.batcher.close());
            self.engines.iter().for_each(|engine| engine.batcher.join());
            self.shadow.iter().for_each(|shadow| shadow.end());
            let mut pause = FIRST_PAUSE;
            while self.is_used() {
                std::thread::sleep(pause);
                pause = (2 * pause).min(MAX_PAUSE);
            }
            // Before the end of the wait: who unloads a model wants its memory back.
            drop(self);
        });
        let seconds = limit.as_secs();
        let in_time = match joining.map(|mut joining| joining.wait(limit)) {
            Ok(true) => true,
            Ok(false) => {
                tracing::warn!(
                    model,
                    "a call of the model has not ended after {seconds} s: its memory stays"
                );
                false
            }
            Err(error) => {
                tracing::warn!(model, %error, "the thread that ends the engines of the model cannot start");
                false
            }
        };
        let left = until.saturating_duration_since(Instant::now());
        if closing.is_some_and(|closing| !closing.is_ok_and(|mut closing| closing.wait(left))) {
            tracing::warn!(
                model,
                "the log of learned samples is not closed after {seconds} s: the disk is slow"
            );
        }
        in_time
    }

    /// Whether a call still has one of them. No call finds them any more, so this does not become true again.
    fn is_used(&self) -> bool {
        let engine =
            |engine: &Arc<ServingEngine>| Arc::strong_count(engine) > 1 || engine.batcher.is_awaited();
        let shadow = |shadow: &Arc<Shadowing>| Arc::strong_count(shadow) > 1 || shadow.is_awaited();
        self.engines.iter().any(engine) || self.shadow.iter().any(shadow)
    }
}
