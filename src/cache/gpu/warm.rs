//! Fills a cache on a device, and lists its rows so that the next start can fill it with them.
//!
//! As `cache/warm.rs`: the hottest rows first, without the admission policy, while there is room below the
//! high watermark, so that nothing is evicted for them. Their stamps descend. On a device the rows enter by
//! launches. A launch has only rows that surely fit, each with the age that its position gives it.

use super::super::slots::UNIT;
use super::super::warm::{STAMPS, Warmed};
use super::replace::{JOBS, JobSlot, JobTarget};
use super::{GpuCache, GpuCacheError, Shared, lock};
use crate::cache::gpu::args::{JobKind, LINK_NEW, LINK_SWAPPED, Listed, MayReplace};
use crate::cache::gpu::lister::Look;
use crate::cache::gpu::table::{Job, JobRow, Jobs};
use crate::device::cuda::memory::Staging;
use crate::device::cuda::{Driver, DriverError};
use crate::types::{FlatKey, TableId};

/// Words of the staging buffer (1 MiB), unless one row is longer.
const STAGING_WORDS: usize = 1 << 18;

impl<D: Driver> GpuCache<D> {
    /// As [`super::super::FlatCache::warm`]. Waits for the device; batches that offer rows wait meanwhile.
    ///
    /// # Errors
    /// As there, and driver errors.
    pub(crate) fn warm<'r>(
        &self,
        rows: impl IntoIterator<Item = (TableId, u64, &'r [u8])>,
    ) -> Result<Warmed, GpuCacheError> {
        let shared = &*self.shared;
        // The current version, which these rows belong to, does not change meanwhile.
        let overlay = lock(&shared.switching);
        if overlay.is_some() {
            return Err(GpuCacheError::SwitchFailed);
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

    /// As [`super::super::FlatCache::hot_rows`]. Waits for the device, a part of the index at a time.
    ///
    /// # Errors
    /// Driver errors.
    pub(crate) fn hot_rows(&self) -> Result<Vec<(TableId, u64)>, GpuCacheError> {
        Ok(self.shared.hot_rows()?)
    }
}

impl<D: Driver> Shared<D> {
    fn hot_rows(&self) -> Result<Vec<(TableId, u64)>, DriverError> {
        let (now, buckets) = (self.epochs.tag(), self.gpu_table.shape().buckets);
        // As on the host: 16 bytes a row, allocated once.
        let mut rows = Vec::with_capacity(self.entry_capacity() as usize);
        let mut from = 0;
        while from < buckets {
            // Unlocked between calls, for the evictor.
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
            rows.extend(
                lister.look(now, Look::From { bucket: from, count: buckets - from })?.filter_map(row),
            );
            from += lister.buckets();
        }
        rows.sort_unstable_by_key(|&(age, table, id)| (age, table.0, id));
        Ok(rows.into_iter().map(|(_, table, id)| (table, id)).collect())
    }
}

/// The rows of the next launch.
struct Filling<'c, D: Driver> {
    shared: &'c Shared<D>,
    staging: Staging<D>,
    jobs: Jobs<D>,
    targets: Vec<JobTarget>,
    /// Bytes of the pool that the jobs take if all succeed.
    bytes: u64,
    /// Words of the staging buffer in use.
    staged: usize,
    newest: u64,
    warmed: Warmed,
}

impl<'c, D: Driver> Filling<'c, D> {
    fn new(shared: &'c Shared<D>) -> Result<Self, DriverError> {
        let largest = shared.tables.iter().map(|t| t.row_bytes / UNIT).max().unwrap_or(0);
        Ok(Self {
            staging: Staging::new(shared.gpu_table.driver(), STAGING_WORDS.max(largest))?,
            jobs: Jobs::new(&shared.gpu_table, JOBS)?,
            targets: Vec::new(),
            bytes: 0,
            staged: 0,
            newest: shared.epochs.tag(),
            warmed: Warmed::default(),
            shared,
        })
    }

    /// Whether the launch has room for a row of the largest size that leaves the cache below its high
    /// watermark.
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

    /// Adds a row to the launch, unless another has its key or there is no slot.
    fn push(&mut self, table: TableId, id: u64, row: &[u8]) -> Result<(), GpuCacheError> {
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
        self.targets.push(JobTarget { table, key: FlatKey(job.key), slot: JobSlot::New(slot) });
        Ok(())
    }

    /// Launches the rows and waits for them.
    fn flush(&mut self) -> Result<(), DriverError> {
        let Self { shared, staging, jobs, targets, warmed, .. } = self;
        if jobs.is_empty() {
            return Ok(());
        }
        // No other thread may remove these rows from the counts before they are added.
        let _uncounted = lock(&shared.replacer);
        jobs.launch(self.newest, MayReplace::Nothing, Some(staging))?;
        for (outcome, target) in jobs.finish()?.iter().zip(targets.drain(..)) {
            shared.count_linked(outcome, &target);
            match outcome.link {
                // `LINK_SWAPPED`: it has replaced a pointer to it.
                LINK_NEW | LINK_SWAPPED => warmed.stored += 1,
                _ => warmed.passed_over += 1,
            }
            shared.free_unlinked(outcome, target);
        }
        (self.bytes, self.staged) = (0, 0);
        Ok(())
    }

    fn finish(mut self) -> Result<Warmed, DriverError> {
        self.flush()?;
        Ok(self.warmed)
    }
}
