//! Eviction steps, and the thread that takes them.
//!
//! Any thread may take a step, one thread at a time. The eviction thread decides only when steps are taken.
//! `eviction_plan` decides what a step does.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::eviction_plan::{EvictionPlan, Goal};
use super::index::{EntryAge, EntryDecision, PinnedLocation, SLOTS, Stamp};
use super::policy::threshold;
use super::shared::{MAX_WAITING, Shared};
use crate::mem::mix64;
use crate::sync::EvenPoisoned;

/// Buckets that a step visits.
const BUCKETS_PER_STEP: usize = 1024;
/// Buckets in the sample of the entries' coldness.
const SAMPLE: usize = 128;
/// The time after which the thread tries again a step that waits for batches.
const EVICT_RETRY: Duration = Duration::from_millis(1);

/// What remains to do after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictStep {
    /// There is nothing to do.
    Idle,
    /// There is more to do once batches that are pinned now have finished.
    Waiting,
    /// There is more to do now.
    More,
}

/// The progress of an eviction.
#[derive(Debug, Default)]
pub(crate) struct Sweep {
    plan: EvictionPlan,
    /// The next bucket to sweep.
    hand: usize,
    /// Counter from which sampled buckets are drawn.
    draw: u64,
    sample: Vec<u64>,
}

impl Shared {
    pub(crate) fn evict_step(&self) -> EvictStep {
        let mut sweep = self.sweep.lock().even_poisoned();
        self.clear_pointers_if_requested();
        let waiting = self.reclaim();
        sweep.plan.choose(self, &self.fill_level(), self.pool.slots(), waiting);
        match sweep.plan.goal {
            Goal::Idle if waiting == 0 => EvictStep::Idle,
            Goal::Idle => EvictStep::Waiting,
            _ if waiting + SLOTS > MAX_WAITING => EvictStep::Waiting,
            Goal::EvictCold => self.evict_cold(&mut sweep),
            Goal::DrainSlabs(left) => self.drain_slabs(&mut sweep, left as usize),
        }
    }

    /// The share of entries to evict until pool and index are both at the low watermark.
    fn excess(&self) -> f64 {
        self.fill_level().excess()
    }

    /// Evicts cold entries from a stretch of buckets.
    fn evict_cold(&self, sweep: &mut Sweep) -> EvictStep {
        let now = Stamp::of(self.epochs.tag());
        // Evicting a pointer frees an entry but no slot, so pointers are evicted only if the index is too
        // full.
        let pointers_too = self.watermarks.excess(self.fill_level().entries) > 0.0;
        self.sample(sweep, now, pointers_too);
        let threshold = threshold(&mut sweep.sample, self.excess());
        for _ in 0..BUCKETS_PER_STEP.min(self.index.buckets()) {
            if self.excess() == 0.0 || self.retired.waiting() + SLOTS > MAX_WAITING {
                break;
            }
            let decide = |key, pinned: PinnedLocation<'_>, age| {
                let cold = self.eviction.coldness(key, age) >= threshold && self.excess() > 0.0;
                match pinned.location().is_pointer() {
                    _ if !cold => EntryDecision::Keep,
                    true if !pointers_too => EntryDecision::Keep,
                    false if !pointers_too => self.decide_on_victim(key, pinned),
                    _ => EntryDecision::Unlink,
                }
            };
            self.index.visit_bucket(sweep.hand, now, decide, |out| self.retire(out));
            sweep.hand = (sweep.hand + 1) % self.index.buckets();
        }
        EvictStep::More
    }

    /// Evicts the rows of draining slabs from a stretch of buckets.
    fn drain_slabs(&self, sweep: &mut Sweep, mut left: usize) -> EvictStep {
        let now = Stamp::of(self.epochs.tag());
        let draining = self.pool.draining();
        for _ in 0..BUCKETS_PER_STEP.min(left) {
            if self.retired.waiting() + SLOTS > MAX_WAITING {
                break;
            }
            let decide = |_, pinned: PinnedLocation<'_>, _| {
                let leaves = !pinned.location().is_pointer() && draining(pinned.location());
                if leaves { EntryDecision::Unlink } else { EntryDecision::Keep }
            };
            self.index.visit_bucket(sweep.hand, now, decide, |out| self.retire(out));
            sweep.hand = (sweep.hand + 1) % self.index.buckets();
            left -= 1;
        }
        sweep.plan.goal = if left == 0 { Goal::Idle } else { Goal::DrainSlabs(left as u64) };
        EvictStep::More
    }

    fn sample(&self, sweep: &mut Sweep, now: Stamp, pointers_too: bool) {
        let buckets = self.index.buckets();
        sweep.sample.clear();
        for i in 0..SAMPLE.min(buckets) {
            let bucket = if buckets <= SAMPLE {
                i
            } else {
                sweep.draw = sweep.draw.wrapping_add(1);
                (mix64(sweep.draw) % buckets as u64) as usize
            };
            let cold = |EntryAge { key, location, age }: EntryAge| {
                (pointers_too || !location.is_pointer()).then(|| self.eviction.coldness(key, age))
            };
            sweep.sample.extend(self.index.ages(bucket, now).filter_map(cold));
        }
    }
}

