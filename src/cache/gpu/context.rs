//! A lookup context: the stream and the memory for the lookup of one batch at a time.
//!
//! A batch copies its layout to the device and launches two kernels, a probe of the index and a gather that
//! pools the rows. If every row is cached, it needs only a copy, two launches (or one graph of two nodes),
//! and one wait. If a row is missing, the gather does nothing. Then the hits are copied while the host writes
//! the missing rows, and the gather is launched again.

#![allow(unsafe_code)]

mod memory;
mod shape;

use std::collections::HashMap;
use std::sync::Arc;

use self::memory::{BatchMemory, Counted};
pub use self::shape::ContextShape;
pub(crate) use self::shape::{LookupError, LookupKeys};
use super::kernels;
use super::overlay::OverlayTable;
use super::table::GpuTable;
use crate::device::cuda::launch::{blocks, gather_pool};
use crate::device::cuda::memory::Staging;
use crate::device::cuda::{Driver, DriverError};
use crate::schema::Lookup;
use crate::types::{Batch, Version};

/// A row that a lookup reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LookupRow {
    /// The place of the lookup in [`ContextShape::lookups`].
    pub lookup: usize,
    /// The row's id in the lookup's table.
    pub id: u64,
}

/// A row that is not cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MissedRow {
    /// One of the lookups that read it.
    pub lookup: usize,
    /// The row's id in the lookup's table.
    pub id: u64,
    /// The row's first word in the staging buffer.
    pub word: usize,
}

/// A number for each of the two kernels of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct PerKernel {
    probe: u32,
    gather: u32,
}

/// Bytes that lookup contexts use in addition to `cache.bytes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ContextBytes {
    /// Pinned memory of the host.
    pub pinned: usize,
    /// Memory of the device.
    pub device: usize,
}

impl std::iter::Sum for ContextBytes {
    fn sum<I: Iterator<Item = Self>>(contexts: I) -> Self {
        contexts.fold(Self::default(), |sum, bytes| Self {
            pinned: sum.pinned + bytes.pinned,
            device: sum.device + bytes.device,
        })
    }
}

/// The parts of a context that the cache needs after the probe.
pub(crate) struct ContextParts<'c, D: Driver, P> {
    pub lookups: &'c [Lookup],
    pub misses: &'c [MissedRow],
    /// The rows that were found in host memory.
    pub pointed: P,
    /// The buffer with the rows of the misses.
    pub staging: &'c mut Staging<D>,
}

/// Looks up one batch at a time in a [`GpuTable`].
pub struct LookupContext<D: Driver> {
    table: Arc<GpuTable<D>>,
    stream: D::Stream,
    memory: BatchMemory<D>,
    staging: Staging<D>,
    misses: Vec<MissedRow>,
    /// Graphs of probe and gather, by the block counts of both kernels. A graph is captured when the same
    /// counts occur a second time. `None`: the counts occurred once.
    graphs: HashMap<PerKernel, Option<D::Graph>>,
    /// The overlay that the running probe reads before the index.
    overlay: Option<Arc<OverlayTable<D>>>,
    /// Whether kernels may be running. Only a successful wait clears it.
    busy: bool,
    /// Whether the last probe has ended, so that the host may read what it found.
    probed: bool,
    version: Version,
}

impl<D: Driver> LookupContext<D> {
    /// Allocates a context. `keys` has one element for each lookup of the shape.
    ///
    /// # Errors
    /// [`LookupError`] for an inconsistent shape, and driver errors.
    pub(crate) fn new(
        table: &Arc<GpuTable<D>>,
        shape: &ContextShape,
        keys: &[LookupKeys],
    ) -> Result<Self, LookupError> {
        let driver = table.driver();
        Ok(Self {
            stream: driver.stream()?,
            staging: Staging::new(driver, shape.staging_words())?,
            memory: BatchMemory::new(driver, shape, keys)?,
            misses: Vec::new(),
            graphs: HashMap::new(),
            overlay: None,
            busy: false,
            probed: false,
            version: Version(0),
            table: table.clone(),
        })
    }

    pub(crate) fn bytes(&self) -> ContextBytes {
        let bytes = self.memory.bytes();
        ContextBytes { pinned: bytes.pinned + self.staging.len() * size_of::<u32>(), ..bytes }
    }

    pub(crate) fn shape(&self) -> &ContextShape {
        &self.memory.shape
    }

    /// Whether this context looks up batches in `table`.
    pub(crate) fn is_of(&self, table: &Arc<GpuTable<D>>) -> bool {
        Arc::ptr_eq(&self.table, table)
    }

