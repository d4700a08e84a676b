//! The rows that a cache on a device begins with, and those that it holds, so that another may begin with them.
//!
//! As `cache/warm.rs`: the hottest first, without asking the admission policy, as far as there is room below the
//! high watermark, so that nothing is put out for them. Their stamps go backwards. What differs is that rows go in
//! by the launch: as many as surely have room are on their way at a time, each with the age that its place gives it.

use super::super::slots::UNIT;
use super::super::warm::{STAMPS, Warmed};
use super::replace::{Entry, JOBS, Place};
use super::{DeviceCache, DeviceCacheError, Shared, lock};
use crate::cache::gpu::args::{JobKind, LINK_NEW, LINK_SWAPPED, Listed, MayReplace};
use crate::cache::gpu::lister::Look;
use crate::cache::gpu::table::{Job, JobRow, Jobs};
use crate::device::cuda::memory::Staging;
use crate::device::cuda::{Driver, DriverError};
use crate::types::{FlatKey, TableId};

/// Words that rows are staged in, or one row of the largest size: 1 MiB.
const STAGED: usize = 1 << 18;

impl<D: Driver> DeviceCache<D> {
    /// As [`super::super::FlatCache::warm`]; waits for the device. Batches that are offering rows wait meanwhile.
    ///
    /// # Errors
    /// As there, and what the driver says.
    pub fn warm<'r>(
        &self,
        rows: impl IntoIterator<Item = (TableId, u64, &'r [u8])>,
    ) -> Result<Warmed, DeviceCacheError> {
        let shared = &*self.shared;
        // What is current, and so whose rows these are, stays as it is meanwhile.
        let standing = lock(&shared.switching);
        if standing.is_some() {
            return Err(DeviceCacheError::BrokenOff);
        }
        let mut filling = Filling::new(shared)?;
        let mut rows = rows.into_iter();
        loop {
            while filling.has_room() {
                let Some((table, id, row)) = rows.next() else { return Ok(filling.finish()?) };
                if let Err(wrong) = filling.push(table, id, row) {
                    filling.finish()?;
                    return Err(wrong);
                }
            }
            if filling.jobs.is_empty() {
                return Ok(Warmed { full: rows.next().is_some(), ..filling.warmed });
            }
            filling.flush()?;
        }
    }

    /// As [`super::super::FlatCache::hot_rows`]; waits for the device, a part of the index at a time.
    ///
    /// # Errors
    /// What the driver says.
    pub fn hot_rows(&self) -> Result<Vec<(TableId, u64)>, DeviceCacheError> {
        Ok(self.shared.hot_rows()?)
    }
}

impl<D: Driver> Shared<D> {
    fn hot_rows(&self) -> Result<Vec<(TableId, u64)>, DriverError> {
        let (now, buckets) = (self.epochs.tag(), self.tier.shape().buckets);
        // As on the host: 16 bytes a row, and no more by growing.
        let mut rows = Vec::with_capacity(self.entry_capacity() as usize);
        let mut from = 0;
        while from < buckets {
            // Let go between looks, for the evictor.
            let lister = &mut lock(&self.sweep).lister;
            let row = |entry: &Listed| {
                let (key, tag) = (FlatKey(entry.key), FlatKey(entry.tag));
                let table = self.keys.index_keys().table_of(key)?;
                let row = if self.keys.tagged(table) {
                    self.keys.own_keys().decode(tag)
                } else {
                    self.keys.index_keys().decode(key)
                };
                row.map(|(table, id)| (entry.age, table, id))
            };
            rows.extend(lister.look(now, Look::From(from, buckets - from))?.filter_map(row));
            from += lister.buckets();
        }
        rows.sort_unstable_by_key(|&(age, table, id)| (age, table.0, id));
        Ok(rows.into_iter().map(|(_, table, id)| (table, id)).collect())
    }
}

