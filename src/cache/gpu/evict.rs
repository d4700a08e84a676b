//! Eviction by age, in steps, as in `cache/evictor.rs`. Here the device scans the entries.
//!
//! A step waits for the device, so steps should run on a separate thread. Batches keep running meanwhile.

use std::sync::Arc;

use super::super::common::Common;
use super::super::eviction_plan::{EvictionPlan, Goal};
use super::super::evictor::EvictStep;
use super::super::index::{Location, Unlinked};
use super::super::policy::threshold;
use super::super::shared::MAX_WAITING;
use super::Shared;
use super::rank::Withdrawals;
use crate::cache::gpu::args::{EMPTY_KEY, SLOTS};
use crate::cache::gpu::lister::Lister;
use crate::cache::gpu::sweeper::{Stretch, Sweeper, Victims};
use crate::cache::gpu::table::GpuTable;
use crate::device::cuda::{Driver, DriverError};
use crate::sync::EvenPoisoned;
use crate::types::FlatKey;

/// Buckets per step: 2 MiB of the index.
const BUCKETS_PER_STEP: u32 = 1 << 14;
/// Buckets in a sample of the ages.
const SAMPLE: usize = 256;
/// Buckets that are listed at once: 256 KiB of pinned memory.
const LISTED: usize = 1 << 10;
/// The most entries that one sweep evicts.
const MAX_EVICTED: usize = 1 << 13;

/// The progress of an eviction.
pub(crate) struct Sweep<D: Driver> {
    pub sweeper: Sweeper<D>,
    pub lister: Lister<D>,
    /// `None` if eviction is by age.
    pub withdrawals: Option<Withdrawals<D>>,
    plan: EvictionPlan,
    /// The next bucket to sweep.
    pub hand: u64,
    /// The seed of the next sample.
    pub draw: u64,
}

/// How much a step evicts.
pub(crate) struct EvictionQuota {
    /// The share of the entries to evict.
    pub excess: f64,
    /// The most entries to evict.
    pub most: usize,
    /// Whether pointers are evicted too. A pointer has no slot, so this is true only if the index is too
    /// full. Then no pointers are made.
    pub pointers_too: bool,
}

impl<D: Driver> Sweep<D> {
    pub(crate) fn new(gpu_table: &Arc<GpuTable<D>>, common: &Common) -> Result<Self, DriverError> {
        let by_rank = !common.eviction.is_by_age();
        let withdrawals = by_rank.then(|| Withdrawals::new(gpu_table)).transpose()?;
        Ok(Self {
            sweeper: Sweeper::new(gpu_table, SAMPLE, MAX_EVICTED, common.tables.len())?,
            lister: Lister::new(gpu_table, LISTED, common.keys.narrow())?,
            withdrawals,
            plan: EvictionPlan::default(),
            hand: 0,
            draw: 0,
        })
    }
}

impl<D: Driver> Shared<D> {
    pub(crate) fn evict_step(&self) -> Result<EvictStep, DriverError> {
        let sweep = &mut *self.sweep.lock().even_poisoned();
        self.clear_pointers_if_due(sweep)?;
        let waiting = self.tidy_up()?;
        sweep.plan.choose(self, &self.fill_level(), &self.slots, waiting);
        match sweep.plan.goal {
            Goal::Idle if waiting == 0 => Ok(EvictStep::Idle),
            Goal::Idle => Ok(EvictStep::Waiting),
            _ if waiting + SLOTS > MAX_WAITING => Ok(EvictStep::Waiting),
            Goal::EvictCold if self.eviction.is_by_age() => self.evict_cold(sweep, MAX_WAITING - waiting),
            Goal::EvictCold => self.evict_cold_by_rank(sweep, MAX_WAITING - waiting),
            Goal::DrainSlabs(left) => self.drain_slabs(sweep, left, MAX_WAITING - waiting),
        }
    }

