//! Atomics and locks from std, or from loom under `--cfg flechette_loom`.
//!
//! Code with loom models uses these. Loom runs a model in every order that the memory model allows.

#[cfg(flechette_loom)]
pub(crate) use loom::{
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    thread::yield_now,
};

#[cfg(not(flechette_loom))]
pub(crate) use std::{
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    thread::yield_now,
};
