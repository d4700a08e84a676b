//! Device and pinned memory as owned values, and their division into typed arrays.
//!
//! A [`MemoryPlan`] assigns each array an offset in a block. The [`Array`] with that offset is valid in every
//! block that was allocated with the plan's size, on the device and pinned alike.

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;

use super::{Address, Driver, DriverError, Pinned};

/// The position of an array in a block.
#[derive(Debug)]
pub(crate) struct Array<T> {
    at: usize,
    count: usize,
    kind: PhantomData<T>,
}

impl<T> Clone for Array<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Array<T> {}

impl<T> Array<T> {
    /// Number of elements.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Bytes from the beginning of the block to the end of the first `count` elements.
    #[must_use]
    pub(crate) fn bytes_to(&self, count: usize) -> usize {
        self.at + count * size_of::<T>()
    }
}

/// The layout of a block: arrays one after the other, each aligned to a cache line.
#[derive(Debug, Default)]
pub(crate) struct MemoryPlan {
    bytes: usize,
}

impl MemoryPlan {
    const LINE: usize = 128;

    /// Appends an array of `count` elements.
    pub(crate) fn array<T: Pod>(&mut self, count: usize) -> Array<T> {
        let at = self.bytes;
        self.bytes = (at + count * size_of::<T>()).next_multiple_of(Self::LINE);
        Array { at, count, kind: PhantomData }
    }

    /// Size of the block so far.
    #[must_use]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Device memory, freed when dropped. Whoever enqueues operations that use it waits for them before that.
pub struct DeviceMemory<D: Driver> {
    driver: Arc<D>,
    at: Address,
    bytes: usize,
}

impl<D: Driver> DeviceMemory<D> {
    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// As [`Driver::allocate`].
    pub fn new(driver: &Arc<D>, bytes: usize) -> Result<Self, DriverError> {
        Ok(Self { at: driver.allocate(bytes)?, bytes, driver: driver.clone() })
    }

    /// Address of the first byte.
    #[must_use]
    pub(crate) fn address(&self) -> u64 {
        self.at.0
    }

    /// Address of an array.
    #[must_use]
    pub(crate) fn of<T>(&self, array: Array<T>) -> u64 {
        debug_assert!(array.at + array.count * size_of::<T>() <= self.bytes);
        self.at.at(array.at).0
    }

