//! Flechette serves click-through-rate scores from models whose embedding tables do not fit a GPU, and trains
//! them.
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
//! The stages are in [`trainer`]'s `pipeline`. The reference trainer takes the same steps on tables in
//! memory.
//!
//! # What is public
//!
//! Modules stand in reading order; each imports only modules above it, with few exceptions (`tests/it/tidy`).
//! An item is `pub` if the benches use it, or the integration tests, which run the program or are a client of
//! a server; it is `pub(crate)` otherwise. Tests of a module's insides are in the module. The library has no
//! stable interface: programs talk to the server over gRPC, and read versions as files.

#![warn(unreachable_pub)]
// Under loom, most tests are left out.
#![cfg_attr(flechette_loom, allow(dead_code, unused_imports))]
// The readers of these docs work on the project: `cargo doc --document-private-items`.
#![allow(rustdoc::private_intra_doc_links)]

// Files that white-box tests share with the integration tests.
#[cfg(test)]
extern crate self as flechette;

#[cfg(test)]
#[path = "../tests/it/fake.rs"]
mod fake;

#[cfg(test)]
#[path = "../tests/it/skip.rs"]
mod skip;

#[cfg(test)]
#[cfg(not(flechette_loom))]
#[cfg(target_os = "linux")]
#[path = "../tests/it/pretend.rs"]
mod pretend;

// A blank line between modules keeps this order against the formatter.

// Words and memory.
pub mod types;

pub mod mem;

pub(crate) mod sync;

pub mod config;

pub mod schema;

pub mod metrics;

pub mod predict;

// Kernels and devices.
pub mod compute;

pub mod device;

// Data in, requests in.
pub mod dataset;

pub(crate) mod trace;

pub(crate) mod batcher;

// Rows.
pub mod store;

pub mod cache;

// Scores.
pub mod model;

pub(crate) mod engine;

pub mod server;

// Sizing and training.
pub mod planner;

pub mod rowlog;

pub mod trainer;

pub mod cli;
