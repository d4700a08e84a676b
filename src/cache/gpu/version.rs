//! Switching versions on a device: from one batch to the next, all changed rows at once.
//!
//! As on the host (`cache/version.rs`, whose argument this is): changed rows that the cache holds are copied into slots
//! of their own; then the new version is made current together with an overlay, which batches of that version ask
//! before the index; when all batches that began before are over, the overlay is merged into the index
//! and withdrawn. What a device adds:
//!
//! - *Which changed rows the cache holds*, only the device knows: jobs look them up, some thousands at a time.
//! - *The overlay is twofold.* Probes ask a table in memory of the device, which the header of their batch names;
//!   who offers rows asks the same on the host.
//! - *A batch is over* when the event after its last kernel has fired, for until then it has its pin. The jobs that it
//!   has left are on the tier's stream before its pin is dropped, and so before the merging jobs: an old row that
//!   it offered is exchanged or withdrawn by these.
//! - *The overlay is withdrawn* once the merging jobs are done: whoever does not ask it probes after that, and so
//!   finds what was merged.
//! - *The table's memory* is freed when the batches that may ask it are over, by whoever switches. A
//!   [`Replaceable`](super::super::epoch::Replaceable) may keep what was replaced for long, and so has but a weak
//!   reference.
//!
//! Pointers into memory of the host are of one version: a switch makes no more of them (`pointers`), and the merge
//! puts a row in the place of one, or takes it out.
//!
//! An overlay takes about 32 bytes a changed row on the device, and as much on the host, beside `cache.bytes`, for
//! as long as it stands; and a switch stages rows in memory of its own.

use std::sync::{Arc, Weak};

use super::super::CacheError;
use super::super::epoch::OwnedPin;
use super::super::slots::{Slot, UNIT};
use super::super::version::{ByKey, Changed, Overlay, Switched};
use super::replace::{Entry, JOBS, Order, Place};
use super::{DeviceCacheError, Shared, lock};
use crate::cache::gpu::args::{JobKind, LINK_PRESENT, MayReplace};
use crate::cache::gpu::overlay::{ChangedRow, OverlayTable};
use crate::cache::gpu::table::{Job, JobRow, Jobs};
use crate::device::cuda::memory::Staging;
use crate::device::cuda::{Driver, DriverError};
use crate::types::{FlatKey, TableId, Version};

/// Bytes of rows that are staged at a time, unless one row is longer.
const STAGED_BYTES: usize = 1 << 20;

/// The version that batches are of which begin now.
pub(crate) struct Current<D: Driver> {
    pub version: Version,
    overlay: Option<(Arc<Overlay>, Weak<OverlayTable<D>>)>,
}

impl<D: Driver> Current<D> {
    pub(crate) fn new(version: Version) -> Self {
        Self { version, overlay: None }
    }
}

/// What a batch holds while it is under way: its pin last, because that tells others that the rest is gone.
pub(crate) struct Hold<D: Driver> {
    /// What it asks before the index.
    pub overlay: Option<Arc<OverlayTable<D>>>,
    changed: Option<Arc<Overlay>>,
    pub version: Version,
    pub pin: OwnedPin,
}

impl<D: Driver> Hold<D> {
    /// Whether a row is not the same in the version before, whose batches may not be over: in the index one of
    /// these would find it.
    pub(crate) fn keeps_out(&self, own: Option<FlatKey>) -> bool {
        let changed = self.changed.as_deref();
        own.zip(changed).is_some_and(|(own, changed)| changed.get(own).is_some())
    }
}

impl<D: Driver> Shared<D> {
    /// Begins a batch of the current version.
    pub(crate) fn begin(&self) -> Hold<D> {
        let pin = self.epochs.pin_owned();
        loop {
            // After the number was taken: whoever switches relies on it.
            let current = self.current.read();
            let version = current.version;
            let Some((changed, table)) = &current.overlay else {
                return Hold { overlay: None, changed: None, version, pin };
            };
            // The table outlives its batches, of which this is one; were it gone, so would be what names it.
            if let Some(table) = table.upgrade() {
                return Hold { overlay: Some(table), changed: Some(changed.clone()), version, pin };
            }
        }
    }