    /// Length in bytes.
    #[must_use]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies the block to another one, up to the shorter of the two lengths. Waits for the copy. For
    /// the benchmark of the cache's kernels, which compares their speed with it.
    ///
    /// # Errors
    /// The driver's error.
    pub fn copy_to(&self, to: &mut Self) -> Result<(), DriverError> {
        let stream = self.driver.stream()?;
        // SAFETY: both are allocated with at least this length, and borrowed until `finish` returns. If it
        // fails, the driver has ended: it keeps both allocated and executes nothing else.
        unsafe { self.driver.copy(&stream, self.at, to.at, self.bytes.min(to.bytes))? };
        self.driver.finish(&stream)
    }
}

impl<D: Driver> Drop for DeviceMemory<D> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` and freed once. Whoever enqueued an operation that uses the memory has
        // promised that it stays allocated until the operation has ended (`Driver::copy`, `Driver::launch`),
        // and so has waited before this. After a failed wait, the driver keeps the memory.
        unsafe { self.driver.free(self.at) };
    }
}

/// Pinned host memory, freed when dropped, like [`DeviceMemory`]. [`Self::get`] and [`Self::get_mut`] are
/// safe, because whoever enqueues an operation has promised that nothing races with it ([`Driver::launch`]).
/// So code that enqueues one also ensures that, until it has ended, the host does not read an array that it
/// writes, nor write an array that it uses.
pub(crate) struct PinnedMemory<D: Driver> {
    driver: Arc<D>,
    memory: Pinned,
}

impl<D: Driver> PinnedMemory<D> {
    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// As [`Driver::allocate_pinned`].
    pub(crate) fn new(driver: &Arc<D>, bytes: usize) -> Result<Self, DriverError> {
        Ok(Self { memory: driver.allocate_pinned(bytes)?, driver: driver.clone() })
    }

    /// Address of the first byte, for kernels.
    #[must_use]
    pub(crate) fn address(&self) -> u64 {
        self.memory.device.0
    }

    /// Address of an array, for kernels.
    #[must_use]
    pub(crate) fn of<T>(&self, array: Array<T>) -> u64 {
        self.memory.device.at(array.at).0
    }

    /// Length in bytes.
    #[must_use]
    pub(crate) fn bytes(&self) -> usize {
        self.memory.bytes
    }

    /// The elements of an array.
    ///
    /// # Panics
    /// When the array does not lie within this block.
    #[must_use]
    pub(crate) fn get<T: Pod>(&self, array: Array<T>) -> &[T] {
        self.check(array);
        // SAFETY: `check` has shown that the array is in bounds and aligned. The memory was zeroed, and any
        // bits are a valid `T`. The host writes only through `get_mut`, which borrows `self` mutably. No
        // operation writes here now: whoever enqueued it has promised that no access of the host races with
        // it (`Driver::copy`, `Driver::launch`).
        unsafe { std::slice::from_raw_parts(self.memory.host.as_ptr().add(array.at).cast(), array.count) }
    }

    /// The elements of an array, mutable.
    ///
    /// # Panics
    /// As [`Self::get`].
    #[must_use]
    pub(crate) fn get_mut<T: Pod>(&mut self, array: Array<T>) -> &mut [T] {
        self.check(array);
        // SAFETY: as in `get`. `self` is borrowed mutably, so there is no other reference, and by the same
        // promise no operation uses the array now.
        unsafe { std::slice::from_raw_parts_mut(self.memory.host.as_ptr().add(array.at).cast(), array.count) }
    }

    fn check<T>(&self, array: Array<T>) {
        assert!(array.at + array.count * size_of::<T>() <= self.memory.bytes, "an array of this block");
        assert!(align_of::<T>() <= MemoryPlan::LINE && array.at.is_multiple_of(MemoryPlan::LINE));
    }
}

impl<D: Driver> Drop for PinnedMemory<D> {
    fn drop(&mut self) {
        // SAFETY: as for `DeviceMemory`. References of the host borrow `self`, so none is left.
        unsafe { self.driver.free_pinned(self.memory) };
    }
}

/// A block of pinned memory and one of device memory, with the same layout. The host writes the first one,
/// and a copy moves what it has written to the second one. Kernels that read data several times, or wait for
/// it before they can read other data, read it there: a read of pinned memory takes microseconds.
pub(crate) struct Mirrored<D: Driver> {
    pub host: PinnedMemory<D>,
    pub device: DeviceMemory<D>,
}

impl<D: Driver> Mirrored<D> {
    /// Allocates both blocks, zeroed.
    ///
    /// # Errors
    /// As [`Driver::allocate`] and [`Driver::allocate_pinned`].
    pub(crate) fn new(driver: &Arc<D>, bytes: usize) -> Result<Self, DriverError> {
        Ok(Self { host: PinnedMemory::new(driver, bytes)?, device: DeviceMemory::new(driver, bytes)? })
    }

    /// Copies the first `bytes` bytes to the device. Does not wait.
    ///
    /// # Errors
    /// As [`Driver::copy`].
    ///
    /// # Panics
    /// When the blocks are shorter.
    ///
    /// # Safety
    /// Until the copy has ended, the blocks stay allocated, the host does not write these bytes, and only
    /// operations behind the copy on this stream use them on the device.
    pub(crate) unsafe fn upload(&self, stream: &D::Stream, bytes: usize) -> Result<(), DriverError> {
        assert!(bytes <= self.host.bytes().min(self.device.bytes()), "a part of the blocks");
        // SAFETY: both are at least this long. The caller guarantees the rest.
        unsafe { self.host.driver.copy(stream, self.host.memory.device, self.device.at, bytes) }
    }
}

/// An event behind operations. If it could not be recorded, the error, which has ended the driver.
pub(crate) type Recorded<D> = Result<Arc<<D as Driver>::Event>, DriverError>;

/// A staging buffer: pinned memory. The host writes rows to it, and kernels of several streams read them.
pub(crate) struct Staging<D: Driver> {
    memory: PinnedMemory<D>,
    words: Array<u32>,
    /// Behind the kernels that read the current contents.
    readers: Vec<Recorded<D>>,
}

impl<D: Driver> Staging<D> {
    /// Allocates a buffer of `words` words of 4 bytes.
    ///
    /// # Errors
    /// As [`Driver::allocate_pinned`].
    pub(crate) fn new(driver: &Arc<D>, words: usize) -> Result<Self, DriverError> {
        let mut plan = MemoryPlan::default();
        let words = plan.array(words);
        Ok(Self { memory: PinnedMemory::new(driver, plan.bytes())?, words, readers: Vec::new() })
    }

    /// Length in words.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.words.len()
    }

    /// Waits until the kernels that read the current contents have finished. Returns the words for writing.
    ///
    /// # Errors
    /// As [`Driver::wait`]. Then the buffer is never written again.
    pub(crate) fn words_mut(&mut self) -> Result<&mut [u32], DriverError> {
        self.settle()?;
        Ok(self.memory.get_mut(self.words))
    }

    /// Waits for the readers. If that fails, they stay, so that later calls fail too.
    fn settle(&mut self) -> Result<(), DriverError> {
        for reader in &self.readers {
            self.memory.driver.wait(reader.as_ref().map_err(Clone::clone)?)?;
        }
        self.readers.clear();
        Ok(())
    }

    /// Address, for kernels, of the row of `words` words that begins at index `word`.
    ///
    /// # Panics
    /// When the row does not lie within the buffer.
    #[must_use]
    pub(crate) fn row(&self, word: usize, words: usize) -> u64 {
        assert!(word + words <= self.words.len(), "a row within the staging memory");
        self.memory.address() + (word * size_of::<u32>()) as u64
    }

    /// Declares a reader: [`Self::words_mut`] waits for this event.
    pub(crate) fn hold(&mut self, reader: Recorded<D>) {
        self.readers.push(reader);
    }

    /// Number of events that the next [`Self::words_mut`] waits for.
    #[cfg(all(test, feature = "cusim"))]
    pub(crate) fn reader_count(&self) -> usize {
        self.readers.len()
    }
}

impl<D: Driver> Drop for Staging<D> {
    fn drop(&mut self) {
        if let Err(error) = self.settle() {
            tracing::error!(%error, "waiting for the readers of a staging buffer failed");
        }
    }
}
