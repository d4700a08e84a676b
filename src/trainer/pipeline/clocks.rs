//! How long each stage has worked, to find the stage that the others wait for.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The stages, in pipeline order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageName {
    /// Reads and encodes batches.
    Load,
    /// Decides which rows move.
    Plan,
    /// Reads the rows that move.
    Collect,
    /// Moves rows between host and device.
    Exchange,
    /// Writes the rows that move.
    Insert,
    /// Takes the steps.
    Train,
}

impl StageName {
    /// All stages, in pipeline order.
    pub const ALL: [Self; 6] =
        [Self::Load, Self::Plan, Self::Collect, Self::Exchange, Self::Insert, Self::Train];

    /// The name in lower case.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Plan => "plan",
            Self::Collect => "collect",
            Self::Exchange => "exchange",
            Self::Insert => "insert",
            Self::Train => "train",
        }
    }
}

/// A clock for each stage. It stops while the stage waits for another stage.
#[derive(Debug, Default)]
pub(crate) struct Clocks([AtomicU64; StageName::ALL.len()]);

impl Clocks {
    /// Runs `work` while the stage's clock runs.
    pub(crate) fn time<R>(&self, stage: StageName, work: impl FnOnce() -> R) -> R {
        let began = Instant::now();
        let done = work();
        self.0[stage as usize].fetch_add(nanos(began.elapsed()), Ordering::Relaxed);
        done
    }

    /// Runs `wait` within [`Self::time`] while the stage's clock is stopped.
    pub(crate) fn wait<R>(&self, stage: StageName, wait: impl FnOnce() -> R) -> R {
        let began = Instant::now();
        let waited = wait();
        // `time` adds the whole duration when the work ends. Until then the value may wrap below 0.
        self.0[stage as usize].fetch_sub(nanos(began.elapsed()), Ordering::Relaxed);
        waited
    }

    /// The time on the stage's clock. It is valid only while the stage is not working.
    pub(crate) fn of(&self, stage: StageName) -> Duration {
        Duration::from_nanos(self.0[stage as usize].load(Ordering::Relaxed))
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
