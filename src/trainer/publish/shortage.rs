//! A full log of learned samples gets room only from a version, and a version needs new samples, which a full
//! log refuses. So if a reader waits at a full log, what was trained is published at once, whatever the
//! interval is. If the gate refuses that, only a person can help, so this is reported from time to time.

use std::time::{Duration, Instant};

use super::Publisher;
use crate::dataset::Shortage;

/// How often it is tried again to publish what was refused, while the log is full. Each refusal is reported.
const RETRY_EVERY: Duration = Duration::from_secs(60);

impl Publisher {
    /// Publishes at once what was trained when the reader waits at a full log.
    #[must_use]
    pub(crate) fn relieving(self, shortage: Shortage) -> Self {
        Self { shortage, ..self }
    }

    /// Whether a version must be published now, because the reader waits at a full log.
    pub(super) fn must_make_room(&self, steps: u64) -> bool {
        let unpublished = steps > self.due.published_steps.unwrap_or(self.first_steps);
        // A version that could not be written is tried again by its own interval.
        let may_try =
            || steps > self.due.last_steps || self.told_full.is_none_or(|told| told.elapsed() >= RETRY_EVERY);
        unpublished && !self.due.owed && self.shortage.limit().is_some() && may_try()
    }

    /// Why no version was published, and what follows from it.
    pub(super) fn refused(&mut self, reason: String) -> String {
        let Some(limit) = self.shortage.limit() else { return reason };
        self.told_full = Some(Instant::now());
        format!(
            "{reason}. The log of learned samples is full (learn.max_bytes, {limit} bytes): the server \
             refuses samples, and training has no more, until a version is published"
        )
    }
}