    /// Makes a version current. Waits for the batches of the one before.
    pub(crate) fn switch<'r>(
        &self,
        version: Version,
        changed: impl IntoIterator<Item = (TableId, u64, &'r [u8])>,
    ) -> Result<Switched, DeviceCacheError> {
        let mut standing = lock(&self.switching);
        if standing.is_some() {
            return Err(DeviceCacheError::BrokenOff);
        }
        let current = self.current.read().version;
        if version <= current {
            return Err(CacheError::Version { got: version, current }.into());
        }
        let (overlay, table) = Carrier::new(self)?.carry(changed)?;
        let (overlay, table) = (Arc::new(overlay), standing.insert(Arc::new(table)));
        self.make_current(version, &overlay, table);
        self.wait_for_earlier()?;
        self.merge(&overlay)?;
        self.withdraw_overlay(version);
        self.wake.now();
        // Those that ask the overlay.
        self.wait_for_earlier()?;
        *standing = None;
        Ok(overlay.switched())
    }

    fn make_current(&self, version: Version, overlay: &Arc<Overlay>, table: &Arc<OverlayTable<D>>) {
        self.stop_pointing();
        // Before anyone finds a slot in the overlay that may be out of the index.
        self.limbo.hold();
        let named = Some((overlay.clone(), Arc::downgrade(table)));
        self.current.replace(Current { version, overlay: named });
    }

    fn withdraw_overlay(&self, version: Version) {
        self.current.replace(Current { version, overlay: None });
        self.limbo.release(&self.epochs);
    }

    /// Brings the index to what the overlay says, and waits until it is. What finds no place there is put aside.
    fn merge(&self, overlay: &Overlay) -> Result<(), DriverError> {
        let now = self.epochs.tag();
        let mut rows: Vec<(FlatKey, Changed)> = overlay.rows.iter().map(|(own, row)| (*own, *row)).collect();
        // Of rows that share a key, one goes with a launch.
        let mut later = Vec::new();
        while !rows.is_empty() {
            // Given back after each block, for those who offer rows.
            let replacer = &mut *lock(&self.replacer);
            let mut jobs = self.block(replacer)?;
            let mut entries = Vec::new();
            for (own, changed) in rows.drain(rows.len().saturating_sub(JOBS)..) {
                let Changed { table, location } = changed;
                let kind = if location.is_some() { JobKind::Swap } else { JobKind::Withdraw };
                let bits = location.map_or(0, |location| location.bits());
                let job = Job { location: bits, ..self.job(table, own, kind) };
                if jobs.push(job, &replacer.nothing) {
                    let place = location.map_or(Place::None, Place::Found);
                    entries.push(Entry { table, key: FlatKey(job.key), place });
                } else {
                    later.push((own, changed));
                }
            }
            let order = Order { batch: now, kind: JobKind::Swap, admission: false };
            self.launch(replacer, order, (jobs, entries), None)?;
            if rows.is_empty() {
                rows = std::mem::take(&mut later);
            }
        }
        self.tier.driver().wait(&self.tier.mark()?)?;
        self.tidy_up().map(|_| ())
    }
}

/// Copies the changed rows that the cache holds into slots of their own, as far as there is room.
struct Carrier<'s, D: Driver> {
    shared: &'s Shared<D>,
    jobs: Jobs<D>,
    staging: Staging<D>,
    slots: ByKey<Slot>,
    overlay: Overlay,
}

impl<'s, D: Driver> Carrier<'s, D> {
    fn new(shared: &'s Shared<D>) -> Result<Self, DriverError> {
        let longest = shared.tables.iter().map(|table| table.row_bytes).max().unwrap_or(0);
        Ok(Self {
            jobs: Jobs::new(&shared.tier, JOBS)?,
            staging: Staging::new(shared.tier.driver(), STAGED_BYTES.max(longest) / UNIT)?,
            slots: ByKey::default(),
            overlay: Overlay::default(),
            shared,
        })
    }

