//! Memory of the host that a device can read.

use std::any::Any;
use std::sync::Arc;

/// Memory of the host that a device may have a say in: plain on `host`, pinned on `cuda`.
pub trait HostMemory: Send + Sync {
    /// Takes `bytes` of zeroed memory, aligned to 4 KiB.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the system refuses.
    fn take(&self, bytes: usize) -> Result<Box<dyn HostBlock>, OutOfHostMemory>;
}

/// A block of [`HostMemory`], given back when dropped.
pub trait HostBlock: Send + Sync {
    /// The bytes.
    fn bytes(&self) -> &[u8];
    /// The bytes, to write; none once they were shared.
    fn bytes_mut(&mut self) -> Option<&mut [u8]>;
    /// The memory itself, for the device that it is of to read as long as it has this; none where devices cannot.
    fn shared(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        None
    }
}

/// The system gave no memory.
#[derive(Debug, thiserror::Error)]
#[error("host memory: {bytes} bytes refused")]
pub struct OutOfHostMemory {
    /// What was asked for.
    pub bytes: usize,
}
