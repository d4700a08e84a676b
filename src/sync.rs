//! Atomics, locks and `Arc` from std, or from loom with the feature `loom`, which sets `flechette_loom`.
//!
//! Code that loom checks imports them from here instead of from std. Loom is a model checker: it repeats a
//! small concurrent test with different interleavings of its threads.

use std::sync::{LockResult, PoisonError};

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

/// What a lock protects, also after a thread has panicked while it held the lock. A panic ends one batch, one
/// call or one thread, and the server goes on. So no value behind a lock may be half changed where a panic is
/// possible.
pub(crate) trait EvenPoisoned<T> {
    /// The value, whether or not the lock is poisoned.
    fn even_poisoned(self) -> T;
}

impl<T> EvenPoisoned<T> for LockResult<T> {
    fn even_poisoned(self) -> T {
        self.unwrap_or_else(PoisonError::into_inner)
    }
}
