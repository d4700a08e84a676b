//! A full log of learned samples gets room only from a version, and a version needs new samples, which a full
//! log refuses. So if a reader waits at a full log, what was trained is published at once, whatever the
//! interval is. If the gate refuses that, only a person can help, so this is reported from time to time.

use std::time::{Duration, Instant};

use super::Publisher;
use super::due::Due;
use crate::dataset::Shortage;

/// How often it is tried again to publish what was refused, while the log is full. Each refusal is reported.
const RETRY_EVERY: Duration = Duration::from_secs(60);

/// What is known of a full log of learned samples.
#[derive(Default)]
pub(super) struct FullLog {
    /// Set while the log is full: only a new version frees space in it.
    pub shortage: Shortage,
    /// When it was last reported that no version makes room.
    pub told: Option<Instant>,
}

impl FullLog {
    /// Whether a version must be published now, because the reader waits at a full log.
    pub(super) fn needs_version(&self, steps: u64, due: &Due) -> bool {
        // A version that could not be written is tried again by its own interval.
        let may_try = || steps > due.last_steps || self.told.is_none_or(|told| told.elapsed() >= RETRY_EVERY);
        due.has_unpublished(steps) && !due.owed && self.shortage.limit().is_some() && may_try()
    }

    /// Why no version was published, and what follows from it.
    pub(super) fn refused(&mut self, reason: String) -> String {
        let Some(limit) = self.shortage.limit() else { return reason };
        self.told = Some(Instant::now());
        format!(
            "{reason}. The log of learned samples is full (learn.max_bytes, {limit} bytes): the server \
             refuses samples, and training has no more, until a version is published"
        )
    }
}

impl Publisher {
    /// Publishes at once what was trained when the reader waits at a full log.
    #[must_use]
    pub(crate) fn relieving(self, shortage: Shortage) -> Self {
        Self { full_log: FullLog { shortage, told: None }, ..self }
    }
}