    /// All of it. Where it fails, nothing has changed.
    fn carry<'r>(
        mut self,
        changed: impl IntoIterator<Item = (TableId, u64, &'r [u8])>,
    ) -> Result<(Overlay, OverlayTable<D>), DeviceCacheError> {
        let carried = self.copy_in(changed).and_then(|()| Ok(self.table()?));
        if carried.is_err() {
            // Nobody has seen the slots; what is copied there comes to its end first.
            self.jobs.finish()?;
            self.slots.into_values().for_each(|slot| self.shared.slots.give_back(slot.location()));
        }
        carried.map(|table| (self.overlay, table))
    }

    fn copy_in<'r>(
        &mut self,
        changed: impl IntoIterator<Item = (TableId, u64, &'r [u8])>,
    ) -> Result<(), DeviceCacheError> {
        let (mut rows, mut words): (ByKey<(TableId, &[u8])>, _) = (ByKey::default(), 0);
        for (table, id, row) in changed {
            let own = self.shared.own_key(table, id, row.len())?;
            if rows.len() == JOBS || words + row.len() / UNIT > self.staging.len() {
                self.copy_some(&rows)?;
                rows.clear();
                words = 0;
            }
            // Of a row that comes twice, the last bytes count.
            if rows.insert(own, (table, row)).is_none() {
                words += row.len() / UNIT;
            }
        }
        self.copy_some(&rows)
    }

    /// Copies rows in that one block of jobs and the staging memory have room for.
    fn copy_some(&mut self, rows: &ByKey<(TableId, &[u8])>) -> Result<(), DeviceCacheError> {
        self.take_slots(rows)?;
        let Self { shared, jobs, staging, slots, .. } = self;
        let mut word = 0;
        let words = staging.words_mut()?;
        let mut copies = Vec::new();
        for (&own, &(table, row)) in rows {
            let Some(slot) = slots.get(&own) else { continue };
            let end = word + row.len() / UNIT;
            bytemuck::cast_slice_mut(&mut words[word..end]).copy_from_slice(row);
            let (location, row) = (slot.location().bits(), JobRow::Staged(word));
            // Nothing is linked, so that several rows may have one key: told apart by their own.
            copies.push(Job { key: own.0, location, row, ..shared.job(table, own, JobKind::Keep) });
            word = end;
        }
        jobs.finish()?;
        for job in copies {
            jobs.push(job, staging);
        }
        Ok(jobs.copy(Some(staging))?)
    }

    /// Takes a slot for each row whose old bytes are in the pool, if there is room, and notes where it is.
    fn take_slots(&mut self, rows: &ByKey<(TableId, &[u8])>) -> Result<(), DeviceCacheError> {
        let Self { shared, jobs, staging, slots, overlay } = self;
        jobs.finish()?;
        shared.tidy_up()?;
        let unseen = rows.iter().filter(|(own, _)| !slots.contains_key(*own));
        let mut rows: Vec<(FlatKey, TableId)> = unseen.map(|(own, (table, _))| (*own, *table)).collect();
        while !rows.is_empty() {
            // Of rows that share a key, one goes with a launch.
            let (asked, later): (Vec<_>, _) = rows
                .into_iter()
                .partition(|&(own, table)| jobs.push(shared.job(table, own, JobKind::Look), staging));
            jobs.launch(0, MayReplace::Nothing, None)?;
            for (&(own, table), outcome) in asked.iter().zip(jobs.finish()?) {
                let in_pool = outcome.link == LINK_PRESENT && outcome.location & 1 == 0;
                let slot = in_pool.then(|| shared.slots.take(shared.classes[table.index()])).flatten();
                let location = slot.as_ref().map(Slot::location);
                overlay.rows.insert(own, Changed { table, location });
                slots.extend(slot.map(|slot| (own, slot)));
            }
            rows = later;
        }
        Ok(())
    }

    /// The overlay as the device has it, once the rows are there.
    fn table(&mut self) -> Result<OverlayTable<D>, DriverError> {
        self.jobs.finish()?;
        let row = |(key, changed): (&FlatKey, &Changed)| ChangedRow {
            key: key.0,
            location: changed.location.map(|location| location.bits()),
            words: self.shared.slot_words(changed.table),
        };
        OverlayTable::new(&self.shared.tier, self.overlay.rows.iter().map(row))
    }
}

#[cfg(test)]
#[cfg(all(feature = "cusim", not(flechette_loom)))]
mod cusim_tests;
