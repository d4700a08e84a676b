//! The cache's index and pool in device memory, and the jobs that change them.
//!
//! All changes of the index are launched on one stream, the table's own, one kernel after the other.
//! `kernels/replace.cu` and `kernels/sweep.cu` explain why no other synchronisation is needed. Locations are
//! checked here before they enter the index, so kernels find only locations in the pool or in registered host
//! memory. The cache ensures that a key is linked to the location of its row, and that no batch reads a slot
//! while it is written.

#![allow(unsafe_code)]

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard};

use super::args::{BUCKET_BYTES, JobKind, MayReplace, Outcome, ReplaceArgs, ReplaceJob};
use super::kernels;
use crate::cache::index::Location;
use crate::device::cuda::memory::{Array, DeviceMemory, MemoryPlan, PinnedMemory, Recorded, Staging};
use crate::device::cuda::{Driver, DriverError};
use crate::mem::WORD_BYTES;
use crate::sync::EvenPoisoned;

/// Keys below this mark empty and removed entries.
const RESERVED_KEYS: u64 = 2;
/// Words of a tag.
const TAG_WORDS: usize = 2;

/// The size of a [`GpuTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GpuTableShape {
    /// Buckets of the index, 1 to 2^32.
    pub buckets: u64,
    /// Bytes of a slab.
    pub slab_bytes: usize,
    /// Slabs of the pool.
    pub slabs: usize,
}

/// Index and pool in device memory. Both are empty at first.
pub(crate) struct GpuTable<D: Driver> {
    driver: Arc<D>,
    stream: D::Stream,
    shape: GpuTableShape,
    index: DeviceMemory<D>,
    pool: DeviceMemory<D>,
    /// The address of word 0 of host locations. The 2^39 words from here on should include all pinned memory.
    host_origin: u64,
    regions: Mutex<Vec<Arc<PinnedMemory<D>>>>,
}

impl<D: Driver> GpuTable<D> {
    /// Allocates the memory.
    ///
    /// # Errors
    /// Driver errors.
    pub(crate) fn new(driver: Arc<D>, shape: GpuTableShape) -> Result<Self, DriverError> {
        // Pinned allocations lie near each other. So the addresses that locations reach extend equally far to
        // both sides of one such allocation.
        let somewhere = PinnedMemory::new(&driver, 1)?.address();
        Ok(Self {
            stream: driver.stream()?,
            shape,
            index: DeviceMemory::new(&driver, shape.buckets as usize * BUCKET_BYTES)?,
            pool: DeviceMemory::new(&driver, shape.slabs * shape.slab_bytes)?,
            host_origin: somewhere.saturating_sub(Location::OFFSETS / 2 * WORD_BYTES as u64) & !4095,
            regions: Mutex::default(),
            driver,
        })
    }

    #[allow(missing_docs)]
    pub(crate) fn driver(&self) -> &Arc<D> {
        &self.driver
    }

    #[allow(missing_docs)]
    pub(crate) fn shape(&self) -> GpuTableShape {
        self.shape
    }

    /// Lets entries point into this memory until [`Self::unregister`]. Returns the location of its first
    /// word, or `None` if locations do not reach it.
    pub(crate) fn register(&self, region: Arc<PinnedMemory<D>>) -> Option<u64> {
        let location = self.host_location(region.address())?;
        self.host_location(region.address() + region.bytes() as u64)?;
        self.regions().push(region);
        Some(location)
    }

    /// Releases the memory that was registered with this location. The caller has ensured that no entry
    /// points into it, and that no batch or job reads it any more.
    pub(crate) fn unregister(&self, location: u64) {
        self.regions().retain(|region| self.host_location(region.address()) != Some(location));
    }

    /// The bits of the location of an address in host memory. `None` if the address is out of reach.
    fn host_location(&self, address: u64) -> Option<u64> {
        let words = address.checked_sub(self.host_origin)? / WORD_BYTES as u64;
        (words < Location::OFFSETS).then(|| Location::pointer(words).bits())
    }

