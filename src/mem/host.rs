//! Host memory that a device can read.

use std::any::Any;
use std::sync::Arc;

/// Allocates host memory: plain memory for the device `host`, pinned memory for `cuda`.
pub trait HostMemory: Send + Sync {
    /// Allocates `bytes` of zeroed memory, aligned to 4 KiB.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the allocation fails.
    fn take(&self, bytes: usize) -> Result<Box<dyn HostBlock>, OutOfHostMemory>;
}

/// A block of [`HostMemory`], freed when dropped. Until then its bytes stay where they are.
pub trait HostBlock: Send + Sync {
    fn bytes(&self) -> &[u8];
    /// The bytes, for writing. `None` while a handle of [`Self::shared`] exists.
    fn bytes_mut(&mut self) -> Option<&mut [u8]>;
    /// A handle that keeps the memory alive while a device reads it. `None` if devices cannot read it.
    fn shared(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        None
    }
}

/// An allocation of host memory failed.
#[derive(Debug, thiserror::Error)]
#[error("host memory: {bytes} bytes refused")]
pub struct OutOfHostMemory {
    /// Size of the allocation.
    pub bytes: usize,
}