    /// How much to evict now, at most `room` entries.
    pub(crate) fn quota(&self, room: usize) -> EvictionQuota {
        let fill = self.fill_level();
        let (excess, entries) = (fill.excess(), fill.entries.used);
        let pointers_too = self.watermarks.excess(fill.entries) > 0.0;
        let kept = if pointers_too { 0 } else { self.pointers.count().min(entries) };
        // This assumes rows of mean size. If the evicted rows are smaller, another step follows.
        let most = (excess * (entries - kept) as f64).ceil() as usize;
        EvictionQuota { excess, most: most.min(room), pointers_too }
    }

    fn evict_cold(&self, sweep: &mut Sweep<D>, room: usize) -> Result<EvictStep, DriverError> {
        let (now, EvictionQuota { excess, most, pointers_too }) = (self.epochs.tag(), self.quota(room));
        sweep.draw = sweep.draw.wrapping_add(SAMPLE as u64);
        let ages = sweep.sweeper.sample(now, sweep.draw, pointers_too)?;
        let mut ages: Vec<u64> = ages.iter().filter(|&&age| age != u32::MAX).map(|&age| age.into()).collect();
        let age = u32::try_from(threshold(&mut ages, excess)).unwrap_or(u32::MAX);
        let victims = match pointers_too {
            true => Victims::Aged(age),
            false => Victims::AgedRows { age, pointers: self.pointers.room() },
        };
        self.sweep(sweep, now, Stretch { hand: sweep.hand, buckets: BUCKETS_PER_STEP, most, victims })?;
        self.advance(sweep, BUCKETS_PER_STEP);
        Ok(EvictStep::More)
    }

    fn drain_slabs(&self, sweep: &mut Sweep<D>, left: u64, room: usize) -> Result<EvictStep, DriverError> {
        let mut slabs = vec![0_u32; self.slots.shape().slabs.div_ceil(32)];
        for (slab, _) in self.slots.draining().into_iter().enumerate().filter(|(_, draining)| *draining) {
            slabs[slab / 32] |= 1 << (slab % 32);
        }
        // Few enough buckets that one sweep can evict all their entries. There is room for those of one.
        let buckets =
            left.min((room.min(MAX_EVICTED) / SLOTS) as u64).min(u64::from(BUCKETS_PER_STEP)) as u32;
        let stretch = Stretch { hand: sweep.hand, buckets, most: room, victims: Victims::In(&slabs) };
        self.sweep(sweep, self.epochs.tag(), stretch)?;
        self.advance(sweep, buckets);
        let left = left - u64::from(buckets);
        sweep.plan.goal = if left == 0 { Goal::Idle } else { Goal::DrainSlabs(left) };
        Ok(EvictStep::More)
    }

    /// Evicts the victims of a stretch. Returns whether the stretch may have more victims.
    pub(crate) fn sweep(
        &self,
        sweep: &mut Sweep<D>,
        now: u64,
        stretch: Stretch,
    ) -> Result<bool, DriverError> {
        let most = stretch.most.min(MAX_EVICTED);
        let evicted = sweep.sweeper.sweep(now, stretch)?;
        // Earlier jobs on the same stream have ended too. The sweep may have evicted rows that they linked,
        // so their rows are counted before the evicted entries are subtracted.
        self.harvest_ended(&mut self.replacer.lock().even_poisoned())?;
        for entry in evicted.iter().filter(|entry| entry.key != EMPTY_KEY) {
            let unlinked = Unlinked::withdrawn(FlatKey(entry.key), Location::from_bits(entry.location));
            if entry.moved > 0 {
                self.count_pointer();
            }
            self.retire(unlinked);
        }
        Ok(evicted.len() == most)
    }

    /// Moves the hand by this many buckets.
    fn advance(&self, sweep: &mut Sweep<D>, buckets: u32) {
        sweep.hand = (sweep.hand + u64::from(buckets)) % self.gpu_table.shape().buckets;
    }
}
