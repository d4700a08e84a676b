//! The integration tests: one binary, with one module per subject.

// A failed unwrap in a helper function fails the test, as it should.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[cfg(target_os = "linux")]
mod alerts;
#[cfg(target_os = "linux")]
mod attacks;
#[cfg(target_os = "linux")]
mod cache_memory;
mod certificates;
mod cli_init;
mod client_errors;
mod closed_pipes;
#[cfg(target_os = "linux")]
mod cuda_open;
#[cfg(all(feature = "cusim", target_os = "linux"))]
mod cusim_serve;
#[cfg(target_os = "linux")]
mod dashboards;
mod dataset;
mod demo;
mod fairness;
mod fake;
mod files;
mod find_p99;
mod following;
mod formats;
mod gpu;
mod kserve;
#[cfg(target_os = "linux")]
mod kserve_models;
mod kserve_python;
mod kserve_wire;
mod lagging;
mod learn;
mod learning;
mod lifecycle;
mod memory;
mod mixed_load;
mod operation;
#[cfg(feature = "otel")]
mod otel;
#[cfg(target_os = "linux")]
mod out_of_core;
mod overload;
mod own_data;
mod packaging;
mod plan;
mod plan_counts;
mod program;
#[cfg(target_os = "linux")]
mod prometheus;
mod python;
mod python_client;
mod readme;
mod refusals;
mod resets;
mod resources;
mod scores;
mod scores_from_files;
mod secrets;
#[cfg(target_os = "linux")]
mod serve_train;
#[cfg(target_os = "linux")]
mod serve_train_memory;
mod server;
mod serving;
mod skip;
mod small_frames;
#[cfg(target_os = "linux")]
mod status_page;
#[cfg(target_os = "linux")]
mod store_memory;
mod stream;
#[cfg(target_os = "linux")]
mod stub_driver;
mod switching;
mod tidy;
mod tls;
mod tokens;
mod tracing;
mod traffic;
mod train_data;
mod train_flags;
mod train_from;
mod train_metrics;
mod train_resume;
mod trained;
mod verify;
mod warm_start;
mod wire;
