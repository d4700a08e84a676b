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
        // The shadow has one, too: neither waits for a call of the other that does not end.
        let Self { engines, shadow } = self;
        let shadow = shadow.map(|shadow| BoundedThread::start("end-shadow", move || end_shadow(shadow)));
        let engines = BoundedThread::start("end-engines", move || end_engines(engines));
        let seconds = limit.as_secs();
        let mut in_time = true;
        for ending in shadow.into_iter().chain([engines]) {
            let left = until.saturating_duration_since(Instant::now());
            match ending.map(|mut ending| ending.wait(left)) {
                Ok(true) => continue,
                Ok(false) => tracing::warn!(
                    model,
                    "a call of the model has not ended after {seconds} s: its memory stays"
                ),
                Err(error) => {
                    tracing::warn!(model, %error, "a thread that ends engines of the model cannot start");
                }
            }
            in_time = false;
        }
        let left = until.saturating_duration_since(Instant::now());
        if closing.is_some_and(|closing| !closing.is_ok_and(|mut closing| closing.wait(left))) {
            tracing::warn!(
                model,
                "the log of learned samples is not closed after {seconds} s: the disk is slow"
            );
        }
        in_time
    }
}

/// Ends engines and releases their memory, when no call has one any more. No call finds them, so it does not
/// get one later.
fn end_engines(engines: Vec<Arc<ServingEngine>>) {
    engines.iter().for_each(|engine| engine.batcher.close());
    engines.iter().for_each(|engine| engine.batcher.join());
    let is_used = |engine: &Arc<ServingEngine>| Arc::strong_count(engine) > 1 || engine.batcher.is_awaited();
    wait_while(|| engines.iter().any(is_used));
}

/// Does the same for a shadow.
fn end_shadow(shadow: Arc<Shadowing>) {
    shadow.end();
    wait_while(|| Arc::strong_count(&shadow) > 1 || shadow.is_awaited());
}

fn wait_while(is_used: impl Fn() -> bool) {
    let mut pause = FIRST_PAUSE;
    while is_used() {
        std::thread::sleep(pause);
        pause = (2 * pause).min(MAX_PAUSE);
    }
}
