//! A lane: the stream and the memory by which a worker takes one batch after the other through the cache.
//!
//! A batch is launched as probe and gather, back to back. Where the probe finds every row, that was all: two
//! launches, or one graph of two nodes, and one wait. Where it does not, the gather has done nothing; the hits
//! are copied while the host writes the missed rows, and the gather is launched again.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;

use super::block::Block;
use super::overlay::OverlayTable;
pub use super::shape::{LaneError, LaneLookup, LaneShape};
use super::table::GpuTable;

use super::kernels;
use crate::device::cuda::launch::{blocks, gather_pool};
use crate::device::cuda::memory::Staging;
use crate::device::cuda::{Driver, DriverError};
use crate::types::Batch;

/// A row that the index does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneMiss {
    /// One lookup that wants it.
    pub lookup: usize,
    /// Its id.
    pub id: u64,
    /// Its first word in the staging memory.
    pub word: usize,
}

/// One batch at a time.
pub struct Lane<D: Driver> {
    tier: Arc<GpuTable<D>>,
    stream: D::Stream,
    block: Block<D>,
    staging: Staging<D>,
    misses: Vec<LaneMiss>,
    /// By the blocks of probe and gather: the graph of both, once they came a second time.
    graphs: HashMap<(u32, u32), Option<D::Graph>>,
    /// What the probe that may be under way asks before the index.
    overlay: Option<Arc<OverlayTable<D>>>,
    /// Whether something may be under way.
    busy: bool,
}

impl<D: Driver> Lane<D> {
    /// Takes the memory.
    ///
    /// # Errors
    /// [`LaneError`] when the shape does not hold together, or the driver refuses.
    pub fn new(tier: &Arc<GpuTable<D>>, shape: LaneShape) -> Result<Self, LaneError> {
        let driver = tier.driver();
        Ok(Self {
            stream: driver.stream()?,
            staging: Staging::new(driver, shape.staging_words)?,
            block: Block::new(driver, shape)?,
            misses: Vec::new(),
            graphs: HashMap::new(),
            overlay: None,
            busy: false,
            tier: tier.clone(),
        })
    }

    /// What it has of pinned memory of the host, and of the device's, in bytes.
    #[must_use]
    pub(crate) fn bytes(&self) -> (usize, usize) {
        let (pinned, device) = self.block.bytes();
        (pinned + self.staging.len() * size_of::<u32>(), device)
    }

    /// Looks a batch up, in the overlay first if there is one, stamping what it finds in the index as used `now`;
    /// and pools it if nothing is missing. Returns how many distinct rows are.
    ///
    /// # Errors
    /// [`LaneError`] for a batch that the lane was not made for, or what the driver says.
    pub fn probe(
        &mut self,
        now: u64,
        overlay: Option<&Arc<OverlayTable<D>>>,
        batch: &Batch,
    ) -> Result<usize, LaneError> {
        self.settle()?;
        let scratch = self.block.probe_args(&self.tier).scratch;
        self.block.fill(now, overlay.map(|overlay| &**overlay), batch)?;
        self.overlay = overlay.cloned();
        if self.block.probe_args(&self.tier).scratch != scratch {
            self.graphs.clear(); // they have the old address
        }
        let (probe, gather) = self.block.warps();
        let driver = &**self.tier.driver();
        let grid = (blocks(driver, probe), blocks(driver, gather));
        self.busy = true;
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
        self.note_misses()
    }

    /// The probe, and the gather behind it.
    fn launch(&self, (probe, gather): (u32, u32)) -> Result<(), DriverError> {
        let driver = &**self.tier.driver();
        let args = self.block.probe_args(&self.tier);
        // SAFETY: `Block::fill` has checked the batch and laid it out within its arrays, scans included;
        // the scratch table has two slots an occurrence, a power of two, and this generation is its newest. All
        // of it is `self`'s, and neither written nor freed before `settle`; so is the overlay that the header
        // names. Where rows bear tags, these lie within the pool like the rows behind them.
        unsafe { kernels::probe(driver, &self.stream, probe, &args)? };
        self.gather(gather)
    }

    fn gather(&self, blocks: u32) -> Result<(), DriverError> {
        let args = self.block.pool_args(&self.tier);
        // SAFETY: as above; the lookups' columns were checked when the lane was made. What the index holds lies
        // within the pool or registered memory, as `GpuTable` sees to, and the rows of misses within the staging
        // memory, when the header says that they are there.
        unsafe { gather_pool(&**self.tier.driver(), &self.stream, blocks, &args) }
    }

