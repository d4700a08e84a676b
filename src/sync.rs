//! Atomics, locks and `Arc` from std, or from loom with the feature `loom`, which sets `flechette_loom`.
//!
//! Code that loom checks imports them from here instead of from std. Loom is a model checker: it repeats a
//! small concurrent test with different interleavings of its threads.

#[cfg(flechette_loom)]
pub(crate) use loom::{
    sync::{
        Arc, Mutex, MutexGuard, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::yield_now,
};

/// Lets the other threads go on, between two checks of what this thread waits for.
#[cfg(flechette_loom)]
pub(crate) fn nap(_: std::time::Duration) {
    yield_now();
}

#[cfg(not(flechette_loom))]
pub(crate) use std::{
    sync::{
        Arc, Mutex, MutexGuard, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{sleep as nap, yield_now},
};
