//! Counts the memory that each thread of the test program allocates.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes that the thread holds, and the most since it was last measured. A thread that frees memory of
    /// another one may hold less than nothing.
    static BYTES: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

/// Calls a function. Also returns the most bytes that its thread held at once, beside those of before. May be
/// nested.
pub(crate) fn measured<T>(call: impl FnOnce() -> T) -> (T, usize) {
    let (before, outer) = BYTES.get();
    BYTES.set((before, before));
    let result = call();
    let (after, most) = BYTES.get();
    BYTES.set((after, most.max(outer)));
    (result, usize::try_from(most - before).unwrap_or(0))
}

fn add(bytes: isize) {
    // While a thread ends, nothing is measured.
    let _ = BYTES.try_with(|counted| {
        let (held, most) = counted.get();
        counted.set((held + bytes, most.max(held + bytes)));
    });
}

/// The system's allocator.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: Every call is passed on unchanged, and counting does not allocate.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: The caller keeps the contract of the same call.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: The caller keeps the contract of the same call.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        add(-(layout.size() as isize));
        // SAFETY: The caller keeps the contract of the same call.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size as isize - layout.size() as isize);
        // SAFETY: The caller keeps the contract of the same call.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