/// Rows on their way into a cache that is filled.
struct Filling<'c, D: Driver> {
    shared: &'c Shared<D>,
    staging: Staging<D>,
    jobs: Jobs<D>,
    entries: Vec<Entry>,
    /// What the jobs take, should all of them come in.
    bytes: u64,
    /// Words of the staging memory in use.
    staged: usize,
    newest: u64,
    warmed: Warmed,
}

impl<'c, D: Driver> Filling<'c, D> {
    fn new(shared: &'c Shared<D>) -> Result<Self, DriverError> {
        let largest = shared.tables.iter().map(|t| t.row_bytes / UNIT).max().unwrap_or(0);
        Ok(Self {
            staging: Staging::new(shared.tier.driver(), STAGED.max(largest))?,
            jobs: Jobs::new(&shared.tier, JOBS)?,
            entries: Vec::new(),
            bytes: 0,
            staged: 0,
            newest: shared.epochs.tag(),
            warmed: Warmed::default(),
            shared,
        })
    }

    /// Whether one more row of the largest size leaves the cache below its high watermark, should all that are on
    /// their way come in; and whether it can be on its way with them.
    fn has_room(&self) -> bool {
        let Self { shared, .. } = self;
        let tables = (0..shared.tables.len()).map(|t| TableId(t as u32));
        let mut fill = shared.fill_level();
        fill.entries.0 += self.jobs.len() as u64 + 1;
        fill.bytes.0 += self.bytes + tables.map(|table| shared.footprint(table)).max().unwrap_or(0);
        let largest = shared.tables.iter().map(|t| t.row_bytes / UNIT).max().unwrap_or(0);
        !fill.crosses(&shared.watermarks)
            && self.jobs.len() < JOBS
            && self.staged + largest <= self.staging.len()
    }

    /// Puts a row on its way, unless another has its key or there is no slot.
    fn push(&mut self, table: TableId, id: u64, row: &[u8]) -> Result<(), DeviceCacheError> {
        let Self { shared, staging, .. } = self;
        let own = shared.own_key(table, id, row.len())?;
        let Some(slot) = shared.take(&mut lock(&shared.replacer), table)? else {
            self.warmed.passed_over += 1;
            return Ok(());
        };
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(staging.words_mut()?);
        bytes[self.staged * UNIT..][..row.len()].copy_from_slice(row);
        let rows_a_stamp = (shared.entry_capacity() / STAMPS).max(1);
        let job = Job {
            location: slot.location().bits(),
            row: JobRow::Staged(self.staged),
            older: ((self.warmed.stored + self.jobs.len() as u64) / rows_a_stamp) as u32,
            ..shared.job(table, own, JobKind::Keep)
        };
        if !self.jobs.push(job, staging) {
            shared.slots.give_back(slot.location());
            self.warmed.passed_over += 1;
            return Ok(());
        }
        self.staged += row.len() / UNIT;
        self.bytes += shared.footprint(table);
        self.entries.push(Entry { table, key: FlatKey(job.key), place: Place::New(slot) });
        Ok(())
    }

    /// Waits for the rows on their way.
    fn flush(&mut self) -> Result<(), DriverError> {
        let Self { shared, staging, jobs, entries, warmed, .. } = self;
        if jobs.is_empty() {
            return Ok(());
        }
        // Nobody counts out meanwhile what is yet to be counted in.
        let _uncounted = lock(&shared.replacer);
        jobs.launch(self.newest, MayReplace::Nothing, Some(staging))?;
        for (outcome, entry) in jobs.finish()?.iter().zip(entries.drain(..)) {
            shared.count_in(outcome, &entry);
            match outcome.link {
                // The latter in the place of a pointer to it.
                LINK_NEW | LINK_SWAPPED => warmed.stored += 1,
                _ => warmed.passed_over += 1,
            }
            shared.put_aside(outcome, entry);
        }
        (self.bytes, self.staged) = (0, 0);
        Ok(())
    }

    fn finish(mut self) -> Result<Warmed, DriverError> {
        self.flush()?;
        Ok(self.warmed)
    }
}
