//! Looks at a tier's entries for the evictor, and unlinks those that are to go.

#![allow(unsafe_code)]

use std::sync::Arc;

use super::args::{
    Evicted, Pointable, SampleArgs, SweepArgs, VICTIM_AGED, VICTIM_AGED_ROW, VICTIM_IN_SLABS, VICTIM_POINTER,
};
use super::kernels;
use super::table::GpuTable;
use crate::device::cuda::memory::{Array, DeviceMemory, PinnedMemory, Plan};
use crate::device::cuda::{Driver, DriverError};

/// Slots of a bucket.
const SLOTS: usize = 8;
const WORD: usize = size_of::<u32>();

/// What a sweep puts out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Victims<'a> {
    /// What was unused for so many batches, rows and pointers.
    Aged(u32),
    /// Rows of the pool that were unused for so many batches. Those of tables that may be pointed at stay in the
    /// index as pointers, at most so many.
    AgedRows {
        /// For how many batches.
        age: u32,
        /// How many pointers.
        pointers: u64,
    },
    /// What lies in these slabs: a bit each.
    In(&'a [u32]),
    /// Pointers to locations from the first and below the second.
    Pointers(u64, u64),
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
    tier: Arc<GpuTable<D>>,
    memory: PinnedMemory<D>,
    counters: DeviceMemory<D>,
    ages: Array<u32>,
    draining: Array<u32>,
    pointable: Array<Pointable>,
    pointables: usize,
    evicted: Array<Evicted>,
    report: Array<u32>,
}

impl<D: Driver> Sweeper<D> {
    /// Room for a sample of so many buckets, for so many entries put out at once, and for pointers into so many
    /// tables.
    ///
    /// # Errors
    /// As [`Driver::allocate_pinned`].
    pub fn new(
        tier: &Arc<GpuTable<D>>,
        sample: usize,
        most: usize,
        tables: usize,
    ) -> Result<Self, DriverError> {
        let mut plan = Plan::default();
        let (ages, draining) = (plan.array(sample * SLOTS), plan.array(tier.shape().slabs.div_ceil(32)));
        let (evicted, report) = (plan.array(most), plan.array(1));
        let pointable = plan.array(tables);
        let memory = PinnedMemory::new(tier.driver(), plan.bytes())?;
        let counters = DeviceMemory::new(tier.driver(), 3 * WORD)?;
        Ok(Self {
            tier: tier.clone(),
            memory,
            counters,
            ages,
            draining,
            pointable,
            pointables: 0,
            evicted,
            report,
        })
    }

    /// Which tables may be pointed at from now on. Those whose rows are not all in registered memory are left out.
    pub fn point_at(&mut self, tables: impl Iterator<Item = Pointable>) {
        let held = |table: &Pointable| {
            let words = table.rows.checked_mul(table.words).and_then(|words| usize::try_from(words).ok());
            table.first & 1 == 1 && words.is_some_and(|words| self.tier.holds(table.first, words))
        };
        let mut held: Vec<Pointable> = tables.filter(held).take(self.pointable.len()).collect();
        held.sort_unstable_by_key(|table| table.base);
        self.memory.get_mut(self.pointable)[..held.len()].copy_from_slice(&held);
        self.pointables = held.len();
    }

    /// The ages, at `now`, of the entries of buckets that `draw` chooses; `u32::MAX` for empty slots, and for
    /// pointers unless these are wanted too.
    ///
    /// # Errors
    /// What the driver says.
    pub fn sample(&mut self, now: u64, draw: u64, pointers: bool) -> Result<&[u32], DriverError> {
        let buckets = self.tier.shape().buckets;
        let count = buckets.min((self.ages.len() / SLOTS) as u64) as u32;
        let (index, ages) = (self.tier.index(), self.memory.of(self.ages));
        let args = SampleArgs { index, ages, buckets, now, draw, count, pointers: u32::from(pointers) };
        // SAFETY: `ages` has room for `count` buckets; `self` is waited for before anything else is done with it.
        unsafe { kernels::sample_ages(&**self.tier.driver(), self.tier.stream(), &args)? };
        self.wait()?;
        Ok(&self.memory.get(self.ages)[..count as usize * SLOTS])
    }

    /// Puts entries out, or moves them. Those reported with key 0 were none.
    ///
    /// # Errors
    /// What the driver says.
    pub fn sweep(&mut self, now: u64, stretch: Stretch) -> Result<&[Evicted], DriverError> {
        let mut args = SweepArgs {
            index: self.tier.index(),
            draining: self.memory.of(self.draining),
            pointable: self.memory.of(self.pointable),
            evicted: self.memory.of(self.evicted),
            counters: self.counters.address(),
            report: self.memory.of(self.report),
            buckets: self.tier.shape().buckets,
            hand: stretch.hand,
            now,
            stretch: (u64::from(stretch.buckets)).min(self.tier.shape().buckets) as u32,
            most: stretch.most.min(self.evicted.len()) as u32,
            slab_words: (self.tier.shape().slab_bytes / WORD) as u32,
            pointables: self.pointables as u32,
            ..SweepArgs::default()
        };
        match stretch.victims {
            Victims::Aged(age) => (args.victims, args.threshold) = (VICTIM_AGED, age),
            Victims::AgedRows { age, pointers } => {
                (args.victims, args.threshold) = (VICTIM_AGED_ROW, age);
                args.pointers = pointers.min(u32::MAX.into()) as u32;
            }
            Victims::In(slabs) => {
                self.memory.get_mut(self.draining).copy_from_slice(slabs);
                args.victims = VICTIM_IN_SLABS;
            }
            Victims::Pointers(from, to) => (args.victims, args.from, args.to) = (VICTIM_POINTER, from, to),
        }
        // SAFETY: `evicted` has room for `most`, `draining` a bit for each slab that a location can name; the
        // rows of `pointable` were in registered memory when `point_at` looked, and whoever unregisters memory
        // has taken them out there before; and this is the tier's one stream. `self` is waited for before
        // anything else is done with it.
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