    fn regions(&self) -> MutexGuard<'_, Vec<Arc<PinnedMemory<D>>>> {
        self.regions.lock().even_poisoned()
    }

    /// The address of a host row.
    fn host_address(&self, location: Location) -> u64 {
        self.host_origin + location.offset() * WORD_BYTES as u64
    }

    /// Whether kernels may read this many words at the location with these bits.
    pub(crate) fn holds(&self, location: u64, words: usize) -> bool {
        let Some(location) = Location::try_from_bits(location) else { return false };
        let bytes = (words * WORD_BYTES) as u64;
        if !location.is_pointer() {
            return location.offset() * WORD_BYTES as u64 + bytes <= self.pool.bytes() as u64;
        }
        let from = self.host_address(location);
        let to = from + bytes;
        let covers = |r: &Arc<PinnedMemory<D>>| r.address() <= from && to <= r.address() + r.bytes() as u64;
        self.regions().iter().any(covers)
    }

    /// The only stream on which the index changes.
    pub(crate) fn stream(&self) -> &D::Stream {
        &self.stream
    }

    pub(crate) fn index(&self) -> u64 {
        self.index.address()
    }

    pub(crate) fn pool(&self) -> u64 {
        self.pool.address()
    }

    pub(crate) fn host_origin(&self) -> u64 {
        self.host_origin
    }
}

impl<D: Driver> Drop for GpuTable<D> {
    fn drop(&mut self) {
        if let Err(error) = self.driver.finish(&self.stream) {
            tracing::error!(%error, "waiting for the last change of the cache failed");
            // Kernels may still read the registered memory, so its owners must not become its only users.
            std::mem::forget(std::mem::take(&mut *self.regions()));
        }
    }
}

/// The source of a job's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JobRow {
    /// The staging buffer: the row's first word there.
    Staged(usize),
    /// Registered host memory: bits of the row's location.
    Host(u64),
    /// No row: the slot is overwritten with values that no row has.
    Poison,
    /// Nothing is copied: the row is at its location already, or the job needs no row.
    InPlace,
}

/// A change of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IndexJob {
    /// The row's key in the index.
    pub key: u64,
    /// Bits of the row's new location.
    pub location: u64,
    #[allow(missing_docs)]
    pub row: JobRow,
    /// The row's own key, stored before the row, if several rows may share its key in the index; else 0.
    pub tag: u64,
    /// The row's words, without the tag.
    pub words: usize,
    #[allow(missing_docs)]
    pub kind: JobKind,
    /// The initial age of the entry: its stamp is `now` minus this many batches.
    pub older: u32,
}

/// Jobs that are launched together, and their outcomes.
pub(crate) struct Jobs<D: Driver> {
    table: Arc<GpuTable<D>>,
    memory: PinnedMemory<D>,
    jobs: Array<ReplaceJob>,
    outcomes: Array<Outcome>,
    keys: HashSet<u64>,
    count: usize,
    /// Whether a job copies from the staging buffer.
    staged: bool,
    /// The end of the last launch, until a wait for it has succeeded.
    done: Option<Recorded<D>>,
}

impl<D: Driver> Jobs<D> {
    /// Room for `capacity` jobs.
    ///
    /// # Errors
    /// As [`Driver::allocate_pinned`].
    pub(crate) fn new(table: &Arc<GpuTable<D>>, capacity: usize) -> Result<Self, DriverError> {
        let mut plan = MemoryPlan::default();
        let (jobs, outcomes) = (plan.array(capacity), plan.array(capacity));
        Ok(Self {
            table: table.clone(),
            memory: PinnedMemory::new(&table.driver, plan.bytes())?,
            jobs,
            outcomes,
            keys: HashSet::new(),
            count: 0,
            staged: false,
            done: None,
        })
    }

    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds a job. Returns false if the jobs are full, if its key is reserved or has a job already, or if its
    /// row or location is out of bounds.
    ///
    /// # Panics
    /// After a launch, until [`Self::finish`] has succeeded.
    pub(crate) fn push(&mut self, job: IndexJob, staging: &Staging<D>) -> bool {
        assert!(self.done.is_none(), "jobs were added before `finish` of the previous launch");
        let links = matches!(job.kind, JobKind::Keep | JobKind::Swap) && job.row != JobRow::Poison;
        let copies = job.row != JobRow::InPlace;
        let slot_words = job.words + if job.tag == 0 { 0 } else { TAG_WORDS };
        let is_in_host_memory = |bits| Location::from_bits(bits).is_pointer();
        let is_out_of_bounds = |from| !is_in_host_memory(from) || !self.table.holds(from, job.words);
        if self.count == self.jobs.len()
            || (links && job.key < RESERVED_KEYS)
            || ((links || copies) && !self.table.holds(job.location, slot_words))
            || (copies && is_in_host_memory(job.location))
            || matches!(job.row, JobRow::Host(from) if is_out_of_bounds(from))
            || !self.keys.insert(if job.row == JobRow::Poison { !job.location } else { job.key })
        {
            return false;
        }
        let row = match job.row {
            JobRow::Staged(word) => staging.row(word, job.words),
            JobRow::Host(from) => self.table.host_address(Location::from_bits(from)),
            JobRow::Poison | JobRow::InPlace => 0,
        };
        self.memory.get_mut(self.jobs)[self.count] = ReplaceJob {
            key: job.key,
            location: job.location,
            row,
            tag: job.tag,
            words: if copies { job.words as u32 } else { 0 },
            kind: job.kind as u32,
            older: job.older,
            unused: 0,
        };
        self.count += 1;
        self.staged |= matches!(job.row, JobRow::Staged(_));
        true
    }

