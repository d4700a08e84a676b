//! Looks at a tier's entries for the evictor, and unlinks those that are to go.

#![allow(unsafe_code)]

use std::sync::Arc;

use super::args::{Evicted, SampleArgs, SweepArgs};
use super::memory::{Array, DeviceMemory, PinnedMemory, Plan};
use super::tier::Tier;
use super::{Driver, DriverError, kernels};

/// Slots of a bucket.
const SLOTS: usize = 8;
const WORD: usize = size_of::<u32>();

/// What a sweep puts out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Victims<'a> {
    /// What was unused for so many batches.
    Aged(u32),
    /// What lies in these slabs: a bit each.
    In(&'a [u32]),
}

/// A stretch of buckets, from which at most so many entries go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stretch<'a> {
    /// The first bucket.
    pub hand: u64,
    /// How many buckets.
    pub buckets: u32,
    /// Entries at most.
    pub most: usize,
    /// Which ones.
    pub victims: Victims<'a>,
}

/// What an evictor needs: room for a sample, and for what one sweep puts out.
pub struct Sweeper<D: Driver> {
    tier: Arc<Tier<D>>,
    memory: PinnedMemory<D>,
    counters: DeviceMemory<D>,
    ages: Array<u32>,
    draining: Array<u32>,
    evicted: Array<Evicted>,
    report: Array<u32>,
}

impl<D: Driver> Sweeper<D> {
    /// Room for a sample of so many buckets, and for so many entries put out at once.
    ///
    /// # Errors
    /// As [`Driver::allocate_pinned`].
    pub fn new(tier: &Arc<Tier<D>>, sample: usize, most: usize) -> Result<Self, DriverError> {
        let mut plan = Plan::default();
        let (ages, draining) = (plan.array(sample * SLOTS), plan.array(tier.shape().slabs.div_ceil(32)));
        let (evicted, report) = (plan.array(most), plan.array(1));
        let memory = PinnedMemory::new(tier.driver(), plan.bytes())?;
        let counters = DeviceMemory::new(tier.driver(), 2 * WORD)?;
        Ok(Self { tier: tier.clone(), memory, counters, ages, draining, evicted, report })
    }

    /// The ages, at `now`, of the entries of buckets that `draw` chooses; `u32::MAX` for empty slots.
    ///
    /// # Errors
    /// What the driver says.
    pub fn sample(&mut self, now: u64, draw: u64) -> Result<&[u32], DriverError> {
        let buckets = self.tier.shape().buckets;
        let count = buckets.min((self.ages.len() / SLOTS) as u64);
        let ages = self.memory.of(self.ages);
        let args = SampleArgs { index: self.tier.index(), ages, buckets, now, draw, count };
        // SAFETY: `ages` has room for `count` buckets; `self` is waited for before anything else is done with it.
        unsafe { kernels::sample_ages(&**self.tier.driver(), self.tier.stream(), &args)? };
        self.wait()?;
        Ok(&self.memory.get(self.ages)[..count as usize * SLOTS])
    }

    /// Puts entries out. Those reported with key 0 were none.
    ///
    /// # Errors
    /// What the driver says.
    pub fn sweep(&mut self, now: u64, stretch: Stretch) -> Result<&[Evicted], DriverError> {
        let (threshold, draining) = match stretch.victims {
            Victims::Aged(threshold) => (threshold, 0),
            Victims::In(slabs) => {
                self.memory.get_mut(self.draining).copy_from_slice(slabs);
                (0, self.memory.of(self.draining))
            }
        };
        let args = SweepArgs {
            index: self.tier.index(),
            draining,
            evicted: self.memory.of(self.evicted),
            counters: self.counters.address(),
            report: self.memory.of(self.report),
            buckets: self.tier.shape().buckets,
            hand: stretch.hand,
            now,
            stretch: (u64::from(stretch.buckets)).min(self.tier.shape().buckets) as u32,
            threshold,
            most: stretch.most.min(self.evicted.len()) as u32,
            slab_words: (self.tier.shape().slab_bytes / WORD) as u32,
        };
        // SAFETY: `evicted` has room for `most`, `draining` a bit for each slab that a location can name, and
        // this is the tier's one stream; `self` is waited for before anything else is done with it.
        unsafe { kernels::sweep(&**self.tier.driver(), self.tier.stream(), &args)? };
        self.wait()?;
        let count = self.memory.get(self.report)[0] as usize;
        Ok(&self.memory.get(self.evicted)[..count])
    }

    fn wait(&self) -> Result<(), DriverError> {
        let driver = self.tier.driver();
        driver.wait(&driver.record(self.tier.stream())?)
    }
}
