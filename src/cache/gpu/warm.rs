//! Fills a cache on a device, and lists its rows so that the next start can fill it with them.
//!
//! As on the host (`cache/warm.rs`), the hottest rows are inserted first, without the admission policy, while
//! there is room below the high watermark. So nothing is evicted for them. Their stamps descend: a row's age
//! follows from its position. On a device the rows are inserted by launches. A launch has only rows that are
//! certain to fit.

use super::super::warm::{STAMPS, WarmRow, Warmed};
use super::replace::{JOBS, JobSlot, JobTarget};
use super::{GpuCache, GpuCacheError, Shared};
use crate::cache::gpu::args::{JobKind, LinkResult, Listed, MayReplace};
use crate::cache::gpu::lister::Look;
use crate::cache::gpu::table::{IndexJob, JobRow, Jobs};
use crate::device::cuda::memory::Staging;
use crate::device::cuda::{Driver, DriverError};
use crate::mem::WORD_BYTES;
use crate::sync::EvenPoisoned;
use crate::types::{FlatKey, RowId};

/// Words of the staging buffer (1 MiB), unless one row is longer.
const STAGING_WORDS: usize = 1 << 18;

impl<D: Driver> GpuCache<D> {
    /// As [`super::super::FlatCache::warm`]. Waits for the device. Batches that offer rows wait meanwhile.
    ///
    /// # Errors
    /// As [`super::super::FlatCache::warm`], and driver errors.
    pub(crate) fn warm<'r>(
        &self,
        rows: impl IntoIterator<Item = WarmRow<'r>>,
    ) -> Result<Warmed, GpuCacheError> {
        let shared = &*self.shared;
        // The rows belong to the current version, which must not change meanwhile.
        let overlay = shared.switching.lock().even_poisoned();
        if overlay.is_some() {
            return Err(GpuCacheError::SwitchFailed);
        }
        // The slots of rows that a switch has just removed are free after these batches.
        shared.wait_for_earlier()?;
        let mut filling = Filling::new(shared)?;
        let mut rows = rows.into_iter();
        loop {
            while filling.has_room() {
                let Some(row) = rows.next() else { return Ok(filling.finish()?) };
                if let Err(wrong) = filling.push(row) {
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
    pub(crate) fn hot_rows(&self) -> Result<Vec<RowId>, GpuCacheError> {
        Ok(self.shared.hot_rows()?)
    }
}

impl<D: Driver> Shared<D> {
    pub(crate) fn hot_rows(&self) -> Result<Vec<RowId>, DriverError> {
        let (now, buckets) = (self.epochs.tag(), self.gpu_table.shape().buckets);
        // Allocated once for a full index, 16 bytes per row, as on the host.
        let mut rows = Vec::with_capacity(self.entry_capacity() as usize);
        let mut from = 0;
        while from < buckets {
            // The lock is released after each call, so that the evictor can run in between.
            let lister = &mut self.sweep.lock().even_poisoned().lister;
            let row =
                |entry: &Listed| Some((entry.age, self.row_of(FlatKey(entry.key), || Some(entry.tag))?));
            rows.extend(
                lister.look(now, Look::From { bucket: from, count: buckets - from })?.filter_map(row),
            );
            from += lister.buckets();
        }
        rows.sort_unstable();
        Ok(rows.into_iter().map(|(_, row)| row).collect())
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
    /// The newest batch number: the stamp of the hottest rows.
    newest: u64,
    warmed: Warmed,
}

impl<'c, D: Driver> Filling<'c, D> {
    fn new(shared: &'c Shared<D>) -> Result<Self, DriverError> {
        let largest = shared.tables.iter().map(|t| t.row_bytes / WORD_BYTES).max().unwrap_or(0);
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

    /// Whether one more row of the largest size fits in the launch and leaves the cache below its high
    /// watermark.
    fn has_room(&self) -> bool {
        let Self { shared, .. } = self;
        let mut fill = shared.fill_level();
        fill.entries.used += self.jobs.len() as u64 + 1;
        fill.bytes.used += self.bytes + shared.largest();
        let largest = shared.tables.iter().map(|t| t.row_bytes / WORD_BYTES).max().unwrap_or(0);
        !fill.crosses() && self.jobs.len() < JOBS && self.staged + largest <= self.staging.len()
    }

    /// Adds a row to the launch, unless another row of the launch has its key or no slot is free.
    fn push(&mut self, WarmRow { row, bytes: row_bytes }: WarmRow<'_>) -> Result<(), GpuCacheError> {
        let Self { shared, staging, .. } = self;
        let table = row.table();
        let own = shared.own_key(row, row_bytes.len())?;
        let Some(slot) = shared.take(&mut shared.replacer.lock().even_poisoned(), table)? else {
            self.warmed.passed_over += 1;
            return Ok(());
        };
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(staging.words_mut()?);
        bytes[self.staged * WORD_BYTES..][..row_bytes.len()].copy_from_slice(row_bytes);
        let rows_per_stamp = (shared.entry_capacity() / STAMPS).max(1);
        let job = IndexJob {
            location: slot.location().bits(),
            row: JobRow::Staged(self.staged),
            older: ((self.warmed.stored + self.jobs.len() as u64) / rows_per_stamp) as u32,
            ..shared.job(table, own, JobKind::Keep)
        };
        if !self.jobs.push(job, staging) {
            shared.slots.give_back(slot.location());
            self.warmed.passed_over += 1;
            return Ok(());
        }
        self.staged += row_bytes.len() / WORD_BYTES;
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
        let _uncounted = shared.replacer.lock().even_poisoned();
        jobs.launch(self.newest, MayReplace::Nothing, Some(staging))?;
        for (outcome, target) in jobs.finish()?.iter().zip(targets.drain(..)) {
            shared.count_linked(outcome, &target);
            match outcome.result() {
                // `Swapped`: the row has replaced a pointer to it.
                Some(LinkResult::New | LinkResult::Swapped) => warmed.stored += 1,
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
