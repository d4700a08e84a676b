//! Flechette serves click-through-rate scores from models whose embedding tables do not fit a
//! GPU, and trains them in place.

// Modules in reading order.
pub mod device;
pub mod model;
pub mod cli;
pub mod dataset;
pub mod schema;
pub mod store;
pub mod types;
