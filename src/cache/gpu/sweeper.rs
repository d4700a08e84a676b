//! Samples the ages of entries for the evictor, and unlinks victims.

#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::args::{Evicted, Pointable, SLOTS, SampleArgs, SweepArgs, VictimKind};
use super::kernels;
use super::table::GpuTable;
use crate::cache::index::Location;
use crate::device::cuda::memory::{Array, DeviceMemory, MemoryPlan, PinnedMemory};
use crate::device::cuda::{Driver, DriverError};
use crate::mem::WORD_BYTES;

/// The entries that a sweep evicts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Victims<'a> {
    /// Rows and pointers that were unused for at least this many batches.
    Aged(u32),
    /// Rows of the pool that were unused for at least `age` batches.
    AgedRows {
        age: u32,
        /// The most of them that stay in the index as pointers: rows of the tables that
        /// [`Sweeper::point_at`] has set.
        pointers: u64,
    },
    /// Rows in these slabs, one bit per slab.
    In(&'a [u32]),
    /// Pointers to these locations.
    Pointers(Range<u64>),
}

/// A stretch of buckets to sweep.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stretch<'a> {
    /// The first bucket.
    pub hand: u64,
    /// Number of buckets.
    pub buckets: u32,
    /// The most entries to evict.
    pub most: usize,
    /// The entries to evict.
    pub victims: Victims<'a>,
}

/// Samples and evicts entries, with pinned memory for the results of one call.
pub(crate) struct Sweeper<D: Driver> {
    gpu_table: Arc<GpuTable<D>>,
    memory: PinnedMemory<D>,
    counters: DeviceMemory<D>,
    ages: Array<u32>,
    draining: Array<u32>,
    pointable: Array<Pointable>,
    /// What the next sweep writes to `pointable`.
    tables: Vec<Pointable>,
    evicted: Array<Evicted>,
    report: Array<u32>,
}

impl<D: Driver> Sweeper<D> {
    /// A sweeper with room for a sample of `sample` buckets, for `most` evicted entries, and for `tables`
    /// tables to point at.
    ///
    /// # Errors
    /// As [`Driver::allocate_pinned`].
    pub(crate) fn new(
        gpu_table: &Arc<GpuTable<D>>,
        sample: usize,
        most: usize,
        tables: usize,
    ) -> Result<Self, DriverError> {
        let mut plan = MemoryPlan::default();
        let (ages, draining) = (plan.array(sample * SLOTS), plan.array(gpu_table.shape().slabs.div_ceil(32)));
        let (evicted, report) = (plan.array(most), plan.array(1));
        let pointable = plan.array(tables);
        let memory = PinnedMemory::new(gpu_table.driver(), plan.bytes())?;
        let counters = DeviceMemory::new(gpu_table.driver(), 3 * WORD_BYTES)?;
        Ok(Self {
            gpu_table: gpu_table.clone(),
            memory,
            counters,
            ages,
            draining,
            pointable,
            tables: Vec::new(),
            evicted,
            report,
        })
    }

    /// Sets the tables to which sweeps make pointers. A table is ignored unless all of its rows lie in
    /// registered memory.
    pub(crate) fn point_at(&mut self, tables: impl Iterator<Item = Pointable>) {
        let held = |table: &Pointable| {
            let words = table.rows.checked_mul(table.words).and_then(|words| usize::try_from(words).ok());
            Location::from_bits(table.first).is_pointer()
                && words.is_some_and(|words| self.gpu_table.holds(table.first, words))
        };
        let mut held: Vec<Pointable> = tables.filter(held).take(self.pointable.len()).collect();
        held.sort_unstable_by_key(|table| table.base);
        self.tables = held;
    }

    /// The ages at `now` of the entries of a sample of buckets, drawn with the seed `draw`. The age is
    /// `u32::MAX` for empty slots and, unless `pointers_too`, for pointers.
    ///
    /// # Errors
    /// Driver errors.
    pub(crate) fn sample(&mut self, now: u64, draw: u64, pointers_too: bool) -> Result<&[u32], DriverError> {
        let buckets = self.gpu_table.shape().buckets;
        let count = buckets.min((self.ages.len() / SLOTS) as u64) as u32;
        let (index, ages) = (self.gpu_table.index(), self.memory.of(self.ages));
        let args = SampleArgs { index, ages, buckets, now, draw, count, pointers: u32::from(pointers_too) };
        let (driver, stream) = (self.gpu_table.driver(), self.gpu_table.stream());
        // SAFETY: `ages` has room for `count` buckets. The kernel has ended when `finish` succeeds. The host
        // reads `ages` only then, and never writes it. After a failed wait, the driver keeps the memory.
        unsafe { kernels::sample_ages(&**driver, stream, &args)? };
        driver.finish(stream)?;
        Ok(&self.memory.get(self.ages)[..count as usize * SLOTS])
    }

    /// Evicts entries or turns them into pointers. Returns these entries. An entry with key 0 was not evicted
    /// and must be ignored.
    ///
    /// # Errors
    /// Driver errors.
    pub(crate) fn sweep(&mut self, now: u64, stretch: Stretch) -> Result<&[Evicted], DriverError> {
        let Stretch { hand, buckets, most, victims } = stretch;
        // Else the kernel of an earlier sweep may still read what is written next.
        self.gpu_table.driver().alive()?;
        self.memory.get_mut(self.pointable)[..self.tables.len()].copy_from_slice(&self.tables);
        let mut args = SweepArgs {
            index: self.gpu_table.index(),
            draining: self.memory.of(self.draining),
            pointable: self.memory.of(self.pointable),
            evicted: self.memory.of(self.evicted),
            counters: self.counters.address(),
            report: self.memory.of(self.report),
            buckets: self.gpu_table.shape().buckets,
            hand,
            now,
            stretch: u64::from(buckets).min(self.gpu_table.shape().buckets) as u32,
            most: most.min(self.evicted.len()) as u32,
            slab_words: (self.gpu_table.shape().slab_bytes / WORD_BYTES) as u32,
            pointables: self.tables.len() as u32,
            ..SweepArgs::default()
        };
        match victims {
            Victims::Aged(age) => (args.victims, args.threshold) = (VictimKind::Aged as u32, age),
            Victims::AgedRows { age, pointers } => {
                (args.victims, args.threshold) = (VictimKind::AgedRow as u32, age);
                args.pointers = pointers.min(u32::MAX.into()) as u32;
            }
            Victims::In(slabs) => {
                self.memory.get_mut(self.draining).copy_from_slice(slabs);
                args.victims = VictimKind::InSlabs as u32;
            }
            Victims::Pointers(Range { start, end }) => {
                (args.victims, args.from, args.to) = (VictimKind::Pointer as u32, start, end);
            }
        }
        let (driver, stream) = (self.gpu_table.driver(), self.gpu_table.stream());
        // SAFETY: `evicted` has room for `most`, and `draining` has a bit for each slab. `point_at` has
        // checked that the rows of `pointable` are in registered memory, and tables are removed from
        // `pointable` before their memory is unregistered. This is the only stream on which the index
        // changes. The kernel has ended when `finish` succeeds; the host reads the results only then. If the
        // wait fails, the driver has ended: it keeps the memory, and `alive` stops the next sweep before it
        // writes.
        unsafe { kernels::sweep(&**driver, stream, &args)? };
        driver.finish(stream)?;
        let count = self.memory.get(self.report)[0] as usize;
        Ok(&self.memory.get(self.evicted)[..count])
    }
}
