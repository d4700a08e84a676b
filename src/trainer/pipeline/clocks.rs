//! How long each stage has worked: which one the others wait for.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The stages, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageName {
    /// Reads and encodes.
    Load,
    /// Decides.
    Plan,
    /// Reads rows.
    Collect,
    /// Moves them between host and device.
    Exchange,
    /// Writes rows.
    Insert,
    /// Takes the steps.
    Train,
}

impl StageName {
    /// All of them, in order.
    pub const ALL: [Self; 6] =
        [Self::Load, Self::Plan, Self::Collect, Self::Exchange, Self::Insert, Self::Train];

    /// In lower case.
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

/// A clock for each stage, which stands while the stage waits for another.
#[derive(Debug, Default)]
pub(crate) struct Clocks([AtomicU64; StageName::ALL.len()]);

impl Clocks {
    /// Does a stage's work while its clock runs.
    pub(crate) fn time<R>(&self, stage: StageName, work: impl FnOnce() -> R) -> R {
        let began = Instant::now();
        let done = work();
        self.0[stage as usize].fetch_add(nanos(began.elapsed()), Ordering::Relaxed);
        done
    }

    /// Waits within a stage's work: its clock does not run meanwhile.
    pub(crate) fn wait<R>(&self, stage: StageName, wait: impl FnOnce() -> R) -> R {
        let began = Instant::now();
        let waited = wait();
        // It comes back when the work ends, so that it may be below nothing until then.
        self.0[stage as usize].fetch_sub(nanos(began.elapsed()), Ordering::Relaxed);
        waited
    }

    /// What the clock shows between two pieces of work.
    pub(crate) fn of(&self, stage: StageName) -> Duration {
        Duration::from_nanos(self.0[stage as usize].load(Ordering::Relaxed))
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
