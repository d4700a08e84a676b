//! Zeroed memory in huge pages, where the system has them, for what is looked into here and there.
//!
//! What a lookup waits for is memory, and with small pages it first waits for where a page is: a table of 30 MB has
//! more of them than a processor keeps track of.

use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::Pod;
use memmap2::MmapMut;

use super::OutOfHostMemory;

/// So many bytes of memory, zeroed.
///
/// # Errors
/// The system's, where it refuses the memory.
pub(crate) fn huge_pages(bytes: usize) -> io::Result<MmapMut> {
    let memory = MmapMut::map_anon(bytes)?;
    // Advice only: a system without huge pages is slower and no less right.
    #[cfg(target_os = "linux")]
    if let Err(error) = memory.advise(memmap2::Advice::HugePage) {
        tracing::debug!(%error, bytes, "no huge pages");
    }
    Ok(memory)
}

/// So many values, zeroed at first, and no more.
#[derive(Debug)]
pub(crate) struct Huge<T> {
    memory: MmapMut,
    count: usize,
    of: PhantomData<T>,
}

impl<T: Pod> Huge<T> {
    /// `count` zeros.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the memory is not to be had.
    pub(crate) fn zeroed(count: usize) -> Result<Self, OutOfHostMemory> {
        let bytes = count.checked_mul(size_of::<T>()).ok_or(OutOfHostMemory { bytes: usize::MAX })?;
        let memory = huge_pages(bytes).map_err(|_| OutOfHostMemory { bytes })?;
        Ok(Self { memory, count, of: PhantomData })
    }
}

impl<T: Pod> Deref for Huge<T> {
    type Target = [T];
    #[inline(always)]
    fn deref(&self) -> &[T] {
        // A mapping begins on a page, and is as long as `count` values.
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
