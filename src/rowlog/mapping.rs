//! A file's bytes as words that several threads read and write at once.
//!
//! Rows that training moves are a few hundred bytes each, and a call of the system for each costs ten times what
//! copying it does. So the file is mapped, and copying is all there is to do where its page is in memory.
//!
//! Only bytes that a call has written before may be touched here: their place on the disk is reserved, so that a full
//! disk is that call's error. Touching a page that is not in memory reads it; where the disk cannot, the
//! system ends the process (`SIGBUS`).
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use memmap2::{Advice, MmapRaw};

use crate::mem::prefetch::prefetch_first;

/// A file, mapped.
#[derive(Debug)]
pub(crate) struct Mapping(MmapRaw);

impl Mapping {
    /// All of the file, which must not be cut while this lives.
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let map = MmapRaw::map_raw(file)?;
        // A page that is not in memory must not bring in its neighbours too; see `Stripes::create`. Only advice.
        let _ = map.advise(Advice::Random);
        Ok(Self(map))
    }

    /// Copies the words from byte `at` on over `words`. Words that another thread writes meanwhile are each the old or the
    /// new one.
    #[inline]
    pub(crate) fn load(&self, words: &mut [f32], at: u64) {
        for (word, from) in words.iter_mut().zip(self.words(at)) {
            *word = f32::from_bits(from.load(Ordering::Relaxed));
        }
    }

    /// Asks memory for these bytes, which are loaded soon; not for pages that are on the disk.
    #[inline]
    pub(crate) fn prefetch(&self, at: u64, bytes: usize) {
        let words = self.words(at);
        prefetch_first(words, words.len().min(bytes.div_ceil(size_of::<AtomicU32>())));
    }

    /// Copies `words` over those from byte `at` on.
    #[inline]
    pub(crate) fn store(&self, words: &[f32], at: u64) {
        for (word, to) in words.iter().zip(self.words(at)) {
            to.store(word.to_bits(), Ordering::Relaxed);
        }
    }

    /// Asks for the pages of these bytes. Only advice.
    pub(crate) fn ask_for(&self, at: u64, bytes: usize) {
        let _ = self.0.advise_range(Advice::WillNeed, at as usize, bytes);
    }

    /// The word at byte `at`; sees all that its writer did before.
    #[inline]
    pub(crate) fn word(&self, at: u64) -> u32 {
        self.words(at).first().map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Writes the word at byte `at`.
    #[inline]
    pub(crate) fn set_word(&self, at: u64, word: u32) {
        if let Some(to) = self.words(at).first() {
            to.store(word, Ordering::Release);
        }
    }

    /// The words from byte `at` on, a multiple of four; none past the end.
    #[inline]
    fn words(&self, at: u64) -> &[AtomicU32] {
        let words = self.0.len() / size_of::<AtomicU32>();
        // SAFETY: a mapping begins on a page and so is aligned for words, and `words` of them lie within its length. It
        // lives as long as `self`, and with it the file, which has no name and which nobody cuts, so that all of it
        // stays readable and writable. Within the process it is touched only through these atomics, and
        // by the system on behalf of calls that write the file, none of which makes a word invalid.
        let all = unsafe { std::slice::from_raw_parts(self.0.as_mut_ptr().cast::<AtomicU32>(), words) };
        all.get(at as usize / size_of::<AtomicU32>()..).unwrap_or_default()
    }
}
