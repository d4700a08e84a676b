//! Inserts rows into the cache by jobs for the device, and reads the outcomes of the jobs.
//!
//! An offered row that is admitted gets a slot and a job. The device copies the rows of a launch into their
//! slots and then links their keys. The host reads the outcomes after the launch has ended, the next time
//! that rows are offered or evicted. If the key is present already, or the index is full, the slot is freed.
//! An entry that was evicted or replaced is retired: its slot waits for the batches that may read it.
//!
//! A launch has each key at most once. Of offered rows that share a key, the first gets a job and the others
//! are dropped. The jobs of a version switch are not dropped: a job with a key that the launch already has
//! waits for the next launch.
//!
//! The number of job blocks is fixed. When all blocks are running, the next offer waits for the oldest
//! launch. It never waits for free slots.
//!
//! With `debug_assertions`, freed slots are overwritten on the same stream before they are filled again, so
//! that a late reader reads values that no row has.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::epoch::Freed;
use super::super::index::{Location, Unlinked};
use super::super::policy::Missed;
use super::super::shared::MAX_WAITING;
use super::super::slabs::Slot;
use super::{GpuCacheError, Shared};
use crate::cache::gpu::args::{EMPTY_KEY, JobKind, LinkResult, MayReplace, Outcome};
use crate::cache::gpu::table::{GpuTable, IndexJob, JobRow, Jobs};
use crate::device::cuda::memory::Staging;
use crate::device::cuda::{Driver, DriverError};
use crate::mem::WORD_BYTES;
use crate::sync::EvenPoisoned;
use crate::types::{FlatKey, RowId, TableId};

/// Jobs per block.
pub(crate) const JOBS: usize = 4096;
/// Blocks of jobs: 1.1 MiB of pinned memory.
const BLOCKS: usize = 4;

/// The blocks of running jobs, and spare blocks for new jobs.
pub(crate) struct Replacer<D: Driver> {
    running: VecDeque<JobBlock<D>>,
    spare: Vec<Jobs<D>>,
    /// [`Jobs::push`] requires a staging buffer. Jobs that copy no rows from one use this.
    pub no_rows: Staging<D>,
}

/// Jobs of one launch, and for each job the row that it changes.
pub(crate) struct JobBlock<D: Driver> {
    pub jobs: Jobs<D>,
    pub rows: Vec<JobTarget>,
}

/// A block of jobs, and how they are launched.
pub(crate) struct Launch<'s, D: Driver> {
    pub block: JobBlock<D>,
    /// The batch number with which linked rows are stamped.
    pub now: u64,
    pub may_replace: MayReplace,
    /// The buffer from which jobs copy rows, if any job does.
    pub staging: Option<&'s mut Staging<D>>,
}

/// The row that a job changes.
pub(crate) struct JobTarget {
    pub table: TableId,
    pub key: FlatKey,
    pub slot: JobSlot,
}

/// The slot of a job's row.
pub(crate) enum JobSlot {
    /// No batch finds it before the job links it.
    New(Slot),
    /// Batches may have found it in an overlay.
    InOverlay(Location),
    /// The job links no slot.
    None,
}

/// A row that is offered to the cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    pub row: RowId,
    /// Where a job reads the row's bytes.
    pub source: JobRow,
}

impl<D: Driver> Replacer<D> {
    pub(crate) fn new(gpu_table: &Arc<GpuTable<D>>) -> Result<Self, DriverError> {
        let spare = (0..BLOCKS).map(|_| Jobs::new(gpu_table, JOBS)).collect::<Result<_, _>>()?;
        Ok(Self { running: VecDeque::new(), spare, no_rows: Staging::new(gpu_table.driver(), 1)? })
    }
}

impl<D: Driver> Shared<D> {
    /// Offers rows to the cache, each at most once. `batch` is the number of the batch that offers them.
    pub(crate) fn replace(
        &self,
        batch: u64,
        staging: &mut Staging<D>,
        offers: impl Iterator<Item = Offer>,
    ) -> Result<(), GpuCacheError> {
        let replacer = &mut *self.replacer.lock().even_poisoned();
        self.harvest_ended(replacer)?;
        let mut offers = offers.peekable();
        while offers.peek().is_some() {
            let mut block = JobBlock { jobs: self.free_jobs(replacer)?, rows: Vec::new() };
            while block.jobs.len() < JOBS {
                let Some(offer) = offers.next() else { break };
                let Some((row, job)) = self.admit(replacer, batch, offer)? else { continue };
                if block.jobs.push(job, staging) {
                    block.rows.push(row);
                } else if let JobSlot::New(slot) = row.slot {
                    self.slots.give_back(slot.location());
                    self.counts.rejected_full.fetch_add(1, Ordering::Relaxed);
                }
            }
            let may_replace = self.may_replace(block.rows.len());
            self.launch(replacer, Launch { block, now: batch, may_replace, staging: Some(&mut *staging) })?;
        }
        Ok(())
    }

