//! Looks at a tier's entries on behalf of the host: the index stays as it is.

#![allow(unsafe_code)]

use std::sync::Arc;

use super::args::{EMPTY_KEY, ListArgs, Listed};
use super::kernels;
use super::table::GpuTable;
use crate::device::cuda::memory::{Array, PinnedMemory, Plan};
use crate::device::cuda::{Driver, DriverError};

/// Slots of a bucket.
const SLOTS: usize = 8;
const WORD: usize = size_of::<u32>();

/// Which buckets are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// So many from there on, round the end if need be, or as many as there is room for.
    From(u64, u64),
    /// As many as there is room for, chosen by this number; or all, once each.
    Drawn(u64),
}

/// Room for what one look sees.
pub struct Lister<D: Driver> {
    tier: Arc<GpuTable<D>>,
    memory: PinnedMemory<D>,
    listed: Array<Listed>,
    tags: bool,
}

impl<D: Driver> Lister<D> {
    /// Room for the entries of so many buckets. `tags`: whether there are rows with tags.
    ///
    /// # Errors
    /// As [`Driver::allocate_pinned`].
    pub fn new(tier: &Arc<GpuTable<D>>, buckets: usize, tags: bool) -> Result<Self, DriverError> {
        let mut plan = Plan::default();
        let listed = plan.array(buckets * SLOTS);
        let memory = PinnedMemory::new(tier.driver(), plan.bytes())?;
        Ok(Self { tier: tier.clone(), memory, listed, tags })
    }

    /// How many buckets one look sees at most.
    #[must_use]
    pub(crate) fn buckets(&self) -> u64 {
        self.tier.shape().buckets.min((self.listed.len() / SLOTS) as u64)
    }

    /// The entries of some buckets, with their ages at `now`; waits for all changes of the index that were
    /// launched before.
    ///
    /// # Errors
    /// What the driver says.
    pub fn look(&mut self, now: u64, look: Look) -> Result<impl Iterator<Item = &Listed>, DriverError> {
        let (shape, most) = (self.tier.shape(), self.buckets());
        let (from, count, drawn) = match look {
            Look::From(bucket, count) => (bucket, count.min(most), false),
            Look::Drawn(_) if most == shape.buckets => (0, most, false),
            Look::Drawn(draw) => (draw, most, true),
        };
        let args = ListArgs {
            index: self.tier.index(),
            pool: if self.tags { self.tier.pool() } else { 0 },
            listed: self.memory.of(self.listed),
            pool_words: (shape.slabs * shape.slab_bytes / WORD) as u64,
            buckets: shape.buckets,
            from,
            now,
            count: count as u32,
            drawn: drawn.into(),
        };
        let driver = self.tier.driver();
        // SAFETY: `listed` has room for `count` buckets, and this is the tier's one stream; `self` is waited
        // for before anything else is done with it.
        unsafe { kernels::list_entries(&**driver, self.tier.stream(), &args)? };
        driver.wait(&driver.record(self.tier.stream())?)?;
        let listed = &self.memory.get(self.listed)[..count as usize * SLOTS];
        Ok(listed.iter().filter(|entry| entry.key != EMPTY_KEY))
    }
}
