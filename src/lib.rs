//! Flechette serves click-through-rate scores from models whose embedding tables do not fit a
//! GPU, and trains them in place.

#![warn(unreachable_pub)]

// Modules in reading order; a blank line between keeps it against the formatter.
pub mod types;

pub mod mem;

pub mod schema;

pub mod config;

pub mod metrics;

pub mod sync;

pub mod predict;

pub mod compute;

pub mod device;

pub mod store;

pub mod rowlog;

pub mod trace;

pub mod cache;

pub mod model;

pub mod engine;

pub mod batcher;

pub mod server;

pub mod dataset;

pub mod planner;

pub mod trainer;

pub mod cli;
