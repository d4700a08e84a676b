//! Eviction by rank in a data set.
//!
//! Only the host has the ranks. So the device lists entries, first a sample for the threshold and then the
//! buckets at the hand. The host computes the coldness of the entries. It then launches jobs that withdraw
//! the coldest entries, or turn them into pointers to host memory.
//!
//! Other jobs may change the index between the listing and these jobs. If an entry has been replaced, the new
//! entry of the key is evicted, which has the same rank. If an entry has been evicted, a withdrawal does
//! nothing, and a job for a pointer links the pointer as a new entry.

use std::sync::Arc;

use super::super::evictor::EvictStep;
use super::super::index::{Location, Unlinked};
use super::super::policy::threshold;
use super::Shared;
use super::evict::Sweep;
use super::pointers::RowPointer;
use super::replace::JOBS;
use crate::cache::gpu::args::{JobKind, LinkResult, Listed, MayReplace};
use crate::cache::gpu::lister::Look;
use crate::cache::gpu::table::{GpuTable, IndexJob, JobRow, Jobs};
use crate::device::cuda::memory::Staging;
use crate::device::cuda::{Driver, DriverError};
use crate::sync::EvenPoisoned;
use crate::types::FlatKey;

/// Jobs that remove entries from the index, or turn them into pointers to host memory.
pub(crate) struct Withdrawals<D: Driver> {
    jobs: Jobs<D>,
    /// [`Jobs::push`] requires a staging buffer. These jobs copy no rows and do not use it.
    no_rows: Staging<D>,
}

impl<D: Driver> Withdrawals<D> {
    pub(crate) fn new(gpu_table: &Arc<GpuTable<D>>) -> Result<Self, DriverError> {
        Ok(Self { jobs: Jobs::new(gpu_table, JOBS)?, no_rows: Staging::new(gpu_table.driver(), 1)? })
    }

    /// Adds a job that removes the entry of a key, or turns it into a pointer to its row in host memory.
    fn push(&mut self, entry: &Listed, pointer: Option<RowPointer>) {
        let (row, key, older) = (JobRow::InPlace, entry.key, entry.age);
        let (kind, RowPointer { location, words }) = match pointer {
            Some(pointer) => (JobKind::Swap, pointer),
            None => (JobKind::Withdraw, RowPointer { location: 0, words: 0 }),
        };
        self.jobs.push(IndexJob { key, location, row, tag: 0, words, kind, older }, &self.no_rows);
    }
}

impl<D: Driver> Shared<D> {
    pub(crate) fn evict_cold_by_rank(
        &self,
        sweep: &mut Sweep<D>,
        room: usize,
    ) -> Result<EvictStep, DriverError> {
        let (now, quota) = (self.epochs.tag(), self.quota(room));
        let Sweep { lister, withdrawals: Some(withdrawals), hand, draw, .. } = sweep else {
            return Ok(EvictStep::Idle);
        };
        let coldness = |entry: &Listed| self.eviction.coldness(FlatKey(entry.key), entry.age);
        let may_evict =
            |entry: &&Listed| quota.pointers_too || !Location::from_bits(entry.location).is_pointer();
        *draw = draw.wrapping_add(lister.buckets());
        let sample = lister.look(now, Look::Drawn(*draw))?.filter(may_evict);
        let threshold = threshold(&mut sample.map(coldness).collect::<Vec<u64>>(), quota.excess);
        let stretch = Look::From { bucket: *hand, count: lister.buckets() };
        let victims =
            lister.look(now, stretch)?.filter(may_evict).filter(|entry| coldness(entry) >= threshold);
        let mut pointers = if quota.pointers_too { 0 } else { self.pointers.room() };
        for entry in victims.take(quota.most.min(JOBS)) {
            let pointer = (pointers > 0).then(|| self.pointer_of(FlatKey(entry.key))).flatten();
            pointers -= u64::from(pointer.is_some());
            withdrawals.push(entry, pointer);
        }
        *hand = (*hand + lister.buckets()) % self.gpu_table.shape().buckets;
        if !withdrawals.jobs.is_empty() {
            self.withdraw(withdrawals, now)?;
        }
        Ok(EvictStep::More)
    }

    fn withdraw(&self, Withdrawals { jobs, .. }: &mut Withdrawals<D>, now: u64) -> Result<(), DriverError> {
        let launched = jobs.launch(now, MayReplace::Nothing, None);
        // Also after an error, because no jobs can be added before.
        let outcomes = jobs.finish()?;
        launched?;
        // Earlier jobs on the same stream have ended too. These jobs may have removed rows that they linked,
        // so their rows are counted before the removed entries are subtracted.
        self.harvest_ended(&mut self.replacer.lock().even_poisoned())?;
        for outcome in outcomes {
            let unlinked =
                || Unlinked::withdrawn(FlatKey(outcome.key), Location::from_bits(outcome.location));
            match outcome.result() {
                Some(LinkResult::Withdrawn) => self.retire(unlinked()),
                // The pointer is a new entry.
                Some(LinkResult::New) => self.count_pointer(),
                Some(LinkResult::Swapped) => {
                    self.count_pointer();
                    self.retire(unlinked());
                }
                // The entry has left the index meanwhile, or another one has taken its place.
                Some(LinkResult::Absent | LinkResult::Full | LinkResult::Present | LinkResult::Replaced)
                | None => {}
            }
        }
        Ok(())
    }
}