/// Wakes the eviction thread.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    pending: AtomicBool,
    stop: Mutex<bool>,
    condition: Condvar,
}

impl Wake {
    /// Wakes the thread. Costs one load if a wake-up is pending already.
    pub(crate) fn now(&self) {
        if !self.pending.load(Ordering::Relaxed) && !self.pending.swap(true, Ordering::AcqRel) {
            // Under the lock, so that the notification does not fall between the thread's check and its
            // sleep.
            let _stop = self.stop.lock().even_poisoned();
            self.condition.notify_one();
        }
    }

    fn stop(&self) {
        *self.stop.lock().even_poisoned() = true;
        self.condition.notify_one();
    }

    /// Without `patience`, sleeps until woken. With `patience`, sleeps for that time, even if woken. Returns
    /// `false` as soon as the thread must stop.
    fn sleep(&self, patience: Option<Duration>) -> bool {
        let stop = self.stop.lock().even_poisoned();
        let stop = match patience {
            Some(patience) => {
                let woken = self.condition.wait_timeout_while(stop, patience, |stop| !*stop);
                *woken.even_poisoned().0
            }
            None => {
                let asleep = |stop: &mut bool| !*stop && !self.pending.load(Ordering::Acquire);
                *self.condition.wait_while(stop, asleep).even_poisoned()
            }
        };
        // Reset before the next step, so that a wake-up during the step stays pending. A wake-up is lost if
        // `now` still reads the old `true` and does not notify. Then a later insert wakes the thread.
        self.pending.swap(false, Ordering::AcqRel);
        !stop
    }
}

/// The eviction thread. Dropping this stops and joins it.
#[derive(Debug)]
pub(crate) struct Evictor {
    wake: Arc<Wake>,
    thread: Option<JoinHandle<()>>,
}

impl Evictor {
    /// Starts a thread. Whenever `wake` wakes it, it calls `step` until there is nothing more to do.
    pub(crate) fn start(
        wake: &Arc<Wake>,
        mut step: impl FnMut() -> EvictStep + Send + 'static,
    ) -> io::Result<Self> {
        let waker = wake.clone();
        let thread = std::thread::Builder::new().name("cache-evict".into()).spawn(move || {
            let mut patience = None;
            while waker.sleep(patience) {
                patience = match step() {
                    EvictStep::Idle => None,
                    EvictStep::Waiting => Some(EVICT_RETRY),
                    EvictStep::More => Some(Duration::ZERO),
                };
            }
        })?;
        Ok(Self { wake: wake.clone(), thread: Some(thread) })
    }
}

impl Drop for Evictor {
    fn drop(&mut self) {
        self.wake.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the cache's eviction thread panicked");
        }
    }
}
