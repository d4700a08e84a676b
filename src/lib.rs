//! Flechette trains recommendation models with embedding tables larger than GPU memory, and serves
//! click-through-rate scores from them.
//!
//! # The path of a request
//!
//! ```text
//! server ----> batcher ----> engine ----> cache ----> store      rows of the distinct ids
//! decode,      merge         |            index,      mapped
//! encode       requests      |            slots       tables
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
//! the exceptions. An item is `pub` if the integration tests or the benches use it, and `pub(crate)`
//! otherwise. The library has no stable interface: programs talk to the server over gRPC, and read versions
//! as files.

#![warn(unreachable_pub)]
// Links to private items work, because these docs are built with `cargo doc --document-private-items`.
#![allow(rustdoc::private_intra_doc_links)]

#[cfg(test)]
#[path = "../tests/it/skip.rs"]
mod skip;

// The blank line between two modules keeps rustfmt from sorting them.

// Basic types, memory, configuration.
pub mod types;

pub mod mem;

pub mod sync;

pub mod config;

pub mod schema;

pub mod metrics;

pub mod predict;

// Kernels and devices.
pub mod compute;

pub mod device;

// Training data, recorded accesses, request batches.
pub mod dataset;

pub mod trace;

pub mod batcher;

// Storage of rows.
pub mod store;

pub mod cache;

// Scoring.
pub mod model;

pub mod engine;

pub mod server;

// Sizing and training.
pub mod planner;

pub mod rowlog;

pub mod trainer;

pub mod cli;