    fn launch_graph(&self, graph: &D::Graph) -> Result<(), DriverError> {
        // SAFETY: the graph is of `launch`, whose arguments are the same for every batch.
        unsafe { self.tier.driver().launch_graph(&self.stream, graph) }
    }

    /// Lists the misses, each with a place in the staging memory.
    fn note_misses(&mut self) -> Result<usize, LaneError> {
        self.misses.clear();
        let mut word = 0;
        for (lookup, id) in self.block.misses() {
            self.misses.push(LaneMiss { lookup, id, word });
            word += self.block.shape.lookups[lookup].row_words();
        }
        if word > self.staging.len() {
            let bytes = |words: usize| (words * size_of::<u32>()) as u64;
            let (limit, got) = (bytes(self.staging.len()), bytes(word));
            return Err(LaneError::Capacity { field: "cache.staging_bytes", limit, got });
        }
        Ok(self.misses.len())
    }

    /// What the last probe did not find, each row once.
    #[must_use]
    pub fn misses(&self) -> &[LaneMiss] {
        &self.misses
    }

    /// By lookup: how many occurrences the last probe did not find.
    #[must_use]
    pub fn missed(&self) -> &[u32] {
        self.block.counts()[0]
    }

    /// By lookup: how many occurrences the last probe found in memory of the host.
    #[must_use]
    pub fn pointed(&self) -> &[u32] {
        self.block.counts()[1]
    }

    /// By lookup: of how many of those that it did not find another row has the key.
    #[must_use]
    pub fn collided(&self) -> &[u32] {
        self.block.counts()[2]
    }

    /// The distinct rows that the last probe found in memory of the host: a lookup that wants each, and its id.
    pub fn pointed_rows(&self) -> impl Iterator<Item = (usize, u64)> {
        self.block.pointed()
    }

    /// Begins to copy the hits out of the pool. Does not wait.
    ///
    /// # Errors
    /// What the driver says.
    pub fn copy_hits(&mut self) -> Result<(), DriverError> {
        let driver = &**self.tier.driver();
        self.busy = true;
        let args = self.block.copy_args(&self.tier);
        // SAFETY: as in `launch`; it follows the probe in the lane's stream.
        unsafe { kernels::copy_rows(driver, &self.stream, blocks(driver, self.block.warps().0), &args) }
    }

    /// The misses, and the memory that their rows are to be written to, each at its [`LaneMiss::word`].
    ///
    /// # Errors
    /// What the driver says, of the replacement that read it last.
    pub fn staged_mut(&mut self) -> Result<(&[LaneMiss], &mut [u32]), DriverError> {
        Ok((&self.misses, self.staging.words_mut()?))
    }

    /// Pools a batch whose missed rows are written. Does not wait: [`Self::settle`] does.
    ///
    /// # Errors
    /// What the driver says.
    pub fn pool(&mut self) -> Result<(), DriverError> {
        let Self { block, staging, misses, .. } = self;
        let words = |lookup: usize| block.shape.lookups[lookup].row_words();
        let rows: Vec<u64> = misses.iter().map(|m| staging.row(m.word, words(m.lookup))).collect();
        // The copy of hits, which may be under way, reads nothing of this.
        block.stage(rows.into_iter());
        self.busy = true;
        self.gather(blocks(&**self.tier.driver(), self.block.warps().1))
    }

    /// The pooled matrix of the last batch, once it is settled, `samples x stride`: dense values, then the
    /// lookups' vectors at their columns.
    #[must_use]
    pub fn out(&self) -> &[f32] {
        self.block.out()
    }

    /// What the replacement may take in: the misses; the rows found in memory of the host, by a lookup and their
    /// ids; and the misses' rows.
    pub(crate) fn replacement(
        &mut self,
    ) -> (&[LaneMiss], impl Iterator<Item = (usize, u64)>, &mut Staging<D>) {
        (&self.misses, self.block.pointed(), &mut self.staging)
    }

    /// A point after all that was launched.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn record(&self) -> Result<D::Event, DriverError> {
        self.tier.driver().record(&self.stream)
    }

    /// Waits for all that was launched.
    ///
    /// # Errors
    /// What the driver says.
    pub fn settle(&mut self) -> Result<(), DriverError> {
        if self.busy {
            self.tier.driver().wait(&self.record()?)?;
            self.busy = false;
            self.overlay = None;
        }
        Ok(())
    }
}

impl<D: Driver> Drop for Lane<D> {
    fn drop(&mut self) {
        if let Err(error) = self.settle() {
            tracing::error!(%error, "waiting for the last batch of a lane");
        }
    }
}
