//! Flechette serves click-through-rate scores from models whose embedding tables do not fit a
//! GPU, and trains them in place.

// Modules in reading order.
pub mod schema;
pub mod types;

pub mod device;
