//! Pinned memory for tables in RAM: the host reads rows as usual, and kernels read them in place.

use std::any::Any;
use std::sync::Arc;

use super::Driver;
use super::memory::{Array, MemoryPlan, PinnedMemory};
use crate::mem::{HostBlock, HostMemory, OutOfHostMemory};

/// Allocates host memory that the device can read.
pub(crate) struct PinnedHost<D: Driver>(pub Arc<D>);

struct PinnedBlock<D: Driver> {
    memory: Arc<PinnedMemory<D>>,
    bytes: Array<u8>,
}

impl<D: Driver> HostMemory for PinnedHost<D> {
    fn take(&self, bytes: usize) -> Result<Box<dyn HostBlock>, OutOfHostMemory> {
        let mut plan = MemoryPlan::default();
        let array = plan.array(bytes);
        let memory = PinnedMemory::new(&self.0, plan.bytes()).map_err(|error| {
            tracing::warn!(%error, "pinned memory for rows could not be allocated");
            OutOfHostMemory { bytes }
        })?;
        Ok(Box::new(PinnedBlock { memory: Arc::new(memory), bytes: array }))
    }
}

impl<D: Driver> HostBlock for PinnedBlock<D> {
    fn bytes(&self) -> &[u8] {
        self.memory.get(self.bytes)
    }

    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        Arc::get_mut(&mut self.memory).map(|memory| memory.get_mut(self.bytes))
    }

    fn shared(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        Some(self.memory.clone())
    }
}
