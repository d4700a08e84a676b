//! The switch to another version between two batches, with all changed rows at once.
//!
//! The switch works as on the host, and `cache/version.rs` has the argument. Cached rows that change are
//! copied into new slots. Then the new version becomes current together with an overlay, which its batches
//! read before the index. When all earlier batches have ended, the overlay is merged into the index and
//! withdrawn. These points differ on a device:
//!
//! - *Only the device knows which changed rows are cached.* Jobs look them up, some thousands at a time.
//! - *The overlay exists twice.* Probes read a table in device memory. The header of a batch has the table's
//!   address. The host's own copy lists what is merged.
//! - *A batch ends* when its last kernel has ended. Until then it has its pin. Its jobs are on the cache's
//!   stream before its pin is dropped, so before the merging jobs. These replace or withdraw the old rows
//!   that the batch offered.
//! - *The overlay is withdrawn* after the merging jobs have ended. A batch that does not read the overlay
//!   probes later and finds the merged rows in the index.
//! - *The overlay's device memory* is freed by the switch, when the batches that may read it have ended.
//!   [`Replaceable`](super::super::epoch::Replaceable) may keep a replaced value for long, so the value has
//!   only a weak reference to that memory.
//!
//! Pointers into host memory belong to one version: a switch stops making them (`pointers`), and the merge
//! replaces or withdraws the pointers to changed rows.
//!
//! While it exists, an overlay takes 32 to 64 bytes per cached row that changed on the device, and about as
//! much on the host, in addition to `cache.bytes`. A switch also allocates a staging buffer.

use std::sync::{Arc, Weak};

use super::super::CacheError;
use super::super::epoch::OwnedPin;
use super::super::index::Location;
use super::super::slabs::Slot;
use super::super::version::{ByKey, Changed, NewRow, Switched, VersionOverlay};
use super::replace::{JOBS, JobBlock, JobSlot, JobTarget, Launch};
use super::{GpuCacheError, Shared};
use crate::cache::gpu::args::{JobKind, LinkResult, MayReplace};
use crate::cache::gpu::overlay::{ChangedRow, OverlayTable};
use crate::cache::gpu::table::{IndexJob, JobRow, Jobs};
use crate::device::cuda::memory::Staging;
use crate::device::cuda::{Driver, DriverError};
use crate::mem::{NumberMap, WORD_BYTES};
use crate::sync::EvenPoisoned;
use crate::types::{FlatKey, RowId, TableId, Version};

/// Bytes of the staging buffer, unless one row is longer.
const STAGED_BYTES: usize = 1 << 20;

/// The version that new batches use.
pub(crate) struct Current<D: Driver> {
    pub version: Version,
    overlay: Option<Weak<OverlayTable<D>>>,
}

impl<D: Driver> Current<D> {
    pub(crate) fn new(version: Version) -> Self {
        Self { version, overlay: None }
    }
}

/// The pin and the overlay of a running batch. The pin is the last field, so that the overlay is dropped
/// before other threads see that the batch has ended.
pub(crate) struct BatchHold<D: Driver> {
    /// The overlay that the batch reads before the index.
    pub overlay: Option<Arc<OverlayTable<D>>>,
    pub version: Version,
    pub pin: OwnedPin,
}

/// The rows of a cache during a switch: rows only leave it.
pub(crate) struct Cached<'c, D: Driver>(&'c Shared<D>);

impl<D: Driver> Cached<'_, D> {
    /// All of them, the most recently used first.
    pub(crate) fn rows(&self) -> Result<Vec<RowId>, GpuCacheError> {
        Ok(self.0.hot_rows()?)
    }
}

impl<D: Driver> Shared<D> {
    /// Begins a batch of the current version.
    pub(crate) fn begin(&self) -> BatchHold<D> {
        let pin = self.epochs.pin_owned();
        loop {
            // Read after the pin has taken its number: a switch relies on this order (`cache/version.rs`).
            let current = self.current.read();
            let version = current.version;
            let Some(table) = &current.overlay else {
                return BatchHold { overlay: None, version, pin };
            };
            // The table lives while its version's batches run. If it is gone, `current` was replaced after
            // this thread has read it.
            if let Some(table) = table.upgrade() {
                return BatchHold { overlay: Some(table), version, pin };
            }
        }
    }

