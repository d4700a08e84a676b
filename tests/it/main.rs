//! Integration tests, one binary: a module a subject.

mod cli_init;
mod dataset;
mod server;
mod serving;
mod store;
mod store_crash;
#[cfg(feature = "cusim")]
mod cusim;
mod tidy;
mod wire;
