//! Rows that go by their rank in a data set.
//!
//! Ranks are looked up by key, in a table of the host. So the device lists entries, a sample first and then the
//! stretch at the hand; the host says how cold each is, and has the device withdraw those that go. An entry may
//! have been exchanged between: then the new one goes, which is of the same rank.

use std::sync::Arc;

use super::super::evictor::EvictStep;
use super::super::index::{Location, Unlinked};
use super::super::policy::threshold;
use super::evict::Sweep;
use super::replace::JOBS;
use super::{Shared, lock};
use crate::device::cuda::args::{JobKind, LINK_WITHDRAWN, Listed, MayReplace};
use crate::device::cuda::lister::Look;
use crate::device::cuda::memory::Staging;
use crate::device::cuda::tier::{Job, JobRow, Jobs, Tier};
use crate::device::cuda::{Driver, DriverError};
use crate::types::FlatKey;

/// Jobs that take entries out of the index.
pub(super) struct Withdrawals<D: Driver> {
    jobs: Jobs<D>,
    /// No row comes in with them.
    nothing: Staging<D>,
}

impl<D: Driver> Withdrawals<D> {
    pub fn new(tier: &Arc<Tier<D>>) -> Result<Self, DriverError> {
        Ok(Self { jobs: Jobs::new(tier, JOBS)?, nothing: Staging::new(tier.driver(), 1)? })
    }

    /// Takes a key's entry out, whosever row it is.
    fn push(&mut self, key: u64) -> bool {
        let (row, kind) = (JobRow::InPlace, JobKind::Withdraw);
        self.jobs.push(Job { key, location: 0, row, tag: 0, words: 0, kind, older: 0 }, &self.nothing)
    }

    /// What left the index.
    fn finish(&mut self, now: u64) -> Result<Vec<Unlinked>, DriverError> {
        self.jobs.launch(now, MayReplace::Nothing, Some(&mut self.nothing))?;
        let outcomes = self.jobs.finish()?.iter().filter(|outcome| outcome.link == LINK_WITHDRAWN);
        Ok(outcomes
            .map(|out| Unlinked::withdrawn(FlatKey(out.key), Location::from_bits(out.location)))
            .collect())
    }
}

impl<D: Driver> Shared<D> {
    pub(super) fn lower_by_rank(&self, sweep: &mut Sweep<D>, room: usize) -> Result<EvictStep, DriverError> {
        let (now, (excess, most)) = (self.epochs.tag(), self.excess(room));
        let Sweep { lister, withdrawals: Some(withdrawals), hand, draw, .. } = sweep else {
            return Ok(EvictStep::Idle);
        };
        let coldness = |entry: &Listed| self.eviction.coldness(FlatKey(entry.key), entry.age);
        *draw = draw.wrapping_add(lister.buckets());
        let mut sample: Vec<u64> = lister.look(now, Look::Drawn(*draw))?.map(coldness).collect();
        let threshold = threshold(&mut sample, excess);
        let stretch = Look::From(*hand, lister.buckets());
        let going = lister.look(now, stretch)?.filter(|entry| coldness(entry) >= threshold);
        for entry in going.take(most.min(JOBS)) {
            withdrawals.push(entry.key);
        }
        *hand = (*hand + lister.buckets()) % self.tier.shape().buckets;
        if withdrawals.jobs.is_empty() {
            return Ok(EvictStep::More);
        }
        let gone = withdrawals.finish(now)?;
        // Jobs that went before are done too: count their entries in before these are counted out.
        self.harvest(&mut lock(&self.replacer), false)?;
        gone.into_iter().for_each(|unlinked| self.retire(unlinked));
        Ok(EvictStep::More)
    }
}