    /// As [`GpuCache::switch`](super::GpuCache::switch).
    pub(crate) fn switch<'r, C>(
        &self,
        version: Version,
        changed: impl FnOnce(Cached<'_, D>) -> Result<C, GpuCacheError>,
    ) -> Result<Switched, GpuCacheError>
    where
        C: IntoIterator<Item = NewRow<'r>>,
    {
        let current_overlay = &mut *self.switching.lock().even_poisoned();
        self.check_other(current_overlay, version)?;
        let _paused = self.pause_admission();
        // The jobs of these batches are on the cache's stream, so the kernels of the switch run after them.
        if !self.earlier_end_within(self.switch_wait)? {
            return Err(CacheError::Unfinished(self.switch_wait).into());
        }
        let (overlay, table) = Carrier::new(self)?.carry(changed(Cached(self))?)?;
        let table = current_overlay.insert(Arc::new(table));
        self.make_current(version, table);
        self.wait_for_earlier()?;
        self.merge(&overlay)?;
        self.withdraw_overlay(version);
        self.wake.now();
        // Batches may still read the overlay, which is freed next.
        self.wait_for_earlier()?;
        *current_overlay = None;
        Ok(overlay.switched())
    }

    fn check_other(
        &self,
        overlay: &Option<Arc<OverlayTable<D>>>,
        version: Version,
    ) -> Result<(), GpuCacheError> {
        if overlay.is_some() {
            return Err(GpuCacheError::SwitchFailed);
        }
        if version == self.current.read().version {
            return Err(CacheError::Version(version).into());
        }
        Ok(())
    }

    fn make_current(&self, version: Version, table: &Arc<OverlayTable<D>>) {
        self.stop_pointing();
        // Before the overlay is visible: from then on, a batch may find a slot there that the index has
        // evicted.
        self.retired.hold();
        self.current.replace(Current { version, overlay: Some(Arc::downgrade(table)) });
    }

    fn withdraw_overlay(&self, version: Version) {
        self.current.replace(Current { version, overlay: None });
        self.retired.release(&self.epochs);
    }

    /// Merges the overlay into the index and waits. Rows that do not fit in the index are retired.
    fn merge(&self, overlay: &VersionOverlay) -> Result<(), DriverError> {
        let now = self.epochs.tag();
        let mut rows: Vec<(FlatKey, Changed)> = overlay.rows.iter().map(|(own, row)| (*own, *row)).collect();
        // Rows that share a key go into different launches.
        let mut later = Vec::new();
        while !rows.is_empty() {
            // Unlocked after each block, so that batches can offer rows.
            let replacer = &mut *self.replacer.lock().even_poisoned();
            let mut block = JobBlock { jobs: self.free_jobs(replacer)?, rows: Vec::new() };
            for (own, changed) in rows.drain(rows.len().saturating_sub(JOBS)..) {
                let Changed { table, location } = changed;
                let kind = if location.is_some() { JobKind::Swap } else { JobKind::Withdraw };
                let bits = location.map_or(0, |location| location.bits());
                let job = IndexJob { location: bits, ..self.job(table, own, kind) };
                if block.jobs.push(job, &replacer.no_rows) {
                    let slot = location.map_or(JobSlot::None, JobSlot::InOverlay);
                    block.rows.push(JobTarget { table, key: FlatKey(job.key), slot });
                } else {
                    later.push((own, changed));
                }
            }
            let may_replace = MayReplace::SameKey;
            self.launch(replacer, Launch { block, now, may_replace, staging: None })?;
            if rows.is_empty() {
                rows = std::mem::take(&mut later);
            }
        }
        self.gpu_table.driver().finish(self.gpu_table.stream())?;
        self.tidy_up().map(|_| ())
    }
}

/// Rows that fit in the staging buffer.
type StagedRows<'r> = NumberMap<FlatKey, (TableId, &'r [u8])>;

/// Copies the changed rows that are cached into new slots, as far as there is room.
struct Carrier<'s, D: Driver> {
    shared: &'s Shared<D>,
    jobs: Jobs<D>,
    staging: Staging<D>,
    slots: ByKey<Slot>,
    overlay: VersionOverlay,
}

impl<'s, D: Driver> Carrier<'s, D> {
    fn new(shared: &'s Shared<D>) -> Result<Self, DriverError> {
        let longest = shared.tables.iter().map(|table| table.row_bytes).max().unwrap_or(0);
        Ok(Self {
            jobs: Jobs::new(&shared.gpu_table, JOBS)?,
            staging: Staging::new(shared.gpu_table.driver(), STAGED_BYTES.max(longest) / WORD_BYTES)?,
            slots: ByKey::default(),
            overlay: VersionOverlay::default(),
            shared,
        })
    }

