//! The cache's index and pool in device memory, and the jobs that change them.
//!
//! Everything that changes the index is launched on one stream, the tier's own, one kernel after the
//! other; `kernels/replace.cu` and `kernels/sweep.cu` say why that is enough. What is put into the index is
//! checked here, so that whatever a kernel finds there lies within the pool or within registered memory of
//! the host. That it is the right row, and that nobody reads a slot that is written, is the cache's affair.

#![allow(unsafe_code)]

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::args::{JobKind, MayReplace, Outcome, ReplaceArgs, ReplaceJob};
use super::kernels;
use crate::device::cuda::memory::{Array, DeviceMemory, PinnedMemory, Plan, Staging};
use crate::device::cuda::{Driver, DriverError};

/// Bytes of a bucket, and its slots.
const BUCKET_BYTES: usize = 128;
/// Words that a location reaches.
const LOCATION_WORDS: u64 = 1 << 39;
/// Keys below this are no row's.
const RESERVED_KEYS: u64 = 2;
const WORD: usize = size_of::<u32>();
/// Words of a tag.
const TAG_WORDS: usize = 2;

/// The sizes of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuTableShape {
    /// Buckets of the index, 1 to 2^32.
    pub buckets: u64,
    /// Bytes of a slab.
    pub slab_bytes: usize,
    /// Slabs of the pool.
    pub slabs: usize,
}

/// Index and pool, empty at first.
pub struct GpuTable<D: Driver> {
    driver: Arc<D>,
    stream: D::Stream,
    shape: GpuTableShape,
    index: DeviceMemory<D>,
    pool: DeviceMemory<D>,
    /// What host rows are counted from, so that 2^39 words hold what was registered.
    host_origin: u64,
    regions: Mutex<Vec<Arc<PinnedMemory<D>>>>,
}

impl<D: Driver> GpuTable<D> {
    /// Takes the memory.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(driver: Arc<D>, shape: GpuTableShape) -> Result<Self, DriverError> {
        // Pinned memory lies together: half of a location's reach on either side of some of it.
        let somewhere = PinnedMemory::new(&driver, 1)?.address();
        Ok(Self {
            stream: driver.stream()?,
            shape,
            index: DeviceMemory::new(&driver, shape.buckets as usize * BUCKET_BYTES)?,
            pool: DeviceMemory::new(&driver, shape.slabs * shape.slab_bytes)?,
            host_origin: somewhere.saturating_sub(LOCATION_WORDS / 2 * WORD as u64) & !4095,
            regions: Mutex::default(),
            driver,
        })
    }

    /// The driver.
    pub fn driver(&self) -> &Arc<D> {
        &self.driver
    }

    /// The sizes.
    pub fn shape(&self) -> GpuTableShape {
        self.shape
    }

    /// Lets entries point into this memory from now on, until [`Self::unregister`]. Returns the location of its
    /// first word, or `None` where locations do not reach it.
    pub fn register(&self, region: Arc<PinnedMemory<D>>) -> Option<u64> {
        let location = self.host_location(region.address())?;
        self.host_location(region.address() + region.bytes() as u64)?;
        self.regions().push(region);
        Some(location)
    }

    /// Lets no more entries point into the memory whose first word is at this location, and gives it up. As where
    /// memory is freed, who calls this has waited: no entry points there, and no batch or job reads it any more.
    pub(crate) fn unregister(&self, location: u64) {
        self.regions().retain(|region| self.host_location(region.address()) != Some(location));
    }

    /// The bits of a host row's location: words from the origin, and a low bit that says so.
    fn host_location(&self, address: u64) -> Option<u64> {
        let words = address.checked_sub(self.host_origin)? / WORD as u64;
        (words < LOCATION_WORDS).then_some(words << 1 | 1)
    }

    fn regions(&self) -> MutexGuard<'_, Vec<Arc<PinnedMemory<D>>>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where kernels see a host row.
    fn host_address(&self, location: u64) -> u64 {
        self.host_origin + (location >> 1) * WORD as u64
    }

    /// Whether a row of so many words at a location lies where kernels may read it.
    pub(crate) fn holds(&self, location: u64, words: usize) -> bool {
        let bytes = (words * WORD) as u64;
        if location & 1 == 0 {
            return (location >> 1) * WORD as u64 + bytes <= self.pool.bytes() as u64;
        }
        let from = self.host_address(location);
        let to = from + bytes;
        let covers = |r: &Arc<PinnedMemory<D>>| r.address() <= from && to <= r.address() + r.bytes() as u64;
        self.regions().iter().any(covers)
    }

    /// A point after all changes that were launched so far.
    ///
    /// # Errors
    /// As [`Driver::record`].
    pub(crate) fn mark(&self) -> Result<D::Event, DriverError> {
        self.driver.record(&self.stream)
    }

    /// The one stream on which the index is changed.
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
        let last = self.driver.record(&self.stream).and_then(|last| self.driver.wait(&last));
        if let Err(error) = last {
            tracing::error!(%error, "waiting for the last change of the cache");
        }
    }
}

/// Where a job's row comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobRow {
    /// From this word of the staging memory.
    Staged(usize),
    /// From memory of the host that is registered: bits of its location there.
    Host(u64),
    /// From nowhere: the slot is to hold what no row does.
    Poison,
    /// It is where the location says already, or there is none.
    InPlace,
}

/// A change of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// Whose row.
    pub key: u64,
    /// Bits of where it is to be.
    pub location: u64,
    /// Where it comes from.
    pub row: JobRow,
    /// The row's own key, where others may have its key: it goes before the row. Else 0.
    pub tag: u64,
    /// Its words, those of the tag not counted.
    pub words: usize,
    /// What to do where the key is there already.
    pub kind: JobKind,
    /// How many batches before now it is linked as if used.
    pub older: u32,
}

