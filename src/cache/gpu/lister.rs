//! Lists entries of the index for the host, without changing the index.

#![allow(unsafe_code)]

use std::sync::Arc;

use super::args::{EMPTY_KEY, ListArgs, Listed, SLOTS};
use super::kernels;
use super::table::GpuTable;
use crate::device::cuda::memory::{Array, MemoryPlan, PinnedMemory};
use crate::device::cuda::{Driver, DriverError};
use crate::mem::WORD_BYTES;

/// Which buckets are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// `count` buckets from `bucket` on, wrapping round at the end of the index, but at most as many as the
    /// lister has room for.
    #[allow(missing_docs)]
    From { bucket: u64, count: u64 },
    /// A sample of buckets with this seed, as many as the lister has room for. If it has room for the whole
    /// index, all buckets, once each.
    Drawn(u64),
}

/// Lists entries, with pinned memory for the entries of one call.
pub(crate) struct Lister<D: Driver> {
    gpu_table: Arc<GpuTable<D>>,
    memory: PinnedMemory<D>,
    listed: Array<Listed>,
    tags: bool,
}

impl<D: Driver> Lister<D> {
    /// A lister with room for the entries of `buckets` buckets. `tags`: whether rows may have tags.
    ///
    /// # Errors
    /// As [`Driver::allocate_pinned`].
    pub(crate) fn new(gpu_table: &Arc<GpuTable<D>>, buckets: usize, tags: bool) -> Result<Self, DriverError> {
        let mut plan = MemoryPlan::default();
        let listed = plan.array(buckets * SLOTS);
        let memory = PinnedMemory::new(gpu_table.driver(), plan.bytes())?;
        Ok(Self { gpu_table: gpu_table.clone(), memory, listed, tags })
    }

    /// The most buckets that one call lists.
    #[must_use]
    pub(crate) fn buckets(&self) -> u64 {
        self.gpu_table.shape().buckets.min((self.listed.len() / SLOTS) as u64)
    }

    /// The entries of some buckets, with their ages at `now`. Waits for all earlier changes of the index.
    ///
    /// # Errors
    /// Driver errors.
    pub(crate) fn look(
        &mut self,
        now: u64,
        look: Look,
    ) -> Result<impl Iterator<Item = &Listed>, DriverError> {
        let (shape, most) = (self.gpu_table.shape(), self.buckets());
        let (from, count, drawn) = match look {
            Look::From { bucket, count } => (bucket, count.min(most), false),
            Look::Drawn(_) if most == shape.buckets => (0, most, false),
            Look::Drawn(draw) => (draw, most, true),
        };
        let args = ListArgs {
            index: self.gpu_table.index(),
            pool: if self.tags { self.gpu_table.pool() } else { 0 },
            listed: self.memory.of(self.listed),
            pool_words: (shape.slabs * shape.slab_bytes / WORD_BYTES) as u64,
            buckets: shape.buckets,
            from,
            now,
            count: count as u32,
            drawn: drawn.into(),
        };
        let driver = self.gpu_table.driver();
        // SAFETY: `listed` has room for `count` buckets, and this is the only stream on which the index
        // changes. The kernel has ended when `finish` succeeds. The host reads `listed` only then, and never
        // writes it. After a failed wait, the driver keeps the memory (`Driver`).
        unsafe { kernels::list_entries(&**driver, self.gpu_table.stream(), &args)? };
        driver.finish(self.gpu_table.stream())?;
        let listed = &self.memory.get(self.listed)[..count as usize * SLOTS];
        Ok(listed.iter().filter(|entry| entry.key != EMPTY_KEY))
    }
}
