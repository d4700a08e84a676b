//! The bytes of a table: in memory of the process, or in a file of a version, which is mapped or was read
//! into memory.
//!
//! Owned memory comes from a [`HostMemory`]. The default is [`PlainMemory`]. It requests huge pages, which
//! double the rate of random row reads. So does a file that is read into memory.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use memmap2::{Advice, Mmap, MmapMut};
use rayon::prelude::*;

use crate::mem::{HostBlock, HostMemory, OutOfHostMemory, Pages, huge_pages};
use crate::pace;

// Files hold little-endian numbers, and mapped numbers are read in place.
#[cfg(target_endian = "big")]
compile_error!("the store maps little-endian files: big-endian machines are not supported");

/// Bytes that one thread copies at a time.
const CHUNK_BYTES: usize = 1 << 18;

/// Bytes in owned memory or in a file of a version.
pub(crate) struct Bytes(Storage);

enum Storage {
    Owned { block: Box<dyn HostBlock>, bytes: usize },
    File { file: FileBytes, bytes: Range<usize> },
}

impl Bytes {
    /// Zeroed memory.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the allocation fails, or is shorter than requested or not aligned for f32.
    pub(crate) fn zeroed(memory: &dyn HostMemory, bytes: usize) -> Result<Self, OutOfHostMemory> {
        let block = memory.take(bytes)?;
        let usable =
            block.bytes().get(..bytes).is_some_and(|b| b.as_ptr().cast::<f32>().is_aligned() || b.is_empty());
        if !usable {
            return Err(OutOfHostMemory { bytes });
        }
        Ok(Self(Storage::Owned { block, bytes }))
    }

    /// A range of a file; `None` when the range is past the end of the file.
    #[must_use]
    pub(crate) fn of_file(file: &FileBytes, bytes: Range<usize>) -> Option<Self> {
        file.bytes().get(bytes.clone())?;
        Some(Self(Storage::File { file: file.clone(), bytes }))
    }

    /// The f32 values at these bytes of a file; `None` when the range is past the end of the file, is not a
    /// whole number of values, or is not aligned.
    #[must_use]
    pub(crate) fn floats_of_file(file: &FileBytes, bytes: Range<usize>) -> Option<Self> {
        let bytes = Self::of_file(file, bytes)?;
        bytemuck::try_cast_slice::<u8, f32>(bytes.as_slice()).ok()?;
        Some(bytes)
    }

    /// The values of bytes that are f32, as [`Self::zeroed`] and [`Self::floats_of_file`] ensure.
    #[must_use]
    pub(crate) fn floats(&self) -> &[f32] {
        bytemuck::cast_slice(self.as_slice())
    }

    /// As [`Self::floats`]; `None` as for [`Self::as_mut_slice`].
    pub(crate) fn floats_mut(&mut self) -> Option<&mut [f32]> {
        self.as_mut_slice().map(bytemuck::cast_slice_mut)
    }

    #[must_use]
    pub(crate) fn as_slice(&self) -> &[u8] {
        match &self.0 {
            Storage::Owned { block, bytes } => &block.bytes()[..*bytes],
            Storage::File { file, bytes } => &file.bytes()[bytes.clone()],
        }
    }

