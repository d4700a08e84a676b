//! Flechette serves click-through-rate scores from models whose embedding tables do not fit a
//! GPU, and trains them in place.

// Modules in reading order.
pub mod batcher;
pub mod config;
pub mod metrics;
pub mod schema;
pub mod server;
pub mod types;
