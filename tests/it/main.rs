//! The integration tests: one binary, with one module per subject.

// A failed unwrap in a helper function fails the test, as it should.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod batcher;
mod cache_contract;
#[cfg(target_os = "linux")]
mod cache_memory;
mod cli_init;
mod cuda_cache;
mod cuda_compile;
mod cuda_driver;
mod cuda_open;
mod cuda_probe;
mod cuda_train;
#[cfg(feature = "cusim")]
mod cusim;
#[cfg(feature = "cusim")]
mod cusim_cache;
#[cfg(feature = "cusim")]
mod cusim_driver;
#[cfg(all(feature = "cusim", target_os = "linux"))]
mod cusim_kernels;
#[cfg(all(feature = "cusim", target_os = "linux"))]
mod cusim_serve;
#[cfg(feature = "cusim")]
mod cusim_tier;
#[cfg(feature = "cusim")]
mod cusim_train;
mod dataset;
mod demo;
mod gpu_subject;
mod learning;
mod memory;
mod operation;
#[cfg(target_os = "linux")]
mod out_of_core;
mod pipeline_contract;
mod plan;
mod plan_accuracy;
mod plan_counts;
#[cfg(target_os = "linux")]
mod pretend;
mod program;
mod refusals;
mod resources;
mod scores;
mod scores_from_files;
mod scratch_contract;
mod server;
mod serving;
mod skip;
mod store;
mod store_crash;
mod store_working;
mod tidy;
mod torch_fixture;
mod train_flags;
mod trainer;
mod verify;
mod warm_start;
mod wire;
