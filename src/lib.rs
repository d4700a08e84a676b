//! Flechette serves click-through-rate scores from models whose embedding tables do not fit a
//! GPU, and trains them in place.

// Modules in reading order; a line between keeps it against the formatter.
// Modules in reading order.
pub mod batcher;
pub mod config;
pub mod metrics;
pub mod schema;
pub mod server;
pub mod types;

pub mod schema;

pub mod device;

pub mod store;

pub mod model;

pub mod dataset;

pub mod trainer;

pub mod cli;
pub mod cache;
pub mod sync;