    /// What jobs for admitted rows may evict. A kernel sees ages but no ranks, so under LFU it evicts nothing
    /// from a full pair of buckets. The pair takes no new row until the evictor has made room in it.
    fn may_replace(&self, jobs: usize) -> MayReplace {
        match &self.eviction {
            _ if self.retired.waiting() + jobs > MAX_WAITING => MayReplace::Nothing,
            eviction if eviction.is_by_age() => MayReplace::Coldest,
            _ => MayReplace::SameKey,
        }
    }

    /// Launches the jobs of a block. A later [`Self::harvest_ended`] reads the outcomes.
    pub(crate) fn launch(
        &self,
        replacer: &mut Replacer<D>,
        Launch { mut block, now, may_replace, staging }: Launch<'_, D>,
    ) -> Result<(), DriverError> {
        if block.jobs.is_empty() {
            replacer.spare.push(block.jobs);
            return Ok(());
        }
        block.jobs.launch(now, may_replace, staging)?;
        replacer.running.push_back(block);
        Ok(())
    }

    /// The job of an offer, if the row is admitted and a slot is free.
    fn admit(
        &self,
        replacer: &mut Replacer<D>,
        batch: u64,
        Offer { row, source }: Offer,
    ) -> Result<Option<(JobTarget, IndexJob)>, GpuCacheError> {
        let table = row.table();
        let bytes = self.tables.get(table.index()).map_or(0, |t| t.row_bytes);
        let own = self.own_key(row, bytes)?;
        let (_, key) = self.keys.row(table, own);
        // The device does not count how often a batch reads a row.
        let missed = Missed { key: own, batch, occurrences: 1 };
        if !self.admits(missed, || self.fill_level()) {
            return Ok(None);
        }
        let Some(slot) = self.take(replacer, table)? else {
            self.starve(self.classes[table.index()]);
            return Ok(None);
        };
        let location = slot.location().bits();
        let job = IndexJob { location, row: source, ..self.job(table, own, JobKind::Keep) };
        Ok(Some((JobTarget { table, key, slot: JobSlot::New(slot) }, job)))
    }

    /// A job for a row. The caller sets the location and the source of the row, if the job needs them.
    pub(crate) fn job(&self, table: TableId, own: FlatKey, kind: JobKind) -> IndexJob {
        IndexJob {
            key: self.keys.row(table, own).1.0,
            location: 0,
            row: JobRow::InPlace,
            tag: if self.keys.tagged(table) { own.0 } else { 0 },
            words: self.tables[table.index()].row_bytes / WORD_BYTES,
            kind,
            older: 0,
        }
    }

    /// A slot for a row. If no slot is free, retired slots are reclaimed first.
    pub(crate) fn take(
        &self,
        replacer: &mut Replacer<D>,
        table: TableId,
    ) -> Result<Option<Slot>, DriverError> {
        let class = self.classes[table.index()];
        if let Some(slot) = self.slots.take(class) {
            return Ok(Some(slot));
        }
        self.reclaim(replacer)?;
        Ok(self.slots.take(class))
    }

    /// An empty block of jobs. If all blocks are running, waits for the oldest.
    pub(crate) fn free_jobs(&self, replacer: &mut Replacer<D>) -> Result<Jobs<D>, DriverError> {
        if replacer.spare.is_empty() {
            self.harvest_oldest(replacer)?;
        }
        // A failed launch has dropped its block, so it may be that no block is left.
        replacer.spare.pop().map_or_else(|| Jobs::new(&self.gpu_table, JOBS), Ok)
    }

    /// Reads the outcomes of the launches that have ended.
    pub(crate) fn harvest_ended(&self, replacer: &mut Replacer<D>) -> Result<(), DriverError> {
        while let Some(oldest) = replacer.running.front() {
            if !oldest.jobs.fired()? {
                break;
            }
            self.harvest_oldest(replacer)?;
        }
        Ok(())
    }

    /// Waits for all launches and reads their outcomes.
    fn harvest_all(&self, replacer: &mut Replacer<D>) -> Result<(), DriverError> {
        while !replacer.running.is_empty() {
            self.harvest_oldest(replacer)?;
        }
        Ok(())
    }