    /// Copies the rows and then links the keys, stamped `now`. If rows are copied from the staging buffer,
    /// the buffer waits for the end of the launch before it is written again.
    ///
    /// # Errors
    /// Driver errors.
    pub(crate) fn launch(
        &mut self,
        now: u64,
        may_replace: MayReplace,
        staging: Option<&mut Staging<D>>,
    ) -> Result<(), DriverError> {
        let args = ReplaceArgs { now, may_replace: may_replace as u32, ..self.args() };
        let mut launched = self.copy_in(&args);
        if launched.is_ok() {
            let GpuTable { driver, stream, .. } = &*self.table;
            // SAFETY: as in `copy_in`. `push` has kept the keys distinct, and this is the only stream on
            // which the index changes. The host reads the outcomes after `finish` has waited.
            launched = unsafe { kernels::link_keys(&**driver, stream, &args) };
        }
        // The end is recorded even if the second launch failed, because the first one may be running.
        self.mark_end(staging).and(launched)
    }

    /// Copies the rows or poisons the slots, as [`Self::launch`] does, but links nothing. The jobs have no
    /// valid outcomes.
    ///
    /// # Errors
    /// Driver errors.
    pub(crate) fn copy(&mut self, staging: Option<&mut Staging<D>>) -> Result<(), DriverError> {
        let launched = self.copy_in(&self.args());
        self.mark_end(staging).and(launched)
    }

    fn args(&self) -> ReplaceArgs {
        ReplaceArgs {
            jobs: self.memory.of(self.jobs),
            outcomes: self.memory.of(self.outcomes),
            index: self.table.index(),
            pool: self.table.pool(),
            buckets: self.table.shape.buckets,
            now: 0,
            count: self.count as u32,
            may_replace: 0,
        }
    }

    fn copy_in(&self, args: &ReplaceArgs) -> Result<(), DriverError> {
        if self.memory.get(self.jobs)[..self.count].iter().all(|job| job.words == 0) {
            return Ok(());
        }
        let GpuTable { driver, stream, .. } = &*self.table;
        // SAFETY: `push` has checked every location and row. Until the launch has ended (`Driver` says when),
        // the memory stays allocated: `drop` waits before it frees the jobs and lets go of the table, and so
        // does the staging buffer, which `mark_end` makes hold the event. Host memory is unregistered only
        // after all jobs have ended. Nothing races with the kernel: `push` panics while `done` is set,
        // and only a successful wait clears it; the staging buffer waits before it is written; and by the
        // cache's epochs no batch reads the slots.
        unsafe { kernels::copy_in(&**driver, stream, args) }
    }

    /// Records the end of the launch.
    fn mark_end(&mut self, staging: Option<&mut Staging<D>>) -> Result<(), DriverError> {
        let done = self.table.driver.record(&self.table.stream).map(Arc::new);
        if let Some(staging) = staging.filter(|_| self.staged) {
            staging.hold(done.clone());
        }
        self.done.insert(done).as_ref().map(|_| ()).map_err(Clone::clone)
    }

    /// Whether the last launch has ended.
    ///
    /// # Errors
    /// As [`Driver::fired`].
    pub(crate) fn fired(&self) -> Result<bool, DriverError> {
        let Some(done) = &self.done else { return Ok(true) };
        self.table.driver.fired(done.as_ref().map_err(Clone::clone)?)
    }

    /// Waits for the last launch and returns the outcomes in the order of the jobs. Removes the jobs.
    ///
    /// # Errors
    /// As [`Driver::wait`]. Then no jobs can be added any more, and every later call fails too.
    pub(crate) fn finish(&mut self) -> Result<&[Outcome], DriverError> {
        if let Some(done) = &self.done {
            self.table.driver.wait(done.as_ref().map_err(Clone::clone)?)?;
            self.done = None;
        }
        self.keys.clear();
        self.staged = false;
        let count = std::mem::take(&mut self.count);
        Ok(&self.memory.get(self.outcomes)[..count])
    }
}

impl<D: Driver> Drop for Jobs<D> {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            tracing::error!(%error, "waiting for changes of the cache failed");
        }
    }
}

#[cfg(test)]
#[cfg(all(feature = "cusim", not(flechette_loom)))]
mod cusim_tests;
