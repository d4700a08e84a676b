//! Rows that come in: jobs for the device, and what becomes of them.
//!
//! A row that is offered gets a slot and a job; the device copies rows in and then links their keys. What
//! came of it is known when that launch's event has fired, and is looked at the next time someone offers rows or
//! evicts: a row that found its key present, or no room, gives its slot back; an entry that was put out, or
//! whose row was exchanged, waits in limbo for the batches that may read it.
//!
//! A launch has a key once. Of rows that share one, those that are let in while another is on its way are
//! left out; but one that is to be changed or withdrawn waits for the next launch.
//!
//! Blocks of jobs are few. Where all are under way, the one who offers waits for the oldest launch, never for
//! room.
//!
//! Where `debug_assertions` are on, slots are overwritten when they are freed, on the same stream and so before
//! they are filled again: whoever still reads them reads what no row holds.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::epoch::Freed;
use super::super::error::CacheError;
use super::super::index::{Location, Unlinked};
use super::super::shared::MAX_WAITING;
use super::super::slots::{Slot, UNIT};
use super::{DeviceCacheError, Shared, lock};
use crate::cache::gpu::args::{
    EMPTY_KEY, JobKind, LINK_FULL, LINK_NEW, LINK_PRESENT, LINK_REPLACED, LINK_SWAPPED, LINK_WITHDRAWN,
    MayReplace, Outcome,
};
use crate::cache::gpu::table::{GpuTable, Job, JobRow, Jobs};
use crate::device::cuda::memory::Staging;
use crate::device::cuda::{Driver, DriverError};
use crate::types::{FlatKey, TableId};

/// Jobs of a block, and blocks: 1 MiB of pinned memory.
pub(crate) const JOBS: usize = 4096;
const BLOCKS: usize = 4;

/// The jobs under way, and blocks for more.
pub(crate) struct Replacer<D: Driver> {
    under_way: VecDeque<(Jobs<D>, Vec<Entry>)>,
    spare: Vec<Jobs<D>>,
    /// For jobs whose rows are not staged.
    pub nothing: Staging<D>,
}

/// What a job is about.
pub(crate) struct Entry {
    pub table: TableId,
    pub key: FlatKey,
    pub place: Place,
}

/// Where the row of a job is.
pub(crate) enum Place {
    /// In a slot that nobody knows of before it is linked.
    New(Slot),
    /// In a slot that batches may have found in an overlay.
    Found(Location),
    /// Nowhere: the job links nothing.
    None,
}

/// In what way rows are offered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Order {
    /// The batch that offers, for stamp and admission.
    pub batch: u64,
    /// What to do where a key is there already.
    pub kind: JobKind,
    /// Whether the admission policy is asked.
    pub admission: bool,
}

/// A row that is offered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    /// Whose.
    pub table: TableId,
    /// Which.
    pub id: u64,
    /// Where it comes from.
    pub row: JobRow,
}

impl<D: Driver> Replacer<D> {
    pub(crate) fn new(tier: &Arc<GpuTable<D>>) -> Result<Self, DriverError> {
        let spare = (0..BLOCKS).map(|_| Jobs::new(tier, JOBS)).collect::<Result<_, _>>()?;
        Ok(Self { under_way: VecDeque::new(), spare, nothing: Staging::new(tier.driver(), 1)? })
    }
}

impl<D: Driver> Shared<D> {
    /// Offers rows that lie in the staging memory, each once. Returns how many are on their way.
    pub(crate) fn replace(
        &self,
        order: Order,
        staging: &mut Staging<D>,
        offers: impl Iterator<Item = Offer>,
    ) -> Result<u64, DeviceCacheError> {
        let replacer = &mut *lock(&self.replacer);
        self.harvest(replacer, false)?;
        let mut offers = offers.peekable();
        let (mut given, mut later) = (0, None);
        while later.is_some() || offers.peek().is_some() {
            let mut jobs = self.block(replacer)?;
            let mut entries = Vec::new();
            while jobs.len() < JOBS {
                let next = match later.take() {
                    Some(next) => Some(next),
                    None => match offers.next() {
                        Some(offer) => self.admit(replacer, order, offer)?,
                        None => break,
                    },
                };
                let Some((entry, job)) = next else { continue };
                if jobs.push(job, staging) {
                    entries.push(entry);
                } else if order.kind == JobKind::Keep || jobs.is_empty() {
                    self.leave_out(entry);
                } else {
                    later = Some((entry, job));
                    break;
                }
            }
            given += entries.len() as u64;
            self.launch(replacer, order, (jobs, entries), Some(staging))?;
        }
        Ok(given)
    }

    /// What so many jobs may put out. By age alone, a kernel would put out a row of high rank: under LFU a full
    /// pair of buckets stays as it is, and takes no more until the evictor has been there. For a row that is not
    /// offered, but exchanged, nothing goes but what has its key.
    fn may_replace(&self, kind: JobKind, jobs: usize) -> MayReplace {
        match &self.eviction {
            _ if kind != JobKind::Keep => MayReplace::SameKey,
            _ if self.limbo.waiting() + jobs > MAX_WAITING => MayReplace::Nothing,
            eviction if eviction.is_by_age() => MayReplace::Coldest,
            _ => MayReplace::SameKey,
        }
    }

