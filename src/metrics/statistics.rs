//! Totals of a model that the server itself reads. The series of the recorder can only be written.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::types::unix_ms;

/// How often something happened, and the sum of its durations.
#[derive(Default)]
pub(crate) struct RunningTotal {
    count: AtomicU64,
    nanos: AtomicU64,
}

impl RunningTotal {
    /// Adds `count` events, each of this duration.
    pub(crate) fn add(&self, count: u64, each: Duration) {
        self.count.fetch_add(count, Ordering::Relaxed);
        self.nanos.fetch_add(count * each.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> Total {
        Total { count: self.count.load(Ordering::Relaxed), nanos: self.nanos.load(Ordering::Relaxed) }
    }
}

/// The state of a [`RunningTotal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Total {
    /// The number of events.
    pub count: u64,
    /// The sum of their durations in nanoseconds.
    pub nanos: u64,
}

/// Totals of a model since it was loaded. All durations are of requests.
#[derive(Default)]
pub(crate) struct Statistics {
    /// Requests that were answered with scores, from the decoded message to the answer.
    pub success: RunningTotal,
    /// Requests that failed.
    pub fail: RunningTotal,
    /// Time in the queue.
    pub queue: RunningTotal,
    /// Time to convert a request to a batch.
    pub input: RunningTotal,
    /// Time of the merged batch that a request was computed in.
    pub compute: RunningTotal,
    samples: AtomicU64,
    batches: AtomicU64,
    last_unix_ms: AtomicU64,
}

impl Statistics {
    /// Counts a computed batch of some requests.
    pub(crate) fn computed(&self, requests: usize, samples: usize, took: Duration) {
        self.compute.add(requests as u64, took);
        self.samples.fetch_add(samples as u64, Ordering::Relaxed);
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.last_unix_ms.store(unix_ms(), Ordering::Relaxed);
    }

    /// Samples that were scored.
    pub(crate) fn samples(&self) -> u64 {
        self.samples.load(Ordering::Relaxed)
    }

    /// Batches that were computed.
    pub(crate) fn batches(&self) -> u64 {
        self.batches.load(Ordering::Relaxed)
    }

    /// The time of the last batch, in milliseconds since 1970; 0 if there was none.
    pub(crate) fn last_unix_ms(&self) -> u64 {
        self.last_unix_ms.load(Ordering::Relaxed)
    }
}
