//! A mapped file, which several threads read and write as 32-bit words at once.
//!
//! The rows that training moves are a few hundred bytes each, and a system call per row costs ten times as
//! much as copying it. With a mapping, moving a row that is in memory is a copy.
//!
//! Only bytes that were written by a system call before may be accessed. That call reserved their disk space,
//! and it returned the error if the disk was full. Accessing a page that is not in memory reads it. If that
//! read fails, the kernel ends the process with `SIGBUS`.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use memmap2::{Advice, MmapRaw};

use crate::mem::Pages;
use crate::mem::prefetch::prefetch_first;

#[derive(Debug)]
pub(crate) struct Mapping(Pages<MmapRaw>);

impl Mapping {
    /// Maps the whole file, which must not be truncated while the mapping exists.
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let map = MmapRaw::map_raw(file)?;
        // `Stripes::create` explains why. This is only advice, so errors are ignored.
        let _ = map.advise(Advice::Random);
        Ok(Self(map.into()))
    }

    /// Copies the words from byte `at` on into `words`. If another thread writes a word during the copy, the
    /// old or the new word is copied.
    #[inline]
    pub(crate) fn load(&self, words: &mut [f32], at: u64) {
        for (word, from) in words.iter_mut().zip(self.words(at)) {
            *word = f32::from_bits(from.load(Ordering::Relaxed));
        }
    }

    /// Prefetches these bytes into the processor's cache; has no effect on pages that are on disk.
    #[inline]
    pub(crate) fn prefetch(&self, at: u64, bytes: usize) {
        let words = self.words(at);
        prefetch_first(words, words.len().min(bytes.div_ceil(size_of::<AtomicU32>())));
    }

    /// Copies `words` to the file, from byte `at` on.
    #[inline]
    pub(crate) fn store(&self, words: &[f32], at: u64) {
        for (word, to) in words.iter().zip(self.words(at)) {
            to.store(word.to_bits(), Ordering::Relaxed);
        }
    }

    /// Advises the system to read the pages of these bytes from disk now.
    pub(crate) fn request(&self, at: u64, bytes: usize) {
        let _ = self.0.advise_range(Advice::WillNeed, at as usize, bytes);
    }

    /// The word at byte `at`, with acquire ordering.
    #[inline]
    pub(crate) fn word(&self, at: u64) -> u32 {
        self.words(at).first().map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Writes the word at byte `at`, with release ordering.
    #[inline]
    pub(crate) fn set_word(&self, at: u64, word: u32) {
        if let Some(to) = self.words(at).first() {
            to.store(word, Ordering::Release);
        }
    }

    /// The words from byte `at` on; none past the end. `at` must be a multiple of 4.
    #[inline]
    fn words(&self, at: u64) -> &[AtomicU32] {
        let words = self.0.len() / size_of::<AtomicU32>();
        // SAFETY: a mapping begins on a page, so it is aligned for words, and `words` of them are within its
        // length. It lives as long as `self`. `Stripes::create`, which maps all files, has removed the file's
        // name, and `Stripes` never truncates it, so the mapping stays readable and writable. This process
        // accesses it only through these atomics. The operating system also writes to it, when the file is
        // written. Every bit pattern is a valid word.
        let all = unsafe { std::slice::from_raw_parts(self.0.as_mut_ptr().cast::<AtomicU32>(), words) };
        all.get(at as usize / size_of::<AtomicU32>()..).unwrap_or_default()
    }
}