    /// Gives up a row that is not linked.
    pub(crate) fn leave_out(&self, entry: Entry) {
        if let Place::New(slot) = entry.place {
            self.slots.give_back(slot.location());
            self.counts.rejected_full.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Launches jobs, what became of which is looked at later.
    pub(crate) fn launch(
        &self,
        replacer: &mut Replacer<D>,
        order: Order,
        (mut jobs, entries): (Jobs<D>, Vec<Entry>),
        staging: Option<&mut Staging<D>>,
    ) -> Result<(), DriverError> {
        if jobs.is_empty() {
            replacer.spare.push(jobs);
            return Ok(());
        }
        jobs.launch(order.batch, self.may_replace(order.kind, entries.len()), staging)?;
        replacer.under_way.push_back((jobs, entries));
        Ok(())
    }

    /// The job of an offer, if it is admitted and there is a slot for it.
    fn admit(
        &self,
        replacer: &mut Replacer<D>,
        Order { batch, kind, admission }: Order,
        offer: Offer,
    ) -> Result<Option<(Entry, Job)>, DeviceCacheError> {
        let Offer { table, id, row } = offer;
        let bytes = self.tables.get(table.index()).map_or(0, |t| t.row_bytes);
        let own = self.own_key(table, id, bytes)?;
        let (_, key) = self.keys.row(table, own);
        if admission && !self.admission.admits(own, batch, || self.is_roomy()) {
            self.counts.not_admitted.fetch_add(1, Ordering::Relaxed);
            return Ok(None);
        }
        let Some(slot) = self.take(replacer, table)? else {
            self.counts.rejected_full.fetch_add(1, Ordering::Relaxed);
            self.starved.store(u64::from(self.classes[table.index()].0) + 1, Ordering::Relaxed);
            self.wake.now();
            return Ok(None);
        };
        let location = slot.location().bits();
        let job = Job { location, row, ..self.job(table, own, kind) };
        Ok(Some((Entry { table, key, place: Place::New(slot) }, job)))
    }

    /// A job for a row that is nowhere yet.
    pub(crate) fn job(&self, table: TableId, own: FlatKey, kind: JobKind) -> Job {
        Job {
            key: self.keys.row(table, own).1.0,
            location: 0,
            row: JobRow::InPlace,
            tag: if self.keys.tagged(table) { own.0 } else { 0 },
            words: self.tables[table.index()].row_bytes / UNIT,
            kind,
            older: 0,
        }
    }

    /// A slot for a row, if need be one that unfinished batches kept until just now.
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

    /// A block of jobs, if need be the oldest under way, once it is done.
    pub(crate) fn block(&self, replacer: &mut Replacer<D>) -> Result<Jobs<D>, DriverError> {
        if replacer.spare.is_empty() {
            self.harvest_oldest(replacer)?;
        }
        // Blocks are spare or under way, and there is at least one.
        replacer.spare.pop().map_or_else(|| Jobs::new(&self.tier, JOBS), Ok)
    }

    /// Looks at what became of jobs that are done, or waits for all of them.
    pub(crate) fn harvest(&self, replacer: &mut Replacer<D>, wait: bool) -> Result<(), DriverError> {
        while let Some((oldest, _)) = replacer.under_way.front() {
            if !wait && !oldest.fired()? {
                break;
            }
            self.harvest_oldest(replacer)?;
        }
        Ok(())
    }

    fn harvest_oldest(&self, replacer: &mut Replacer<D>) -> Result<(), DriverError> {
        let Some((mut jobs, entries)) = replacer.under_way.pop_front() else { return Ok(()) };
        // All that came in before what went out: an entry may have done both in one launch.
        let outcomes = jobs.finish()?;
        outcomes.iter().zip(&entries).for_each(|(outcome, entry)| self.count_in(outcome, entry));
        outcomes.iter().zip(entries).for_each(|(outcome, entry)| self.put_aside(outcome, entry));
        replacer.spare.push(jobs);
        if self.crossed() {
            self.wake.now();
        }
        Ok(())
    }

    pub(crate) fn count_in(&self, outcome: &Outcome, entry: &Entry) {
        if matches!(outcome.link, LINK_NEW | LINK_REPLACED | LINK_SWAPPED) {
            self.counts.inserted.fetch_add(1, Ordering::Relaxed);
            self.counts.linked_bytes.fetch_add(self.footprint(entry.table), Ordering::Relaxed);
            self.entries.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn put_aside(&self, outcome: &Outcome, entry: Entry) {
        let left = || Unlinked::withdrawn(FlatKey(outcome.key), Location::from_bits(outcome.location));
        match outcome.link {
            LINK_REPLACED => {
                self.retire(left());
                self.wake.now();
            }
            LINK_SWAPPED | LINK_WITHDRAWN => self.retire(left()),
            LINK_PRESENT | LINK_FULL => {
                match entry.place {
                    // Never linked, and its copy is done.
                    Place::New(slot) => self.slots.give_back(slot.location()),
                    Place::Found(slot) => self.limbo.put(Unlinked::withdrawn(entry.key, slot), &self.epochs),
                    Place::None => {}
                }
                let full = u64::from(outcome.link == LINK_FULL);
                self.counts.rejected_full.fetch_add(full, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    /// Counts an entry out and, if it had a slot, puts that aside until no batch can read it.
    pub(crate) fn retire(&self, unlinked: Unlinked) {
        self.entries.fetch_sub(1, Ordering::Relaxed);
        if unlinked.location().is_host() {
            self.pointing.count.removed();
            return;
        }
        self.vacate(unlinked);
    }

    /// Puts the slot of a row aside that is no longer found there.
    pub(crate) fn vacate(&self, unlinked: Unlinked) {
        if let Some(table) = self.keys.index_keys().table_of(unlinked.key) {
            self.counts.linked_bytes.fetch_sub(self.footprint(table), Ordering::Relaxed);
            self.counts.tables[table.index()].evictions.fetch_add(1, Ordering::Relaxed);
        }
        self.limbo.put(unlinked, &self.epochs);
    }

    /// Frees the slots whose batches are all finished. Returns how many still wait.
    pub(crate) fn reclaim(&self, replacer: &mut Replacer<D>) -> Result<usize, DriverError> {
        self.poll()?;
        let mut free = Vec::new();
        let waiting = self.limbo.reclaim(&self.epochs, |slot: Freed| free.push(slot.location()));
        if cfg!(debug_assertions) {
            self.poison(replacer, &free)?;
        }
        free.into_iter().for_each(|location| self.slots.give_back(location));
        Ok(waiting)
    }

    fn poison(&self, replacer: &mut Replacer<D>, slots: &[Location]) -> Result<(), DriverError> {
        for slots in slots.chunks(JOBS) {
            let mut jobs = Jobs::new(&self.tier, slots.len())?;
            for &slot in slots {
                let words = self.slots.bytes_at(slot) / UNIT;
                let row = JobRow::Poison;
                let (key, location, kind) = (EMPTY_KEY, slot.bits(), JobKind::Keep);
                let job = Job { key, location, row, tag: 0, words, kind, older: 0 };
                jobs.push(job, &replacer.nothing);
            }
            jobs.copy(None)?;
            jobs.finish()?;
        }
        Ok(())
    }

    /// Waits for all jobs and frees what can be freed.
    pub(crate) fn settle(&self) -> Result<(), DriverError> {
        let replacer = &mut *lock(&self.replacer);
        self.harvest(replacer, true)?;
        self.reclaim(replacer).map(|_| ())
    }

    /// As [`Self::reclaim`], for who does not hold the replacer; looks after jobs that are done first.
    pub(crate) fn tidy_up(&self) -> Result<usize, DriverError> {
        let replacer = &mut *lock(&self.replacer);
        self.harvest(replacer, false)?;
        self.reclaim(replacer)
    }
}

/// Puts rows into the cache that no batch asked for, to fill it before the first.
pub(crate) struct DeviceWriter<D: Driver> {
    shared: Arc<Shared<D>>,
    staging: Staging<D>,
}

impl<D: Driver> DeviceWriter<D> {
    pub(crate) fn new(shared: &Arc<Shared<D>>, staging_bytes: usize) -> Result<Self, DeviceCacheError> {
        let staging = Staging::new(shared.tier.driver(), staging_bytes.div_ceil(UNIT))?;
        Ok(Self { shared: shared.clone(), staging })
    }

    /// Offers rows of the current version: those whose keys are there already are left alone. A switch waits for
    /// it. Returns how many are on their way.
    ///
    /// # Errors
    /// [`DeviceCacheError`] for a table, an id or a length that the cache was not made for, with none of the
    /// rows offered.
    pub(crate) fn insert(&mut self, rows: &[(TableId, u64, &[u8])]) -> Result<u64, DeviceCacheError> {
        let shared = self.shared.clone();
        // What is current, and so whose rows these are, stays as it is meanwhile.
        let _no_switch = lock(&shared.switching);
        for &(table, id, row) in rows {
            self.shared.own_key(table, id, row.len())?;
        }
        let (mut given, mut rest) = (0, rows);
        while !rest.is_empty() {
            let words = self.staging.words_mut()?;
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(words);
            let (mut at, mut offers) = (0, Vec::new());
            for &(table, id, row) in rest {
                let Some(to) = bytes.get_mut(at..at + row.len()) else { break };
                to.copy_from_slice(row);
                offers.push(Offer { table, id, row: JobRow::Staged(at / UNIT) });
                at += row.len();
            }
            if offers.is_empty() {
                let (got, limit) = (rest[0].2.len(), bytes.len());
                return Err(CacheError::TooSmall { got: limit, minimum: got, sizes: 1 }.into());
            }
            rest = &rest[offers.len()..];
            let order = Order { batch: self.shared.epochs.tag(), kind: JobKind::Keep, admission: false };
            given += self.shared.replace(order, &mut self.staging, offers.into_iter())?;
        }
        Ok(given)
    }
}
