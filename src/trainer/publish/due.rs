//! When the next cut is due: by steps or by time, and again after a version that could not be written.

use std::time::{Duration, Instant};

use super::Every;

const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A version that could not be written is tried again after this time, or the interval if that is less.
const RETRY_OWED: Duration = Duration::from_secs(10);

/// What decides when the next cut is made, apart from memory and the log of learned samples.
pub(super) struct Due {
    every: Every,
    /// The time between two attempts to write a version, unless the interval says otherwise.
    pub retry_after: Duration,
    /// The same while no step is taken.
    pub retry_owed: Duration,
    /// Steps at the last cut, and when it was.
    pub last_steps: u64,
    pub last_cut: Instant,
    /// Whether the last cut could not be written. Then the next one does not wait for a step.
    pub owed: bool,
    /// Whether the last cut was refused. Then the next one does not come early.
    refused: bool,
    /// Steps of the last version that was written.
    pub published_steps: Option<u64>,
    /// Steps at the beginning of the run.
    first_steps: u64,
}

impl Due {
    /// At the beginning of a run, after this many steps. `published`: they are all in a version.
    pub(super) fn new(every: Every, steps: u64, published: bool) -> Self {
        Self {
            every,
            retry_after: RETRY_AFTER,
            retry_owed: RETRY_OWED,
            last_steps: steps,
            last_cut: Instant::now(),
            owed: false,
            refused: false,
            published_steps: published.then_some(steps),
            first_steps: steps,
        }
    }

    /// A cut was made.
    pub(super) fn note_cut(&mut self, steps: u64) {
        (self.last_steps, self.last_cut) = (steps, Instant::now());
        (self.owed, self.refused) = (false, false);
    }

    /// A cut was refused. One that came early does not put off the next one.
    pub(super) fn note_refused(&mut self, steps: u64) {
        let last_cut = if self.is_time(steps) { Instant::now() } else { self.last_cut };
        self.note_cut(steps);
        (self.refused, self.last_cut) = (true, last_cut);
    }

    /// Whether steps were taken, of these, that are in no version.
    pub(super) fn has_unpublished(&self, steps: u64) -> bool {
        steps > self.published_steps.unwrap_or(self.first_steps)
    }

    /// Steps until a cut is due by steps.
    pub(super) fn steps_to_cut(&self, steps: u64) -> u64 {
        match self.every {
            Every::Steps(every) => every - steps % every,
            Every::Time(_) => u64::MAX,
        }
    }

    /// Whether the time or the step of the next cut has come.
    pub(super) fn is_time(&self, steps: u64) -> bool {
        match self.every {
            // A step whose cut had to wait for the writer is not forgotten.
            Every::Steps(every) => steps / every > self.last_steps / every || self.may_retry(Duration::MAX),
            Every::Time(every) if self.owed => self.may_retry(every),
            Every::Time(every) => steps > self.last_steps && self.last_cut.elapsed() >= every,
        }
    }

    /// Whether a version that could not be written is tried again now, though no step was taken.
    fn may_retry(&self, every: Duration) -> bool {
        self.owed && self.last_cut.elapsed() >= self.retry_owed.min(every)
    }

    /// Whether a cut may be made before its time. After one that was not written the next attempt waits a
    /// little, and after one that was refused until its time.
    pub(super) fn may_come_early(&self) -> bool {
        let was_published = self.published_steps == Some(self.last_steps);
        !self.refused && (was_published || self.last_cut.elapsed() >= self.retry_after)
    }

    /// Whether a cut may become due without a step. `steps` were taken.
    pub(super) fn waits(&self, steps: u64) -> bool {
        self.owed || self.by_time() && steps > self.last_steps
    }

    /// As [`Self::waits`], when more steps may have been taken than are known.
    pub(super) fn may_wait(&self) -> bool {
        self.owed || self.by_time()
    }

    fn by_time(&self) -> bool {
        matches!(self.every, Every::Time(_))
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
