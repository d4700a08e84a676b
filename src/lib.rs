//! Flechette trains recommendation models with embedding tables larger than GPU memory, and serves
//! click-through-rate scores from them.
//!
//! # The path of a request
//!
//! ```text
//! server ----> batcher ----> engine ----> cache ----> store      rows of the distinct ids
//! decode,      merge         |            index,      tables in
//! encode       requests      |            slots       memory or mapped
//! (schema)                   +----------> compute                gather-pool: rows to input rows
//!                            +----------> model                  layers: input rows to scores
//! ```
//!
//! # The path of a training batch
//!
//! ```text
//! dataset --> Load --> Plan --> Collect --> Exchange --> Insert --> Train --> store
//! click       encode   slots,   rows out    host to      rows to    step      a new
//! logs                 victims  of rowlog   device       slots                version
//! ```
//!
//! The stages are in `trainer/pipeline/`. The reference trainer takes the same training steps one after the
//! other, with all rows in memory.
//!
//! # What is public
//!
//! Modules are listed in reading order. Each imports only modules above it; `tests/it/tidy/rules.rs` lists
//! which. An item is `pub` if the benches use it, or the integration tests, which run the program or are
//! clients of a server; otherwise it is `pub(crate)`. Tests of a module's private items are in the module.
//! The library has no stable interface: programs talk to the server over gRPC, and read versions as files.

#![warn(unreachable_pub)]
// They panic if their reader has ended; commands use `cli::terminal`.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]
// Loom builds leave most tests out, so much is unused in them.
#![cfg_attr(flechette_loom, allow(dead_code, unused_imports))]
// Links to private items work, because these docs are built with `cargo doc --document-private-items`.
#![allow(rustdoc::private_intra_doc_links)]

// Files that white-box tests share with the integration tests.
#[cfg(test)]
extern crate self as flechette;

#[cfg(test)]
#[path = "../tests/it/fake.rs"]
mod fake;

#[cfg(test)]
mod fuzz;

#[cfg(test)]
#[path = "../tests/it/skip.rs"]
mod skip;

#[cfg(test)]
#[cfg(not(flechette_loom))]
#[cfg(target_os = "linux")]
#[path = "../tests/it/stub_driver.rs"]
mod stub_driver;

// The blank line between two modules keeps rustfmt from sorting them.

// Basic types, memory, configuration.
pub mod types;

pub(crate) mod pace;

pub mod mem;

pub(crate) mod sync;

pub(crate) mod bounded_thread;

pub mod config;

pub mod schema;

pub mod metrics;

pub mod predict;

// Kernels and devices.
pub mod compute;

pub mod device;

// Storage of rows and of learned samples.
pub mod store;

pub(crate) mod learnlog;

// Training data, recorded accesses, request batches.
pub mod dataset;

pub(crate) mod trace;

pub(crate) mod batcher;

// The cache of rows.
pub mod cache;

// Scoring.
pub mod model;

pub(crate) mod engine;

pub mod server;

// Sizing and training.
pub mod planner;

pub mod rowlog;

pub mod trainer;

pub mod cli;