    /// Copies the rows and builds the overlay. After an error nothing has changed.
    fn carry<'r>(
        mut self,
        changed: impl IntoIterator<Item = NewRow<'r>>,
    ) -> Result<(VersionOverlay, OverlayTable<D>), GpuCacheError> {
        let carried = self.copy_in(changed).and_then(|()| Ok(self.table()?));
        if carried.is_err() {
            // No batch can find the slots. They are freed after the copies into them have ended.
            self.jobs.finish()?;
            self.slots.into_iter().for_each(|(_, slot)| self.shared.slots.give_back(slot.location()));
        }
        carried.map(|table| (self.overlay, table))
    }

    fn copy_in<'r>(&mut self, changed: impl IntoIterator<Item = NewRow<'r>>) -> Result<(), GpuCacheError> {
        let (mut rows, mut words): (StagedRows<'_>, _) = (StagedRows::default(), 0);
        for changed in changed {
            let own = self.shared.changed_key(changed)?;
            let table = changed.row.table();
            let Some(bytes) = changed.bytes else {
                self.overlay.rows.part_mut(&own).entry(own).or_insert(Changed { table, location: None });
                continue;
            };
            if rows.len() == JOBS || words + bytes.len() / WORD_BYTES > self.staging.len() {
                self.copy_some(&rows)?;
                rows.clear();
                words = 0;
            }
            // If a row occurs twice, its last bytes are used.
            if rows.insert(own, (table, bytes)).is_none() {
                words += bytes.len() / WORD_BYTES;
            }
        }
        self.copy_some(&rows)
    }

    /// Copies rows that fit in one block of jobs and in the staging buffer.
    fn copy_some(&mut self, rows: &StagedRows<'_>) -> Result<(), GpuCacheError> {
        self.take_slots(rows)?;
        let Self { shared, jobs, staging, slots, .. } = self;
        let mut word = 0;
        let words = staging.words_mut()?;
        let mut copies = Vec::new();
        for (&own, &(table, row)) in rows {
            let Some(slot) = slots.get(&own) else { continue };
            let end = word + row.len() / WORD_BYTES;
            bytemuck::cast_slice_mut(&mut words[word..end]).copy_from_slice(row);
            let (location, row) = (slot.location().bits(), JobRow::Staged(word));
            // A launch needs distinct keys. These jobs link nothing, so they have the rows' own keys: rows
            // may share index keys.
            copies.push(IndexJob { key: own.0, location, row, ..shared.job(table, own, JobKind::Keep) });
            word = end;
        }
        jobs.finish()?;
        for job in copies {
            jobs.push(job, staging);
        }
        Ok(jobs.copy(Some(staging))?)
    }

    /// Takes a slot for each row that is in the pool, as far as there is room. Writes the rows' new locations
    /// to the overlay.
    fn take_slots(&mut self, rows: &StagedRows<'_>) -> Result<(), GpuCacheError> {
        let Self { shared, jobs, staging, slots, overlay } = self;
        jobs.finish()?;
        shared.tidy_up()?;
        let unseen = rows.iter().filter(|(own, _)| slots.get(own).is_none());
        let mut rows: Vec<(FlatKey, TableId)> = unseen.map(|(own, (table, _))| (*own, *table)).collect();
        while !rows.is_empty() {
            // Rows that share a key go into different launches.
            let (looked_up, later): (Vec<_>, _) = rows
                .into_iter()
                .partition(|&(own, table)| jobs.push(shared.job(table, own, JobKind::Look), staging));
            jobs.launch(0, MayReplace::Nothing, None)?;
            for (&(own, table), outcome) in looked_up.iter().zip(jobs.finish()?) {
                if outcome.result() != Some(LinkResult::Present) {
                    continue;
                }
                let in_pool = !Location::from_bits(outcome.location).is_pointer();
                let slot = in_pool.then(|| shared.slots.take(shared.classes[table.index()])).flatten();
                let location = slot.as_ref().map(Slot::location);
                overlay.rows.insert(own, Changed { table, location });
                if let Some(slot) = slot {
                    slots.insert(own, slot);
                }
            }
            rows = later;
        }
        Ok(())
    }

    /// The overlay in device memory, after the rows are copied.
    fn table(&mut self) -> Result<OverlayTable<D>, DriverError> {
        self.jobs.finish()?;
        let row = |(key, changed): (&FlatKey, &Changed)| ChangedRow {
            key: key.0,
            location: changed.location.map(|location| location.bits()),
            words: self.shared.slot_words(changed.table),
        };
        let rows: Vec<_> = self.overlay.rows.iter().map(row).collect();
        OverlayTable::new(&self.shared.gpu_table, &rows)
    }
}

#[cfg(test)]
#[cfg(all(feature = "cusim", not(flechette_loom)))]
mod cusim_tests;
