//! Atomics, locks and `Arc` from std, or from loom under `--cfg flechette_loom`.
//!
//! Code that loom checks imports them from here instead of from std. Loom is a model checker: it repeats a
//! small concurrent test with different interleavings of its threads.

#[cfg(flechette_loom)]
pub(crate) use loom::{
    sync::{
        Arc, Mutex, MutexGuard, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    thread::yield_now,
};

#[cfg(not(flechette_loom))]
pub(crate) use std::{
    sync::{
        Arc, Mutex, MutexGuard, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    thread::yield_now,
};
