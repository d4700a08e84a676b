//! Making room: the steps of an eviction, and the thread that takes them.
//!
//! A step reads and changes the cache alone, so it can be called from anywhere, one at a time; the
//! thread only decides when. What a step is for, `course` says.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::eviction_plan::{EvictionPlan, Goal, Pressure};
use super::index::{Fate, Held, Location, SLOTS, Stamp};
use super::policy::threshold;
use super::shared::{MAX_WAITING, Shared};
use crate::mem::mix64;

/// Buckets a step.
const STRETCH: usize = 1024;
/// Buckets whose ages stand for all.
const SAMPLE: usize = 128;
/// How long unfinished batches are left before it is seen again whether they are.
const PATIENCE: Duration = Duration::from_millis(1);

/// What is left to do after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictStep {
    /// Nothing.
    Idle,
    /// Something, once batches that are pinned now have finished.
    Waiting,
    /// Something.
    More,
}

/// Where an eviction stands.
#[derive(Debug, Default)]
pub(crate) struct Sweep {
    course: EvictionPlan,
    /// The bucket to go on from.
    hand: usize,
    /// Chooses the samples.
    draw: u64,
    sample: Vec<u64>,
}

impl Shared {
    pub(crate) fn evict_step(&self) -> EvictStep {
        let mut sweep = self.sweep.lock().unwrap_or_else(PoisonError::into_inner);
        self.clear_pointers_if_told();
        let waiting = self.reclaim();
        sweep.course.choose(&Pressure {
            fill: self.fill_level(),
            watermarks: &self.watermarks,
            waiting,
            starved: &self.starved,
            slots: self.pool.slots(),
            epochs: &self.epochs,
            buckets: self.index.buckets() as u64,
        });
        match sweep.course.goal {
            Goal::Rest if waiting == 0 => EvictStep::Idle,
            Goal::Rest => EvictStep::Waiting,
            _ if waiting + SLOTS > MAX_WAITING => EvictStep::Waiting,
            Goal::Lower => self.lower(&mut sweep),
            Goal::Empty(left) => self.empty(&mut sweep, left as usize),
        }
    }

    /// The share of entries to put out, for the pool's sake or the index's.
    fn excess(&self) -> f64 {
        self.fill_level().excess(&self.watermarks)
    }

    fn lower(&self, sweep: &mut Sweep) -> EvictStep {
        let now = Stamp::of(self.epochs.tag());
        // A pointer gives back its slot but not its entry, so that pointers go only for the index's sake.
        let entries_too = self.watermarks.excess(self.index.entries(), self.index.capacity()) > 0.0;
        self.sample(sweep, now, entries_too);
        let threshold = threshold(&mut sweep.sample, self.excess());
        for _ in 0..STRETCH.min(self.index.buckets()) {
            if self.excess() == 0.0 || self.limbo.waiting() + SLOTS > MAX_WAITING {
                break;
            }
            let fate = |key, held: Held<'_>, age| {
                let cold = self.eviction.coldness(key, age) >= threshold && self.excess() > 0.0;
                match held.location().is_host() {
                    _ if !cold => Fate::Stay,
                    true if !entries_too => Fate::Stay,
                    false if !entries_too => self.put_out(key, held),
                    _ => Fate::Leave,
                }
            };
            self.index.evict(sweep.hand, now, fate, |out| self.retire(out));
            sweep.hand = (sweep.hand + 1) % self.index.buckets();
        }
        EvictStep::More
    }

    fn empty(&self, sweep: &mut Sweep, mut left: usize) -> EvictStep {
        let now = Stamp::of(self.epochs.tag());
        let draining = self.pool.draining();
        for _ in 0..STRETCH.min(left) {
            if self.limbo.waiting() + SLOTS > MAX_WAITING {
                break;
            }
            let fate = |_, held: Held<'_>, _| {
                let leaves = !held.location().is_host() && draining(held.location());
                if leaves { Fate::Leave } else { Fate::Stay }
            };
            self.index.evict(sweep.hand, now, fate, |out| self.retire(out));
            sweep.hand = (sweep.hand + 1) % self.index.buckets();
            left -= 1;
        }
        sweep.course.goal = if left == 0 { Goal::Rest } else { Goal::Empty(left as u64) };
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
            let cold = |(key, location, age): (_, Location, _)| {
                (pointers_too || !location.is_host()).then(|| self.eviction.coldness(key, age))
            };
            sweep.sample.extend(self.index.ages(bucket, now).filter_map(cold));
        }
    }
}

/// The bell of the evicting thread.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    rung: AtomicBool,
    stop: Mutex<bool>,
    bell: Condvar,
}

impl Wake {
    /// Wakes the thread, at the cost of one load if it is awake.
    pub(crate) fn now(&self) {
        if !self.rung.load(Ordering::Relaxed) && !self.rung.swap(true, Ordering::AcqRel) {
            // Under the lock, so that the bell is not rung between the thread's look and its sleep.
            let _stop = self.stop.lock().unwrap_or_else(PoisonError::into_inner);
            self.bell.notify_one();
        }
    }

    fn stop(&self) {
        *self.stop.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.bell.notify_one();
    }

    /// Sleeps until rung, or for `patience` however often it is rung. Returns whether to go on,
    /// which is as soon as it is told to stop.
    fn sleep(&self, patience: Option<Duration>) -> bool {
        let stop = self.stop.lock().unwrap_or_else(PoisonError::into_inner);
        let stop = match patience {
            Some(patience) => {
                let woken = self.bell.wait_timeout_while(stop, patience, |stop| !*stop);
                *woken.unwrap_or_else(PoisonError::into_inner).0
            }
            None => {
                let asleep = |stop: &mut bool| !*stop && !self.rung.load(Ordering::Acquire);
                *self.bell.wait_while(stop, asleep).unwrap_or_else(PoisonError::into_inner)
            }
        };
        // Before the step that follows, which so sees what it was rung for. Should a ring be lost all
        // the same, the next insert rings again.
        self.rung.swap(false, Ordering::AcqRel);
        !stop
    }
}

/// The evicting thread, stopped and joined when dropped.
#[derive(Debug)]
pub(crate) struct Evictor {
    wake: Arc<Wake>,
    thread: Option<JoinHandle<()>>,
}

impl Evictor {
    /// Calls `step` whenever `wake` is rung, until it has nothing more to do.
    pub(crate) fn start(
        wake: &Arc<Wake>,
        mut step: impl FnMut() -> EvictStep + Send + 'static,
    ) -> io::Result<Self> {
        let rung = wake.clone();
        let thread = std::thread::Builder::new().name("cache-evict".into()).spawn(move || {
            let mut patience = None;
            while rung.sleep(patience) {
                patience = match step() {
                    EvictStep::Idle => None,
                    EvictStep::Waiting => Some(PATIENCE),
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
            tracing::error!("the cache's evicting thread panicked");
        }
    }
}
