//! Atomics, locks and `Arc` from std, or from loom with the feature `loom`, which sets `flechette_loom`.
//!
//! Code that loom checks imports them from here instead of from std. Loom is a model checker: it repeats a
//! small concurrent test with different interleavings of its threads.
//!
//! Code that loom does not check finds here how it handles poisoned locks ([`EvenPoisoned`]), and a wait for
//! other threads that has a limit ([`wait_until`]).

use std::sync::{LockResult, PoisonError};
use std::time::{Duration, Instant};

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
pub(crate) fn nap(_: Duration) {
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

/// How often [`wait_until`] looks.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Waits until something is done, at most for `limit`. Returns whether it is done.
pub(crate) fn wait_until(limit: Duration, is_done: impl Fn() -> bool) -> bool {
    let until = Instant::now() + limit;
    loop {
        if is_done() {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

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
