//! Memory that frees itself, and its division into typed arrays.

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;

use super::{Address, Driver, DriverError, Pinned};

/// Where an array lies in a block.
#[derive(Debug)]
pub struct Array<T> {
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
    /// How many elements it has.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Whether it has none.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }
}

/// Arrays one after the other, each on a line of its own.
#[derive(Debug, Default)]
pub struct Plan {
    bytes: usize,
}

impl Plan {
    const LINE: usize = 128;

    /// Room for `count` of `T`.
    pub fn array<T: Pod>(&mut self, count: usize) -> Array<T> {
        let at = self.bytes;
        self.bytes = (at + count * size_of::<T>()).next_multiple_of(Self::LINE);
        Array { at, count, kind: PhantomData }
    }

    /// Bytes that were planned.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Memory of the device. Freed when dropped, by when nothing may use it: its owner waits.
pub struct DeviceMemory<D: Driver> {
    driver: Arc<D>,
    at: Address,
    bytes: usize,
}

impl<D: Driver> DeviceMemory<D> {
    /// Takes zeroed memory.
    ///
    /// # Errors
    /// As [`Driver::allocate`].
    pub fn new(driver: &Arc<D>, bytes: usize) -> Result<Self, DriverError> {
        Ok(Self { at: driver.allocate(bytes)?, bytes, driver: driver.clone() })
    }

    /// Where it begins.
    #[must_use]
    pub(crate) fn address(&self) -> u64 {
        self.at.0
    }

    /// Where an array begins.
    #[must_use]
    pub(crate) fn of<T>(&self, array: Array<T>) -> u64 {
        debug_assert!(array.at + array.count * size_of::<T>() <= self.bytes);
        self.at.at(array.at).0
    }

    /// How long it is.
    #[must_use]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies it into other memory of the device, as far as that reaches, and waits.
    ///
    /// # Errors
    /// What the driver says.
    pub fn copy_to(&self, to: &mut Self) -> Result<(), DriverError> {
        let stream = self.driver.stream()?;
        // SAFETY: both are allocated and as long; they are borrowed until the event has fired.
        unsafe { self.driver.copy(&stream, self.at, to.at, self.bytes.min(to.bytes))? };
        self.driver.wait(&self.driver.record(&stream)?)
    }
}

impl<D: Driver> Drop for DeviceMemory<D> {
    fn drop(&mut self) {
        // SAFETY: taken by `new`, given back once; its owner has waited for what used it.
        unsafe { self.driver.free(self.at) };
    }
}

/// Pinned memory of the host. As [`DeviceMemory`]; what kernels write there may be read once an event after
/// them has fired, and what they read may be written then.
pub struct PinnedMemory<D: Driver> {
    driver: Arc<D>,
    memory: Pinned,
}

impl<D: Driver> PinnedMemory<D> {
    /// Takes zeroed memory.
    ///
    /// # Errors
    /// As [`Driver::allocate_pinned`].
    pub fn new(driver: &Arc<D>, bytes: usize) -> Result<Self, DriverError> {
        Ok(Self { memory: driver.allocate_pinned(bytes)?, driver: driver.clone() })
    }

    /// Where kernels see it.
    #[must_use]
    pub(crate) fn address(&self) -> u64 {
        self.memory.device.0
    }

    /// Where kernels see an array.
    #[must_use]
    pub(crate) fn of<T>(&self, array: Array<T>) -> u64 {
        self.memory.device.at(array.at).0
    }

    /// How long it is.
    #[must_use]
    pub(crate) fn bytes(&self) -> usize {
        self.memory.bytes
    }

    /// An array, to read.
    ///
    /// # Panics
    /// Where it was planned for a longer block.
    #[must_use]
    pub(crate) fn get<T: Pod>(&self, array: Array<T>) -> &[T] {
        self.check(array);
        // SAFETY: in bounds and aligned by `check`; the memory was zeroed and any bits are a `T`. Whoever
        // reads has waited for the kernels that write here.
        unsafe { std::slice::from_raw_parts(self.memory.host.as_ptr().add(array.at).cast(), array.count) }
    }

    /// An array, to write.
    ///
    /// # Panics
    /// As [`Self::get`].
    #[must_use]
    pub fn get_mut<T: Pod>(&mut self, array: Array<T>) -> &mut [T] {
        self.check(array);
        // SAFETY: as in `get`; `self` is borrowed mutably, and whoever writes has waited for the kernels
        // that use it.
        unsafe { std::slice::from_raw_parts_mut(self.memory.host.as_ptr().add(array.at).cast(), array.count) }
    }

    fn check<T>(&self, array: Array<T>) {
        assert!(array.at + array.count * size_of::<T>() <= self.memory.bytes, "an array of this block");
        assert!(align_of::<T>() <= Plan::LINE && array.at.is_multiple_of(Plan::LINE));
    }
}

impl<D: Driver> Drop for PinnedMemory<D> {
    fn drop(&mut self) {
        // SAFETY: taken by `new`, given back once; its owner has waited for what used it.
        unsafe { self.driver.free_pinned(self.memory) };
    }
}

/// Rows on their way to the device: pinned memory that the host writes and kernels of several streams read.
pub struct Staging<D: Driver> {
    memory: PinnedMemory<D>,
    words: Array<u32>,
    /// Events after the kernels that read it.
    readers: Vec<Arc<D::Event>>,
}

impl<D: Driver> Staging<D> {
    /// Takes room for so many words of 4 bytes.
    ///
    /// # Errors
    /// As [`Driver::allocate_pinned`].
    pub fn new(driver: &Arc<D>, words: usize) -> Result<Self, DriverError> {
        let mut plan = Plan::default();
        let words = plan.array(words);
        Ok(Self { memory: PinnedMemory::new(driver, plan.bytes())?, words, readers: Vec::new() })
    }

    /// How many words it has.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.words.len()
    }

    /// Whether it has none.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// The words, to write, once all who read the last ones are done.
    ///
    /// # Errors
    /// As [`Driver::wait`].
    pub fn words_mut(&mut self) -> Result<&mut [u32], DriverError> {
        for reader in self.readers.drain(..) {
            self.memory.driver.wait(&reader)?;
        }
        Ok(self.memory.get_mut(self.words))
    }

    /// Where kernels see a word.
    ///
    /// # Panics
    /// Where the row that begins there ends past the end.
    #[must_use]
    pub(crate) fn row(&self, word: usize, words: usize) -> u64 {
        assert!(word + words <= self.words.len(), "a row within the staging memory");
        self.memory.address() + (word * size_of::<u32>()) as u64
    }

    /// Leaves the words as they are until the event has fired.
    pub(crate) fn hold(&mut self, reader: Arc<D::Event>) {
        self.readers.push(reader);
    }

    /// How many events the next write waits for.
    #[cfg(all(test, feature = "cusim"))]
    pub(crate) fn reader_count(&self) -> usize {
        self.readers.len()
    }
}

impl<D: Driver> Drop for Staging<D> {
    fn drop(&mut self) {
        for reader in &self.readers {
            if let Err(error) = self.memory.driver.wait(reader) {
                tracing::error!(%error, "waiting for the readers of staged rows");
            }
        }
    }
}