    /// The version of the last batch that [`super::GpuCache::embed`] ran.
    #[must_use]
    #[cfg(test)]
    pub(crate) fn version(&self) -> Version {
        self.version
    }

    pub(crate) fn set_version(&mut self, version: Version) {
        self.version = version;
    }

    /// Looks up a batch, first in the overlay, then in the index, and waits for the result. Entries found in
    /// the index are stamped with `now`. If no row is missing, the batch is pooled. Returns how many distinct
    /// rows are missing.
    ///
    /// # Errors
    /// [`LookupError`] for a batch that does not fit the shape, and driver errors.
    pub(crate) fn probe(
        &mut self,
        now: u64,
        overlay: Option<&Arc<OverlayTable<D>>>,
        batch: &Batch,
    ) -> Result<usize, LookupError> {
        self.probed = false;
        self.settle()?;
        let scratch = self.memory.probe_args(&self.table).scratch;
        self.memory.fill(now, overlay.map(|overlay| &**overlay), batch)?;
        self.overlay = overlay.cloned();
        if self.memory.probe_args(&self.table).scratch != scratch {
            self.graphs.clear(); // they contain the address of the old scratch table
        }
        let warps = self.memory.warps();
        let driver = &**self.table.driver();
        let grid = PerKernel { probe: blocks(driver, warps.probe), gather: blocks(driver, warps.gather) };
        self.busy = true;
        // SAFETY: the kernels follow on this stream. Until they have ended, `busy` is set: then `settle`
        // fails or waits before this function writes the memory again, and `drop` calls it before it frees
        // the memory. If the wait fails, the driver keeps the memory.
        unsafe { self.memory.upload(&self.stream)? };
        if let Some(Some(graph)) = self.graphs.get(&grid) {
            self.launch_graph(graph)?;
        } else if self.graphs.contains_key(&grid) {
            let graph = driver.capture(&self.stream, &mut || self.launch(grid))?;
            self.launch_graph(&graph)?;
            self.graphs.insert(grid, Some(graph));
        } else {
            self.launch(grid)?;
            self.graphs.insert(grid, None);
        }
        self.settle()?;
        self.probed = true;
        self.list_misses()
    }

    /// Launches the probe and the gather.
    fn launch(&self, grid: PerKernel) -> Result<(), DriverError> {
        let driver = &**self.table.driver();
        let args = self.memory.probe_args(&self.table);
        // SAFETY: `BatchMemory::fill` has checked the batch and written it within its arrays, scans included.
        // The number of slots of the scratch table is a power of two and at least two per occurrence, and no
        // slot has a newer generation. `self` owns all of this memory, and neither writes nor frees it before
        // the kernels have ended, as for `upload` in `probe`. It reads what they find once `probed` is set.
        // `settle` keeps the overlay in the header until then. Tags are in the pool with their rows.
        unsafe { kernels::probe(driver, &self.stream, grid.probe, &args)? };
        self.gather(grid.gather, 0)
    }

    /// Launches the gather, for a batch of which this many missing rows are staged.
    fn gather(&self, blocks: u32, staged: usize) -> Result<(), DriverError> {
        let args = self.memory.pool_args(&self.table, staged);
        // SAFETY: as in `launch`. `BatchMemory::new` has checked the lookups' columns. `GpuTable` ensures
        // that entries of the index point into the pool or into registered memory. `staged` is 0 until
        // `stage` has stored the addresses of the missing rows. These rows are in the staging buffer, which
        // `Shared::run` (`embed.rs`) writes before `pool`. `out` is read only when `busy` is clear.
        unsafe { gather_pool(&**self.table.driver(), &self.stream, blocks, &args) }
    }

    fn launch_graph(&self, graph: &D::Graph) -> Result<(), DriverError> {
        // SAFETY: as in `launch`, from which the graph was captured: its arguments are the same for every
        // batch.
        unsafe { self.table.driver().launch_graph(&self.stream, graph) }
    }

    /// Lists the misses and gives each a place in the staging buffer.
    fn list_misses(&mut self) -> Result<usize, LookupError> {
        self.misses.clear();
        let mut word = 0;
        for LookupRow { lookup, id } in self.memory.misses() {
            self.misses.push(MissedRow { lookup, id, word });
            word += self.memory.shape.row_words(lookup);
        }
        if word > self.staging.len() {
            let bytes = |words: usize| (words * size_of::<u32>()) as u64;
            let (limit, got) = (bytes(self.staging.len()), bytes(word));
            return Err(LookupError::Capacity { field: "cache.staging_bytes", limit, got });
        }
        Ok(self.misses.len())
    }

