//! Versions on disk: they read back to the bit. A damaged version is refused with the file's name, and the
//! previous version is used.

pub(crate) mod chain;
mod damage;
pub(crate) mod footprint;
pub(crate) mod forged;
pub(crate) mod fuzz;
mod names;
mod sample;
mod two_versions;
mod writers;
mod written;

pub(crate) use crate::store::crash::entries;
pub(crate) use sample::Sample;
