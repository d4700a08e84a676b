//! A mapping whose pages come from the system, and go back to it, in pieces.
//!
//! While pages are taken away, every thread of the process that maps or unmaps memory waits, and so does one
//! that starts a thread. A gigabyte of small pages takes a third of a second of a thread of low priority, and
//! other threads were seen to wait for 0.9 s. So [`Pages`] takes 2 MiB away at a time, and the mapping only
//! when it is empty.
//!
//! A page comes when it is first written. That can take long: a virtual machine whose host had taken the
//! memory away was seen to wait 16 to 37 ms for a huge page. [`Pages::prefault`] gets them before.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};

use memmap2::{Mmap, MmapMut, MmapRaw};

use crate::pace;

/// Bytes that come or go at a time: a huge page. Pieces end where huge pages end, so that none is divided.
const PIECE: usize = 2 << 20;

/// A mapping that is emptied in pieces before it is removed.
#[derive(Debug)]
pub(crate) struct Pages<M: Mapped>(M);

/// The kinds of mappings.
pub(crate) trait Mapped {
    fn address(&self) -> usize;

    fn bytes(&self) -> usize;

    /// Gets pages, zeroed unless they are here. This is only advice: if it fails, they come later.
    fn get(&self, start: usize, bytes: usize);

    /// Takes pages away. If that fails, they stay until the mapping is removed.
    ///
    /// # Safety
    /// The contents must not be used any more: those of anonymous memory become zeros.
    #[cfg(unix)]
    unsafe fn take_away(&self, start: usize, bytes: usize);
}

macro_rules! mapped {
    ($($mapping:ty),*) => {$(
        impl Mapped for $mapping {
            fn address(&self) -> usize {
                self.as_ptr() as usize
            }

            fn bytes(&self) -> usize {
                self.len()
            }

            #[allow(unused_variables)]
            fn get(&self, start: usize, bytes: usize) {
                #[cfg(target_os = "linux")]
                let _ = self.advise_range(memmap2::Advice::PopulateWrite, start, bytes);
            }

            #[cfg(unix)]
            unsafe fn take_away(&self, start: usize, bytes: usize) {
                let forget = memmap2::UncheckedAdvice::DontNeed;
                // SAFETY: the caller ensures that the contents are not used any more.
                let _ = unsafe { self.unchecked_advise_range(forget, start, bytes) };
            }
        }
    )*};
}

mapped!(Mmap, MmapMut, MmapRaw);

impl<M: Mapped> Pages<M> {
    /// Gets all pages now, on systems that can (Linux 5.14). The contents stay as they are.
    pub(crate) fn prefault(&self) {
        self.pieces(|start, bytes| self.0.get(start, bytes));
    }

    /// Calls `each` with the start and the bytes of each piece.
    fn pieces(&self, mut each: impl FnMut(usize, usize)) {
        let (address, all) = (self.0.address(), self.0.bytes());
        let mut start = 0;
        while start < all {
            let bytes = (PIECE - (address + start) % PIECE).min(all - start);
            each(start, bytes);
            start += bytes;
            pace::rest();
        }
    }
}

impl<M: Mapped> From<M> for Pages<M> {
    fn from(mapping: M) -> Self {
        Self(mapping)
    }
}

impl<M: Mapped> Deref for Pages<M> {
    type Target = M;
    #[inline(always)]
    fn deref(&self) -> &M {
        &self.0
    }
}

impl<M: Mapped> DerefMut for Pages<M> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut M {
        &mut self.0
    }
}

impl<M: Mapped> Drop for Pages<M> {
    fn drop(&mut self) {
        // SAFETY: the mapping is being dropped, so no reference to its contents exists.
        #[cfg(unix)]
        self.pieces(|start, bytes| unsafe { self.0.take_away(start, bytes) });
    }
}

#[cfg(test)]
#[cfg(all(target_os = "linux", not(flechette_loom)))]
mod tests {
    use std::fs::File;
    use std::ops::Range;
    use std::os::unix::fs::FileExt;
    use std::sync::mpsc::{self, Sender};

    use super::*;

    /// A mapping that tells what is taken away, and what it contains when it is removed.
    struct Watched {
        memory: MmapMut,
        taken: Sender<Range<usize>>,
        left: Sender<Vec<u8>>,
    }

    impl Mapped for Watched {
        fn address(&self) -> usize {
            self.memory.address()
        }

        fn bytes(&self) -> usize {
            self.memory.bytes()
        }

        fn get(&self, start: usize, bytes: usize) {
            self.memory.get(start, bytes);
        }

        unsafe fn take_away(&self, start: usize, bytes: usize) {
            self.taken.send(start..start + bytes).unwrap();
            // SAFETY: as for this function.
            unsafe { self.memory.take_away(start, bytes) };
        }
    }

    impl Drop for Watched {
        fn drop(&mut self) {
            self.left.send(self.memory.to_vec()).unwrap();
        }
    }

    #[test]
    fn a_mapping_is_emptied_in_pieces_before_it_is_removed() {
        for bytes in [1, PIECE - 1, PIECE, 2 * PIECE + 12_345] {
            let ((taken, pieces), (left, contents)) = (mpsc::channel(), mpsc::channel());
            let mut memory = MmapMut::map_anon(bytes).unwrap();
            memory.fill(7);
            drop(Pages::from(Watched { memory, taken, left }));
            let mut end = 0;
            for piece in pieces {
                assert!(piece.start == end && piece.len() <= PIECE, "{piece:?} after {end}");
                end = piece.end;
            }
            assert_eq!(end, bytes);
            // New pages of anonymous memory are zeros.
            assert!(contents.recv().unwrap().iter().all(|&byte| byte == 0), "{bytes}");
        }
    }

    const PAGE: usize = 4096;

    /// How many pages are in memory: bit 63 of each entry of `/proc/self/pagemap` (proc_pid_pagemap(5)).
    fn resident(memory: &[u8]) -> usize {
        let mut entries = vec![0_u64; memory.len() / PAGE];
        let from = memory.as_ptr() as usize / PAGE * size_of::<u64>();
        let pages = File::open("/proc/self/pagemap").unwrap();
        pages.read_exact_at(bytemuck::cast_slice_mut(&mut entries), from as u64).unwrap();
        entries.into_iter().filter(|entry| entry >> 63 == 1).count()
    }

    #[test]
    fn prefaulted_memory_is_resident_and_unchanged() {
        let pages = PIECE / PAGE + 3;
        let mut memory = Pages::from(MmapMut::map_anon(pages * PAGE).unwrap());
        memory[..PAGE].fill(7);
        assert_eq!(resident(&memory), 1);
        memory.prefault();
        assert_eq!(resident(&memory), pages);
        assert!(memory[..PAGE].iter().all(|&byte| byte == 7) && memory[PAGE..].iter().all(|&byte| byte == 0));
    }
}