    /// The distinct rows that the last probe did not find.
    #[must_use]
    pub(crate) fn misses(&self) -> &[MissedRow] {
        &self.misses
    }

    /// By lookup: how many occurrences the last probe did not find.
    #[must_use]
    #[cfg(all(test, feature = "cusim"))]
    pub(crate) fn missed(&self) -> &[u32] {
        self.found().counted(Counted::Missed)
    }

    /// By lookup: how many occurrences the last probe found in host memory, by a pointer.
    #[must_use]
    pub(crate) fn pointed(&self) -> &[u32] {
        self.found().counted(Counted::Pointed)
    }

    /// By lookup: how many of the missed occurrences have an index key that is linked to another row.
    #[must_use]
    pub(crate) fn collided(&self) -> &[u32] {
        self.found().counted(Counted::Collided)
    }

    /// The distinct rows that the last probe found in host memory.
    #[cfg(all(test, feature = "cusim"))]
    pub(crate) fn pointed_rows(&self) -> impl Iterator<Item = LookupRow> {
        self.found().pointed()
    }

    /// The memory with what the last probe found, which no kernel writes any more.
    ///
    /// # Panics
    /// Unless [`Self::probe`] has ended.
    fn found(&self) -> &BatchMemory<D> {
        assert!(self.probed, "the probe has not ended");
        &self.memory
    }

    /// Launches the copy of the hits from the pool into this context's device memory. Does not wait.
    ///
    /// # Errors
    /// Driver errors.
    pub(crate) fn copy_hits(&mut self) -> Result<(), DriverError> {
        let driver = &**self.table.driver();
        let args = self.found().copy_args(&self.table);
        self.busy = true;
        // SAFETY: as in `launch`. The probe has ended, and the kernel neither reads nor writes pinned memory
        // of this context.
        unsafe { kernels::copy_rows(driver, &self.stream, blocks(driver, self.memory.warps().probe), &args) }
    }

    /// The misses and the staging buffer. The caller writes each row at its [`MissedRow::word`].
    ///
    /// # Errors
    /// Driver errors when waiting for the jobs that last read the buffer.
    #[cfg(all(test, feature = "cusim"))]
    pub(crate) fn staged_mut(&mut self) -> Result<(&[MissedRow], &mut [u32]), DriverError> {
        Ok((&self.misses, self.staging.words_mut()?))
    }

    /// Pools the batch, after the caller has written its missing rows. Does not wait; [`Self::settle`] does.
    ///
    /// # Errors
    /// Driver errors.
    pub(crate) fn pool(&mut self) -> Result<(), DriverError> {
        assert!(self.probed, "the probe has not ended");
        let Self { memory, staging, misses, .. } = self;
        let rows: Vec<u64> =
            misses.iter().map(|m| staging.row(m.word, memory.shape.row_words(m.lookup))).collect();
        // The copy of the hits may still be running. It reads nothing that `stage` writes.
        memory.stage(rows.into_iter());
        self.busy = true;
        let grid = blocks(&**self.table.driver(), self.memory.warps().gather);
        self.gather(grid, self.misses.len())
    }

    /// The output of the last batch, valid after [`Self::settle`]: `samples x stride` values. Each sample has
    /// its dense values, then each lookup's pooled vector at the lookup's column.
    ///
    /// # Panics
    /// While kernels may be running.
    #[must_use]
    pub(crate) fn out(&self) -> &[f32] {
        assert!(!self.busy, "the output was not waited for");
        self.memory.out()
    }

    /// The parts of this context that the cache needs after the probe.
    ///
    /// # Panics
    /// Unless [`Self::probe`] has ended.
    pub(crate) fn parts(&mut self) -> ContextParts<'_, D, impl Iterator<Item = LookupRow>> {
        assert!(self.probed, "the probe has not ended");
        let Self { memory, misses, staging, .. } = self;
        ContextParts { lookups: &memory.shape.lookups, misses, pointed: memory.pointed(), staging }
    }

    /// Waits for all kernels that this context has launched.
    ///
    /// # Errors
    /// Driver errors.
    pub(crate) fn settle(&mut self) -> Result<(), DriverError> {
        if self.busy {
            self.table.driver().finish(&self.stream)?;
            self.busy = false;
            self.overlay = None;
        }
        Ok(())
    }

    /// Whether kernels may be running.
    #[cfg(all(test, feature = "cusim"))]
    pub(crate) fn is_busy(&self) -> bool {
        self.busy
    }
}

impl<D: Driver> Drop for LookupContext<D> {
    fn drop(&mut self) {
        if let Err(error) = self.settle() {
            tracing::error!(%error, "waiting for the last batch of a lookup context failed");
        }
    }
}