    fn harvest_oldest(&self, replacer: &mut Replacer<D>) -> Result<(), DriverError> {
        let Some(JobBlock { mut jobs, rows }) = replacer.running.pop_front() else { return Ok(()) };
        // First count all linked rows, then the evicted ones: one launch may link and evict the same entry.
        let outcomes = jobs.finish()?;
        outcomes.iter().zip(&rows).for_each(|(outcome, row)| self.count_linked(outcome, row));
        outcomes.iter().zip(rows).for_each(|(outcome, row)| self.free_unlinked(outcome, row));
        replacer.spare.push(jobs);
        if self.fill_level().crosses() {
            self.wake.now();
        }
        Ok(())
    }

    /// Counts the row of a job if the job has linked it.
    pub(crate) fn count_linked(&self, outcome: &Outcome, row: &JobTarget) {
        use LinkResult::{New, Replaced, Swapped};
        if matches!(outcome.result(), Some(New | Replaced | Swapped)) {
            self.counts.inserted.fetch_add(1, Ordering::Relaxed);
            self.counts.linked_bytes.fetch_add(self.footprint(row.table), Ordering::Relaxed);
            self.entries.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Retires the entry that a job has unlinked, and frees the slot of a row that it has not linked.
    pub(crate) fn free_unlinked(&self, outcome: &Outcome, row: JobTarget) {
        let unlinked = || Unlinked::withdrawn(FlatKey(outcome.key), Location::from_bits(outcome.location));
        match outcome.result() {
            Some(LinkResult::Replaced) => {
                self.retire(unlinked());
                self.wake.now();
            }
            Some(LinkResult::Swapped | LinkResult::Withdrawn) => self.retire(unlinked()),
            Some(result @ (LinkResult::Present | LinkResult::Full)) => {
                match row.slot {
                    // The slot was never linked, and the copy into it has ended.
                    JobSlot::New(slot) => self.slots.give_back(slot.location()),
                    JobSlot::InOverlay(slot) => {
                        self.retired.put(Unlinked::withdrawn(row.key, slot), &self.epochs);
                    }
                    JobSlot::None => {}
                }
                let full = u64::from(result == LinkResult::Full);
                self.counts.rejected_full.fetch_add(full, Ordering::Relaxed);
            }
            Some(LinkResult::New | LinkResult::Absent) | None => {}
        }
    }

    /// Removes an entry from the counts and retires its slot, if it has one.
    pub(crate) fn retire(&self, unlinked: Unlinked) {
        self.entries.fetch_sub(1, Ordering::Relaxed);
        self.common.retire(unlinked);
    }

    /// Frees the retired slots that no batch can read any more. Returns how many still wait.
    pub(crate) fn reclaim(&self, replacer: &mut Replacer<D>) -> Result<usize, DriverError> {
        let mut free = Vec::new();
        let waiting = self.retired.reclaim(&self.epochs, |slot: Freed| free.push(slot.location()));
        if cfg!(debug_assertions) {
            self.poison(replacer, &free)?;
        }
        free.into_iter().for_each(|location| self.slots.give_back(location));
        Ok(waiting)
    }

    /// Fills freed slots with values that no row has.
    fn poison(&self, replacer: &mut Replacer<D>, slots: &[Location]) -> Result<(), DriverError> {
        for slots in slots.chunks(JOBS) {
            let mut jobs = Jobs::new(&self.gpu_table, slots.len())?;
            for &slot in slots {
                let words = self.slots.bytes_at(slot) / WORD_BYTES;
                let row = JobRow::Poison;
                let (key, location, kind) = (EMPTY_KEY, slot.bits(), JobKind::Keep);
                let job = IndexJob { key, location, row, tag: 0, words, kind, older: 0 };
                jobs.push(job, &replacer.no_rows);
            }
            jobs.copy(None)?;
            jobs.finish()?;
        }
        Ok(())
    }

    /// Waits for all jobs, reads their outcomes and frees the retired slots that no batch can read.
    pub(crate) fn settle(&self) -> Result<(), DriverError> {
        let replacer = &mut *self.replacer.lock().even_poisoned();
        self.harvest_all(replacer)?;
        self.reclaim(replacer).map(|_| ())
    }

    /// Reads the outcomes of launches that have ended, then reclaims. Locks the replacer. Returns how many
    /// retired slots still wait.
    pub(crate) fn tidy_up(&self) -> Result<usize, DriverError> {
        let replacer = &mut *self.replacer.lock().even_poisoned();
        self.harvest_ended(replacer)?;
        self.reclaim(replacer)
    }
}