    /// `None` for a file, and after [`Self::shared`].
    pub(crate) fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        match &mut self.0 {
            Storage::Owned { block, bytes } => block.bytes_mut().map(|block| &mut block[..*bytes]),
            Storage::File { .. } => None,
        }
    }

    /// Whether the bytes are owned memory, and not a file.
    #[must_use]
    pub(crate) fn is_owned(&self) -> bool {
        matches!(self.0, Storage::Owned { .. })
    }

    /// The mapped file; `None` if the bytes are in memory.
    fn mapped(&self) -> Option<(&Mmap, &Range<usize>)> {
        match &self.0 {
            Storage::File { file: FileBytes::Mapped(map), bytes } => Some((&**map, bytes)),
            Storage::File { file: FileBytes::Ram(_), .. } | Storage::Owned { .. } => None,
        }
    }

    /// Whether the bytes are in a mapped file, so that reading them may wait for the disk.
    #[must_use]
    pub(crate) fn is_mapped(&self) -> bool {
        self.mapped().is_some()
    }

    /// A handle that keeps the memory alive while a device reads it; `None` if devices cannot read it. The
    /// bytes are read-only afterwards.
    #[must_use]
    pub(crate) fn shared(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        match &self.0 {
            Storage::Owned { block, .. } => block.shared(),
            Storage::File { .. } => None,
        }
    }

    /// Starts reading a range of a mapped file from disk and does not wait.
    pub(crate) fn fetch(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Some((map, bytes)) = self.mapped() {
            // Fails when the system is short of memory. The range is then read on first use.
            let _ = map.advise_range(Advice::WillNeed, bytes.start + range.start, range.len());
        }
    }

    /// Advises the system not to read ahead in a mapped file.
    pub(crate) fn expect_random_reads(&self) {
        #[cfg(unix)]
        if let Some((map, _)) = self.mapped()
            && let Err(error) = map.advise(Advice::Random)
        {
            tracing::debug!(%error, "madvise failed for a mapped table");
        }
    }

    pub(crate) fn copied(&self, memory: &dyn HostMemory) -> Result<Self, OutOfHostMemory> {
        let mut copy = Self::zeroed(memory, self.as_slice().len())?;
        if let Some(to) = copy.as_mut_slice() {
            let from = self.as_slice().par_chunks(CHUNK_BYTES);
            to.par_chunks_mut(CHUNK_BYTES).zip(from).for_each(|(to, from)| to.copy_from_slice(from));
        }
        Ok(copy)
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match self.0 {
            Storage::Owned { .. } => "owned",
            Storage::File { file: FileBytes::Ram(_), .. } => "in RAM",
            Storage::File { file: FileBytes::Mapped(_), .. } => "mapped",
        };
        write!(f, "Bytes({} {place})", self.as_slice().len())
    }
}

/// A whole file: mapped, or read into memory. Clones share the bytes.
#[derive(Clone, Debug)]
pub(crate) enum FileBytes {
    Mapped(Arc<Pages<Mmap>>),
    Ram(Arc<Pages<MmapMut>>),
}

impl FileBytes {
    /// Maps an open file of a published version.
    ///
    /// # Errors
    /// Errors of the system call.
    pub(crate) fn map(file: &File) -> io::Result<Self> {
        // SAFETY: a mapping is sound while its file does not change. The files of a published version never
        // change: our writer creates each one without write permission under a temporary name, and opens no
        // existing file. A version is replaced by a new directory, and the pages of a removed file live as
        // long as the mapping. If another program truncates a file in place, the next access ends the process
        // with SIGBUS (`cli/cut_file.rs` says which file it was); if it writes into one, values change after
        // they were checked. Both violate the rule that versions are immutable (docs/files-in-use.md).
        let map = unsafe { Mmap::map(file)? };
        Ok(Self::Mapped(Arc::new(map.into())))
    }

    /// Reads a file of this length into huge pages. `read` gets a piece of the memory to fill with the next
    /// bytes of the file, until the memory is full.
    ///
    /// # Errors
    /// Those of `read`, and [`OutOfHostMemory`] when the allocation fails.
    pub(crate) fn read<E: From<OutOfHostMemory>>(
        bytes: usize,
        mut read: impl FnMut(&mut [u8]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut memory: Pages<MmapMut> = huge_pages(bytes).map_err(|_| OutOfHostMemory { bytes })?;
        memory.chunks_mut(CHUNK_BYTES).try_for_each(|piece| {
            pace::rest();
            read(piece)
        })?;
        Ok(Self::Ram(Arc::new(memory)))
    }

    #[must_use]
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Ram(memory) => memory,
        }
    }
}

/// Opens a regular file for reading.
///
/// # Errors
/// Errors of opening the file; `InvalidInput` when it is not a regular file.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    // Checked before opening, because opening a pipe would wait for its writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    File::open(path)
}

/// Memory from the system, in huge pages where available.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlainMemory;

struct PlainBlock(Pages<MmapMut>);

impl HostMemory for PlainMemory {
    fn take(&self, bytes: usize) -> Result<Box<dyn HostBlock>, OutOfHostMemory> {
        let map = huge_pages(bytes).map_err(|_| OutOfHostMemory { bytes })?;
        Ok(Box::new(PlainBlock(map)))
    }
}

impl HostBlock for PlainBlock {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        Some(&mut self.0)
    }
}
