//! The bytes of a working file: several files that act as one.
//!
//! A file system lets one thread at a time write to a file, and blocks the others even while that one waits
//! for a page from the disk. So the bytes are distributed over several unlinked files, a megabyte to each in
//! turn, and threads that write to different places rarely block each other.
//!
//! The same bytes are accessed in two ways: by system calls for long runs and for first writes, and by a
//! [`Mapping`] for rows.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{Advice, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use super::StoreError;
use super::mapping::Mapping;

/// Number of files.
const STRIPES: u64 = 16;
/// Bytes that are consecutive in one file. The next block is in the next file.
const BLOCK_BYTES: u64 = 1 << 20;

/// Unlinked files that are read and written at offsets.
#[derive(Debug)]
pub(crate) struct Stripes(Vec<Stripe>);

/// One of the files.
#[derive(Debug)]
struct Stripe {
    file: File,
    mapping: Mapping,
}

/// A part of a range of bytes that is in one file.
struct StripePart<'a> {
    stripe: &'a Stripe,
    /// Offset in the file.
    at: u64,
    bytes: usize,
}

impl Stripes {
    /// Creates the files in `dir`, for `bytes` bytes in total. They are sparse and take no disk space.
    pub(crate) fn create(dir: &Path, bytes: u64) -> Result<Self, StoreError> {
        let length = bytes.div_ceil(BLOCK_BYTES * STRIPES) * BLOCK_BYTES;
        let stripe = |_| {
            let file = unnamed(dir)?;
            file.set_len(length).map_err(|e| StoreError::at(dir, e))?;
            // Random rows must not trigger read-ahead, and neither may a scan of a whole table: read-ahead
            // makes large folios (see `region::WRITE_BYTES`), after which writing a row took 50 us. This is
            // only advice, so errors are ignored.
            let _ = fadvise(&file, 0, None, Advice::Random);
            let mapping = Mapping::of(&file).map_err(|e| StoreError::at(dir, e))?;
            Ok(Stripe { file, mapping })
        };
        (0..STRIPES).map(stripe).collect::<Result<_, _>>().map(Self)
    }

    /// Reads `bytes` from `offset`.
    pub(crate) fn read(&self, mut bytes: &mut [u8], offset: u64) -> io::Result<()> {
        for StripePart { stripe, at, bytes: len } in self.parts(offset..offset + bytes.len() as u64) {
            let part = bytes.split_off_mut(..len).unwrap_or_default();
            stripe.file.read_exact_at(part, at)?;
        }
        Ok(())
    }

    /// Writes `bytes` at `offset`.
    pub(crate) fn write(&self, mut bytes: &[u8], offset: u64) -> io::Result<()> {
        for StripePart { stripe, at, bytes: len } in self.parts(offset..offset + bytes.len() as u64) {
            let part = bytes.split_off(..len).unwrap_or_default();
            stripe.file.write_all_at(part, at)?;
        }
        Ok(())
    }

    /// Copies the words from byte `offset` on, a multiple of 4, into `words`. Those bytes must have been
    /// written before.
    pub(crate) fn load(&self, mut words: &mut [f32], offset: u64) {
        for StripePart { stripe, at, bytes } in self.parts(offset..offset + size_of_val(words) as u64) {
            stripe.mapping.load(words.split_off_mut(..bytes / size_of::<f32>()).unwrap_or_default(), at);
        }
    }

    /// Overwrites the words from byte `offset` on, a multiple of 4. Those bytes must have been written
    /// before.
    pub(crate) fn store(&self, mut words: &[f32], offset: u64) {
        for StripePart { stripe, at, bytes } in self.parts(offset..offset + size_of_val(words) as u64) {
            stripe.mapping.store(words.split_off(..bytes / size_of::<f32>()).unwrap_or_default(), at);
        }
    }

    /// Whether the page of this byte is in memory; true if the file system cannot tell.
    pub(crate) fn in_memory(&self, offset: u64) -> bool {
        let (stripe, at) = self.place(offset);
        let read = preadv2(&stripe.file, &mut [IoSliceMut::new(&mut [0])], at, ReadWriteFlags::NOWAIT);
        read != Err(Errno::AGAIN)
    }

    /// Starts reading bytes from the disk and does not wait.
    pub(crate) fn request(&self, offset: u64, bytes: usize) {
        for StripePart { stripe, at, bytes } in self.parts(offset..offset + bytes as u64) {
            stripe.mapping.request(at, bytes);
        }
    }

    /// Prefetches bytes into the processor's cache.
    #[inline]
    pub(crate) fn prefetch(&self, offset: u64, bytes: usize) {
        for StripePart { stripe, at, bytes } in self.parts(offset..offset + bytes as u64) {
            stripe.mapping.prefetch(at, bytes);
        }
    }

    /// The word at byte `offset`, a multiple of 4, which was written before.
    #[inline]
    pub(crate) fn word(&self, offset: u64) -> u32 {
        let (stripe, at) = self.place(offset);
        stripe.mapping.word(at)
    }

    /// Overwrites the word at byte `offset`, a multiple of 4, which was written before.
    #[inline]
    pub(crate) fn set_word(&self, offset: u64, word: u32) {
        let (stripe, at) = self.place(offset);
        stripe.mapping.set_word(at, word);
    }

    /// The file of a byte, and its offset there.
    #[inline]
    fn place(&self, offset: u64) -> (&Stripe, u64) {
        let (block, within) = (offset / BLOCK_BYTES, offset % BLOCK_BYTES);
        (&self.0[(block % STRIPES) as usize], block / STRIPES * BLOCK_BYTES + within)
    }

    /// Splits a range at the ends of blocks.
    #[inline]
    fn parts(&self, mut range: Range<u64>) -> impl Iterator<Item = StripePart<'_>> {
        std::iter::from_fn(move || {
            if range.is_empty() {
                return None;
            }
            let (stripe, at) = self.place(range.start);
            let bytes = (BLOCK_BYTES - range.start % BLOCK_BYTES).min(range.end - range.start);
            range.start += bytes;
            Some(StripePart { stripe, at, bytes: bytes as usize })
        })
    }

    #[cfg(test)]
    pub(crate) fn files(&self) -> impl Iterator<Item = &File> {
        self.0.iter().map(|stripe| &stripe.file)
    }
}

/// Creates a file in `dir` and removes its name.
fn unnamed(dir: &Path) -> Result<File, StoreError> {
    if !dir.try_exists().map_err(|e| StoreError::at(dir, e))? {
        return Err(StoreError::MissingDirectory { path: dir.to_owned() });
    }
    let mut attempt = 0_u64;
    loop {
        let path = dir.join(format!(".working.{}.{attempt}.tmp", std::process::id()));
        match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
            // The file belongs to another process, or to one that was killed before it removed the name.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => attempt += 1,
            Err(e) => return Err(StoreError::at(&path, e)),
            Ok(file) => {
                fs::remove_file(&path).map_err(|e| StoreError::at(&path, e))?;
                return Ok(file);
            }
        }
    }
}

#[cfg(test)]
mod tests;
