//! When a queue refuses requests early, so that the accepted ones are answered in time.
//!
//! A queue that runs empty now and then absorbs bursts. A queue that does not is a standing queue: it makes
//! every request late and no request faster. The difference is the idea of CoDel (Nichols and Jacobson, ACM
//! Queue 2012). So only if the queue was never empty in the last [`STANDING`], a request is refused at once
//! when the requests before it would take more than a share of the time that its client waits. The share is
//! small, because the request has aged on its way: in the buffers of the network, which are longest under
//! overload.
//!
//! How long the requests before it take follows from the measured time per sample. A request waits only for
//! those of its own priority and of higher ones, so only they count, and only they form its standing queue.
//! So low priorities are refused first.
//!
//! A request of a standing queue is not computed if its deadline passes before its scores can be there
//! ([`Overload::misses_deadline`]). If the measured time is wrong, because the machine was paused, this may
//! remove all requests. Then the queue is empty, so the next ones are computed, and the time is measured
//! again.

use std::time::{Duration, Instant};

use super::queue::{Priority, QueueLimits, Terms};

/// A queue that was never empty for this long is a standing queue.
const STANDING: Duration = Duration::from_millis(100);

/// In a standing queue, a request may wait for its client's time divided by this.
const DEADLINE_DIVISOR: u32 = 20;

/// The time per sample is a mean over about this many seconds of computing. The mean is over time and not
/// over batches: a pause of the machine during a small batch says little about the batches after it, which
/// are large because requests have gathered.
const REMEMBERED: f64 = 1.0;

/// A batch is not expected to take less than this share of the mean time of its samples.
const FASTEST: f64 = 0.5;

/// Seconds of computing that must be measured before a queue refuses requests. The first batches of a process
/// are slow, because nothing that they read is in the processor's cache and memory is touched for the first
/// time: they say nothing about the batches after them.
const KNOWN: f64 = REMEMBERED / 2.0;

/// A batch that a worker has computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Computed {
    pub samples: usize,
    pub time: Duration,
}

/// Why a request is refused: it would wait too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLate {
    /// How long the requests before it take.
    pub wait: Duration,
    /// How long it may wait.
    pub limit: Duration,
}

/// What a queue knows about its own speed.
#[derive(Debug, Default)]
pub(crate) struct Overload {
    /// What was computed, the older the less it counts.
    seconds: f64,
    samples: f64,
    batches: f64,
    /// Since when requests of each priority, or of higher ones, have waited without a break.
    since: [Option<Instant>; 3],
}

impl Overload {
    /// Checks that a request that comes now, behind this many samples of its priority and of higher ones,
    /// does not wait too long.
    ///
    /// # Errors
    /// [`TooLate`].
    pub(crate) fn check(
        &self,
        limits: &QueueLimits,
        now: Instant,
        samples: usize,
        terms: Terms,
    ) -> Result<(), TooLate> {
        if !self.judges(now, terms.priority) {
            return Ok(());
        }
        let seconds = samples as f64 * self.seconds_per_sample() / limits.workers.max(1) as f64;
        let wait = Duration::from_secs_f64(seconds);
        let until = |deadline: Instant| deadline.saturating_duration_since(now);
        let limit = terms.deadline.map_or(limits.default_deadline, until) / DEADLINE_DIVISOR;
        if wait > limit { Err(TooLate { wait, limit }) } else { Ok(()) }
    }

    /// Whether the deadline of a request of this many samples passes before its scores can be there, although
    /// a worker takes it now.
    pub(crate) fn misses_deadline(&self, now: Instant, samples: usize, terms: Terms) -> bool {
        let Some(deadline) = terms.deadline else { return false };
        self.judges(now, terms.priority)
            && deadline.saturating_duration_since(now).as_secs_f64() < self.least_seconds(samples)
    }

    /// Whether there is a standing queue of this priority, and the time per sample is known.
    fn judges(&self, now: Instant, priority: Priority) -> bool {
        let since = self.since[priority as usize];
        let stands = since.is_some_and(|since| now.saturating_duration_since(since) >= STANDING);
        stands && self.seconds >= KNOWN
    }

    /// A request was queued.
    pub(crate) fn queued(&mut self, now: Instant, priority: Priority) {
        for since in &mut self.since[priority as usize..] {
            since.get_or_insert(now);
        }
    }

    /// No request of this priority or of a higher one waits any more.
    pub(crate) const fn emptied(&mut self, priority: Priority) {
        self.since[priority as usize] = None;
    }

    pub(crate) fn computed(&mut self, Computed { samples, time }: Computed) {
        let seconds = time.as_secs_f64();
        let kept = (-seconds / REMEMBERED).exp();
        self.seconds = kept * self.seconds + seconds;
        self.samples = kept * self.samples + samples as f64;
        self.batches = kept * self.batches + 1.0;
    }

    fn seconds_per_sample(&self) -> f64 {
        if self.samples > 0.0 { self.seconds / self.samples } else { 0.0 }
    }

    /// The least time of a batch with these samples, on one worker.
    ///
    /// A batch costs something by itself, and something for each sample. The mean time per sample includes a
    /// share of the former, so it must not be multiplied by more samples than the mean batch has: a larger
    /// batch may take hardly longer. The time is not divided by the number of workers: one of them computes a
    /// request, or a part of one, and while the queue stands the others are as busy as when the time was
    /// measured.
    fn least_seconds(&self, samples: usize) -> f64 {
        let mean_batch = self.samples / self.batches.max(1.0);
        FASTEST * self.seconds_per_sample() * (samples as f64).min(mean_batch)
    }
}
