//! The driver on machines with a stub driver, and on a real GPU if there is one.

mod compile;
mod driver;
pub(crate) mod every_gpu;
mod open;
mod probe;
