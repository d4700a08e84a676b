//! Engines that no call finds any more, and the end of their threads.

use std::sync::Arc;
use std::time::Duration;

use super::served::Served;
use super::shadow::Shadowing;
use crate::ending::Ending;
use crate::learnlog::Learner;

/// Engines of a model that end.
#[derive(Default)]
pub(crate) struct Ended {
    pub engines: Vec<Arc<Served>>,
    pub shadow: Option<Arc<Shadowing>>,
}

impl Ended {
    /// Ends the threads of the engines, and releases their memory. Returns `false` if that takes longer than
    /// `limit`: a call of a model that is stuck cannot be ended, and the caller has other models to care for.
    pub(crate) fn join(self, model: &str, limit: Duration) -> bool {
        if self.engines.is_empty() && self.shadow.is_none() {
            return true;
        }
        let joining = Ending::start("end-engines", move || {
            self.engines.iter().for_each(|served| served.batcher.join());
            self.engines.iter().filter_map(|served| served.learner.as_ref()).for_each(Learner::join);
            self.shadow.iter().for_each(|shadow| shadow.end());
            // Before the end of the wait: who unloads a model wants its memory back.
            drop(self);
        });
        let in_time = joining.is_ok_and(|mut joining| joining.wait(limit));
        if !in_time {
            let seconds = limit.as_secs();
            tracing::warn!(model, "a call of the model has not ended after {seconds} s: its memory stays");
        }
        in_time
    }
}
