//! std or loom, chosen once.
//!
//! Code whose interleavings are modelled takes its atomics and locks from here. Under
//! `--cfg flechette_loom` they are loom's, which run every model in every order that the memory
//! model allows; otherwise they are std's and cost nothing.

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
