//! Rows that go by their rank in a data set.
//!
//! Ranks are looked up by key, in a table of the host. So the device lists entries, a sample first and then the
//! stretch at the hand; the host says how cold each is, and has the device withdraw those that go, or point at them
//! in memory of the host. An entry may have been exchanged between: then the new one goes, which is of the same
//! rank. One that went meanwhile is not there to be withdrawn, or comes back as a pointer.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::evictor::EvictStep;
use super::super::index::{Location, Unlinked};
use super::super::policy::threshold;
use super::evict::Sweep;
use super::replace::JOBS;
use super::{Shared, lock};
use crate::cache::gpu::args::{JobKind, LINK_NEW, LINK_SWAPPED, LINK_WITHDRAWN, Listed, MayReplace};
use crate::cache::gpu::lister::Look;
use crate::cache::gpu::table::{GpuTable, Job, JobRow, Jobs};
use crate::device::cuda::memory::Staging;
use crate::device::cuda::{Driver, DriverError};
use crate::types::FlatKey;

/// Jobs that take entries out of the index, or have them point to memory of the host.
pub(crate) struct Withdrawals<D: Driver> {
    jobs: Jobs<D>,
    /// No row comes in with them.
    nothing: Staging<D>,
}

impl<D: Driver> Withdrawals<D> {
    pub(crate) fn new(tier: &Arc<GpuTable<D>>) -> Result<Self, DriverError> {
        Ok(Self { jobs: Jobs::new(tier, JOBS)?, nothing: Staging::new(tier.driver(), 1)? })
    }

    /// Takes an entry out, whosever row it is, or has it point to where its row lies in memory of the host.
    fn push(&mut self, entry: &Listed, pointer: Option<u64>, words: usize) {
        let (row, key, older) = (JobRow::InPlace, entry.key, entry.age);
        let (kind, location) = match pointer {
            Some(pointer) => (JobKind::Swap, pointer),
            None => (JobKind::Withdraw, 0),
        };
        self.jobs.push(Job { key, location, row, tag: 0, words, kind, older }, &self.nothing);
    }
}

impl<D: Driver> Shared<D> {
    pub(crate) fn lower_by_rank(&self, sweep: &mut Sweep<D>, room: usize) -> Result<EvictStep, DriverError> {
        let (now, lowering) = (self.epochs.tag(), self.lowering(room));
        let Sweep { lister, withdrawals: Some(withdrawals), hand, draw, .. } = sweep else {
            return Ok(EvictStep::Idle);
        };
        let coldness = |entry: &Listed| self.eviction.coldness(FlatKey(entry.key), entry.age);
        let may_go = |entry: &&Listed| lowering.pointers_too || entry.location & 1 == 0;
        *draw = draw.wrapping_add(lister.buckets());
        let sample = lister.look(now, Look::Drawn(*draw))?.filter(may_go);
        let threshold = threshold(&mut sample.map(coldness).collect::<Vec<u64>>(), lowering.excess);
        let stretch = Look::From(*hand, lister.buckets());
        let going = lister.look(now, stretch)?.filter(may_go).filter(|entry| coldness(entry) >= threshold);
        let mut pointers = if lowering.pointers_too { 0 } else { self.pointing.count.room() };
        for entry in going.take(lowering.most.min(JOBS)) {
            let pointer =
                (pointers > 0).then(|| self.pointing.of_entry(&self.keys, FlatKey(entry.key))).flatten();
            pointers -= u64::from(pointer.is_some());
            let (pointer, words) = pointer.unzip();
            withdrawals.push(entry, pointer, words.unwrap_or(0));
        }
        *hand = (*hand + lister.buckets()) % self.tier.shape().buckets;
        if !withdrawals.jobs.is_empty() {
            self.put_out(withdrawals, now)?;
        }
        Ok(EvictStep::More)
    }

    fn put_out(&self, Withdrawals { jobs, .. }: &mut Withdrawals<D>, now: u64) -> Result<(), DriverError> {
        jobs.launch(now, MayReplace::Nothing, None)?;
        let outcomes = jobs.finish()?;
        // Jobs that went before are done too: count their entries in before these are counted out.
        self.harvest(&mut lock(&self.replacer), false)?;
        for outcome in outcomes {
            let left = || Unlinked::withdrawn(FlatKey(outcome.key), Location::from_bits(outcome.location));
            match outcome.link {
                LINK_WITHDRAWN => self.retire(left()),
                // A new entry, which is a pointer.
                LINK_NEW | LINK_SWAPPED => {
                    self.entries.fetch_add(1, Ordering::Relaxed);
                    self.pointing.count.made(1);
                    if outcome.link == LINK_SWAPPED {
                        self.retire(left());
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}