/// Jobs that are launched together, and their outcomes.
pub struct Jobs<D: Driver> {
    tier: Arc<GpuTable<D>>,
    memory: PinnedMemory<D>,
    jobs: Array<ReplaceJob>,
    outcomes: Array<Outcome>,
    keys: HashSet<u64>,
    count: usize,
    done: Option<Arc<D::Event>>,
}

impl<D: Driver> Jobs<D> {
    /// Room for so many jobs.
    ///
    /// # Errors
    /// As [`Driver::allocate_pinned`].
    pub fn new(tier: &Arc<GpuTable<D>>, capacity: usize) -> Result<Self, DriverError> {
        let mut plan = Plan::default();
        let (jobs, outcomes) = (plan.array(capacity), plan.array(capacity));
        let memory = PinnedMemory::new(&tier.driver, plan.bytes())?;
        Ok(Self { tier: tier.clone(), memory, jobs, outcomes, keys: HashSet::new(), count: 0, done: None })
    }

    /// How many jobs there are.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds a job. False where there is no room, its key has a job already, or its rows are out of bounds.
    ///
    /// # Panics
    /// After a launch, until [`Self::finish`].
    pub fn push(&mut self, job: Job, staging: &Staging<D>) -> bool {
        assert!(self.done.is_none(), "jobs under way are left alone");
        let links = matches!(job.kind, JobKind::Keep | JobKind::Swap) && job.row != JobRow::Poison;
        let copies = job.row != JobRow::InPlace;
        let slot_words = job.words + if job.tag == 0 { 0 } else { TAG_WORDS };
        let unheld = |from| from & 1 == 0 || !self.tier.holds(from, job.words);
        if self.count == self.jobs.len()
            || (links && job.key < RESERVED_KEYS)
            || ((links || copies) && !self.tier.holds(job.location, slot_words))
            || (copies && job.location & 1 == 1)
            || matches!(job.row, JobRow::Host(from) if unheld(from))
            || !self.keys.insert(if job.row == JobRow::Poison { !job.location } else { job.key })
        {
            return false;
        }
        let row = match job.row {
            JobRow::Staged(word) => staging.row(word, job.words),
            JobRow::Host(from) => self.tier.host_address(from),
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
        true
    }

    /// Copies the rows in and then links the keys, stamped `now`. The staging memory, where rows come from it, is
    /// held until that is done.
    ///
    /// # Errors
    /// What the driver says.
    pub fn launch(
        &mut self,
        now: u64,
        may_replace: MayReplace,
        staging: Option<&mut Staging<D>>,
    ) -> Result<(), DriverError> {
        let args = ReplaceArgs { now, may_replace: may_replace as u32, ..self.args() };
        let mut launched = self.copy_in(&args);
        if launched.is_ok() {
            let GpuTable { driver, stream, .. } = &*self.tier;
            // SAFETY: as in `copy_in`; `push` has kept the keys distinct, and this is the tier's one stream.
            launched = unsafe { kernels::link_keys(&**driver, stream, &args) };
        }
        // Also where the second launch failed: the first is under way.
        self.mark_end(staging).and(launched)
    }

    /// Copies the rows in, or poisons their slots, and links nothing. The staging memory is held as by
    /// [`Self::launch`]. The jobs have no outcomes.
    ///
    /// # Errors
    /// What the driver says.
    pub fn copy(&mut self, staging: Option<&mut Staging<D>>) -> Result<(), DriverError> {
        let launched = self.copy_in(&self.args());
        self.mark_end(staging).and(launched)
    }

    fn args(&self) -> ReplaceArgs {
        ReplaceArgs {
            jobs: self.memory.of(self.jobs),
            outcomes: self.memory.of(self.outcomes),
            index: self.tier.index(),
            pool: self.tier.pool(),
            buckets: self.tier.shape.buckets,
            now: 0,
            count: self.count as u32,
            may_replace: 0,
        }
    }

    fn copy_in(&self, args: &ReplaceArgs) -> Result<(), DriverError> {
        if self.memory.get(self.jobs)[..self.count].iter().all(|job| job.words == 0) {
            return Ok(());
        }
        let GpuTable { driver, stream, .. } = &*self.tier;
        // SAFETY: `push` has checked every location and row; the staging memory is held by `mark_end`, `self` and
        // its tier outlive the event, which `finish` and `drop` wait for, and whoever unregisters memory of the
        // host has waited too.
        unsafe { kernels::copy_in(&**driver, stream, args) }
    }

    /// Notes the point after what was launched.
    fn mark_end(&mut self, staging: Option<&mut Staging<D>>) -> Result<(), DriverError> {
        let done = Arc::new(self.tier.driver.record(&self.tier.stream)?);
        if let Some(staging) = staging {
            staging.hold(done.clone());
        }
        self.done = Some(done);
        Ok(())
    }

    /// Whether the last launch is done.
    ///
    /// # Errors
    /// As [`Driver::fired`].
    pub(crate) fn fired(&self) -> Result<bool, DriverError> {
        self.done.as_ref().map_or(Ok(true), |done| self.tier.driver.fired(done))
    }

    /// Waits for the last launch, and gives each job's outcome in order. The block is empty then.
    ///
    /// # Errors
    /// As [`Driver::wait`].
    pub fn finish(&mut self) -> Result<&[Outcome], DriverError> {
        if let Some(done) = self.done.take() {
            self.tier.driver.wait(&done)?;
        }
        self.keys.clear();
        let count = std::mem::take(&mut self.count);
        Ok(&self.memory.get(self.outcomes)[..count])
    }
}

impl<D: Driver> Drop for Jobs<D> {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            tracing::error!(%error, "waiting for changes of the cache");
        }
    }
}
