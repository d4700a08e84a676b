//! Zeroed memory in huge pages, if the system has them, for tables that are read at random.
//!
//! With small pages a random read often misses the TLB and then the cache: a table of 30 MB has more small
//! pages than a TLB has entries.

use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::Pod;
use memmap2::MmapMut;

use super::OutOfHostMemory;
use super::pages::{Mapped, Pages};

/// Maps `bytes` of zeroed memory.
///
/// # Errors
/// The system's error when the mapping fails.
pub(crate) fn huge_pages<M: Mapped + From<MmapMut>>(bytes: usize) -> io::Result<Pages<M>> {
    let memory = MmapMut::map_anon(bytes)?;
    // Only advice: without huge pages everything is slower, but correct.
    #[cfg(target_os = "linux")]
    if let Err(error) = memory.advise(memmap2::Advice::HugePage) {
        tracing::debug!(%error, bytes, "no huge pages");
    }
    Ok(M::from(memory).into())
}

/// An array of fixed length in huge pages, zeroed at first.
#[derive(Debug)]
pub(crate) struct Huge<T> {
    memory: Pages<MmapMut>,
    count: usize,
    of: PhantomData<T>,
}

impl<T: Pod> Huge<T> {
    /// `count` zeros.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the allocation fails.
    pub(crate) fn zeroed(count: usize) -> Result<Self, OutOfHostMemory> {
        let bytes = count.checked_mul(size_of::<T>()).ok_or(OutOfHostMemory { bytes: usize::MAX })?;
        let memory = huge_pages(bytes).map_err(|_| OutOfHostMemory { bytes })?;
        Ok(Self { memory, count, of: PhantomData })
    }

    /// As [`Pages::prefault`].
    pub(crate) fn prefault(&self) {
        self.memory.prefault();
    }
}

impl<T: Pod> Deref for Huge<T> {
    type Target = [T];
    #[inline(always)]
    fn deref(&self) -> &[T] {
        // The cast cannot fail: a mapping begins on a page and holds `count` values.
        &bytemuck::cast_slice(&self.memory[..self.count * size_of::<T>()])[..self.count]
    }
}

impl<T: Pod> DerefMut for Huge<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        &mut bytemuck::cast_slice_mut(&mut self.memory[..self.count * size_of::<T>()])[..self.count]
    }
}

#[cfg(test)]
mod tests;
